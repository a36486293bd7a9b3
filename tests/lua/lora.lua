-- Adapters: what they compute is (w + scale a b) in every product and lookup, nothing else learns, merging keeps the result.
local m = require "mlua"
local core = require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")

local A = m.axes { batch = 3, seq = 4, vocab = 11, embed = 8, heads = 2, head_dim = 4, ffn = 12 }
local Block = m.module("Block", function(self)
  self.wq, self.wo = m.param { A.embed, A.heads, A.head_dim, init = 0.3 }, m.param { A.heads, A.head_dim, A.embed, init = 0.3 }
  self.mlp = { up = m.param { A.embed, A.ffn, init = 0.3 }, bias = m.bias { A.ffn } }
  self.down = m.param { A.ffn, A.embed, init = 0.3 }
end)
function Block:forward(x)
  x = x + x:dot(self.wq, "embed"):dot(self.wo, "heads", "head_dim")
  return x + m.tanh(self.mlp.up:dot(x, "embed") + self.mlp.bias):dot(self.down, A.ffn)
end
local Model = m.module("Model", function(self)
  self.table, self.blocks = m.param { A.vocab, A.embed, init = 0.5 }, m.stack(2, Block)
end)
function Model:forward(tokens)
  local x = self.table:gather(tokens, "vocab")
  for _, block in ipairs(self.blocks) do x = block(x) end
  return x:dot(self.table, "embed") -- reads the table by its second axis
end

local tokens = { 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0, 1 }
local inputs = { tokens = { A.batch, A.seq, dtype = "i32" } }
local function logits_of(model)
  local f = m.compile(function(i) return model(i.tokens) end, inputs)
  return f { tokens = tokens }:table()
end
local function flat(value, list)
  list = list or {}
  if type(value) == "table" then for _, item in ipairs(value) do flat(item, list) end else list[#list + 1] = value end
  return list
end
local function values_of(p) return flat(p:get():table()) end

local model = Model()
local before = flat(logits_of(model))
check.equal(#m.parameters(model), 11)
m.lora(model, { rank = 2, alpha = 6, match = { "wq", "wo", "down", "blocks%.%d+%.mlp%.up", "table" } })
local parameters, names = m.parameters(model)
local listed = {}
for i, name in ipairs(names) do listed[i] = name end
table.sort(listed)
check.equal(table.concat(listed, " ", 1, 6), "blocks.1.down_lora.a blocks.1.down_lora.b blocks.1.mlp.up_lora.a blocks.1.mlp.up_lora.b "
  .. "blocks.1.wo_lora.a blocks.1.wo_lora.b")
check.equal(("%d %s"):format(#listed, listed[18]), "18 table_lora.b")
check.all(flat(logits_of(model)), before, 0, "b is zero at first") -- to the bit
check.equal(table.concat(model.blocks[1].wo_lora.a:axes(), " "), "heads head_dim rank")
check.equal(table.concat(model.blocks[1].wo_lora.b:axes(), " "), "rank embed")

-- Values for the b's; another model whose weights are w + 3 a b computes the same, and so do gradients.
for n, p in ipairs(parameters) do
  local values = m.host("f32", p:elements())
  for i = 1, #values do values[i] = 0.2 * math.sin(7 * n + i) end
  p:set(flat(values:table()))
end
local other = Model()
local whole = { table = other.table }
for i = 1, 2 do
  local block = other.blocks[i]
  whole["blocks." .. i .. ".wq"], whole["blocks." .. i .. ".wo"], whole["blocks." .. i .. ".down"], whole["blocks." .. i .. ".mlp.up"] =
    block.wq, block.wo, block.down, block.mlp.up
end
local weights = m.parameters(model, { frozen = true })
for _, p in ipairs(m.parameters(other)) do
  for _, w in ipairs(weights) do
    if "Model2." .. w:name() == p:name() then p:set(w:get()) end
  end
end
local adapters = {}
for i, name in ipairs(names) do adapters[name] = parameters[i] end
for name, w in pairs(whole) do
  local a, b = adapters[name .. "_lora.a"], adapters[name .. "_lora.b"]
  local A_, B_, W = values_of(a), values_of(b), values_of(w)
  local columns = #B_ // 2
  for i = 1, #W do
    local row, column = (i - 1) // columns, (i - 1) % columns + 1
    W[i] = W[i] + 3 * (A_[2 * row + 1] * B_[column] + A_[2 * row + 2] * B_[columns + column])
  end
  w:set(W)
end
local adapted = flat(logits_of(model))
local plain = flat(logits_of(other))
local moved = 0
for i = 1, #before do moved = math.max(moved, math.abs(before[i] - adapted[i])) end
check.equal(moved > 0.5, true, "adapters change the logits")
check.all(adapted, plain, 2e-5, "adapted logits")

-- Training changes the adapters alone; merging keeps what the model computes, and trains all again.
local frozen = values_of(model.blocks[1].wq)
local function loss(tokens_, targets) return m.cross_entropy(model(tokens_), targets) end
local result = m.train { model = model, loss = loss, batch = A.batch, seq = A.seq, vocab = 256, steps = 0 }
check.equal(result.steps, 0)
local step = m.compile(function(i)
  local sum, count = m.cross_entropy(model(i.tokens), i.tokens)
  local ps = m.parameters(model)
  m.sgd { lr = 0.01 }.update(ps, m.grad(sum / count, ps), { rate = 1, step = 1 })
  return sum / count
end, inputs)
local first = step { tokens = tokens }
for _ = 1, 20 do step { tokens = tokens } end
check.equal(step { tokens = tokens } < 0.8 * first, true, "the loss goes down")
check.all(values_of(model.blocks[1].wq), frozen, 0, "a frozen weight")
local trained = flat(logits_of(model))
m.merge_lora(model)
check.all(flat(logits_of(model)), trained, 2e-5, "merged")
check.equal(#m.parameters(model), 11)
check.equal(rawequal(model.blocks[1].wq_lora, nil), true)

-- What is wrong is said.
check.raises('m.lora: no parameter is called "wx"', m.lora, model, { match = "wx" })
check.raises("m.lora's rank must be a positive integer, got 0", m.lora, model, { rank = 0 })
check.raises("has one axis", m.lora, model, { match = "bias" })
check.raises("m.lora has no option \"r\"", m.lora, model, { r = 4 })
check.raises("m.lora takes a module, got 3", m.lora, 3)
check.raises("takes a module that m.lora was given", m.merge_lora, model)
check.done()
