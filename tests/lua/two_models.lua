-- Two models and several trainings in one script: names, slots, accumulators, evaluation.
local m = require "mlua"
local core = require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")

local A = m.axes { embed = 16, vocab = 256, seq = 12, batch = 4 }
local Net = m.module("Net", function(self)
  self.embedding, self.norm, self.out = m.param { A.vocab, A.embed }, m.rms_norm { A.embed }, m.param { A.embed, A.vocab }
end)
function Net:forward(tokens) return self.norm(self.embedding:gather(tokens, "vocab")):dot(self.out, "embed") end

-- A text that no commit changes.
local text = os.tmpname()
do
  local file <close> = assert(io.open(text, "wb"))
  file:write(("the quick brown fox jumps over the lazy dog; pack my box with five dozen jugs. "):rep(200))
end
local function train(model, more)
  local losses = {}
  local o = {
    model = model, batch = A.batch, seq = A.seq, vocab = 256, steps = 3, optimizer = m.adamw { lr = 0.01 }, log_every = 100,
    data = text,
    on_step = function(step, out) losses[step] = out.loss end,
  }
  for key, value in pairs(more or {}) do o[key] = value end
  local given = {}
  for key, value in pairs(o) do given[key] = value end
  local result = m.train(o)
  for key, value in pairs(o) do check.equal(value, given[key], "m.train left the option " .. key) end
  return losses, result
end
local function names(model)
  local list = select(2, m.parameters(model))
  table.sort(list)
  return table.concat(list, " ")
end

local first, second = Net(), Net()
local a = train(first)
local b = train(second, { accum = 2 })
check.equal(names(first), "embedding norm.gain out", "names of the first model")
check.equal(names(second), "Net2.embedding Net2.norm.gain Net2.out", "names of the second")
check.equal(a[1] ~= b[1], true, "the second model starts elsewhere")

-- A second optimizer starts with slots of its own, and trains the parameters further.
local c = train(first, { accum = 2 })
check.equal(c[1] < a[1], true, "the second training goes on")
train(second, { accum = 4 })

-- Evaluation measures the same samples whatever accum is.
local still = m.sgd { lr = 0 }
local _, whole = train(second, { eval_every = 3, eval_batches = 2, optimizer = still })
local _, cut = train(second, { eval_every = 3, eval_batches = 2, optimizer = still, accum = 4 })
check.near(cut.eval_loss, whole.eval_loss, 1e-5, "evaluation loss with accum")

-- Layers outside a module do not collide, and m.bias leaves its argument alone.
local x = m.zeros { A.embed }
m.rms_norm { A.embed }(x)
m.rms_norm { A.embed }(x)
local axes = { A.embed, A.batch }
m.bias(axes)
check.equal(axes.init, nil, "m.bias changed the list of axes")
os.remove(text)
check.done()
