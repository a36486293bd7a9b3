-- args: run --device cpu -n 2 --mesh pp=2
-- States as long as the batch that scans carry from step to step, in pipeline stages and with accumulation: each microbatch begins with
-- its own rows and assigns these alone.
local m, core = require "mlua", require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")
local BATCH, SEQ, STEPS = 8, 3, 3
local A = m.axes { batch = BATCH, seq = SEQ, embed = 4, vocab = 16 }
local Layer = m.module("Layer", function(self)
  self.w, self.memory = m.param { A.embed, init = "ones" }, m.buffer { A.batch }
end)
function Layer:forward(x, ids)
  local y, last = m.scan(function(s, t) local s2 = s * 0.5 + t; return s2, s end, { axis = "seq", state = self.memory, inputs = ids })
  self.memory:assign(last)
  return x * self.w * (1 + 0.01 * y)
end
local Model = m.module("Model", function(self) self.table, self.layers = m.param { A.vocab, A.embed }, m.stack(2, Layer) end)
function Model:forward(tokens)
  local x = self.table:gather(tokens, "vocab")
  for _, layer in ipairs(self.layers) do x = layer(x, tokens:cast "f32") end
  return x:dot(self.table, "embed")
end
local model = Model()
local function token(index, at) return (index * 7 + at * 3) % 16 end
m.train {
  model = model, batch = A.batch, seq = A.seq, steps = STEPS, accum = 2, optimizer = m.sgd { lr = 0.1 },
  layout = m.layout { mesh = { { "pp", 1 } }, stages = { pp = "layers" } },
  inputs = { tokens = { A.batch, A.seq, dtype = "i32" }, targets = { A.batch, A.seq, dtype = "i32" } },
  sample = function(index)
    local t = {}
    for k = 1, SEQ do t[k] = token(index, k) end
    return { tokens = t, targets = t }
  end,
}
local expected = {}
for b = 1, BATCH do
  local s = 0
  for step = 0, STEPS - 1 do
    for k = 1, SEQ do s = s * 0.5 + token(step * BATCH + b - 1, k) end
  end
  expected[b] = s
end
for i = 1, 2 do check.all(model.layers[i].memory:get(), expected, 1e-6, "the memory of layer " .. i) end
check.done()
