-- One more m.train of a model goes on where the last one stopped; another model begins anew.
local m = require "mlua"
local core = require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")

local A = m.axes { embed = 8, vocab = 256, seq = 8, batch = 8 }
local Model = m.module("Model", function(self) self.table, self.out = m.param { A.vocab, A.embed }, m.param { A.embed, A.vocab } end)
function Model:forward(tokens)
  return m.dropout(self.table:gather(tokens, "vocab"), 0.3):dot(self.out, "embed")
end
local function fresh() -- the same values each time: named alike, but for the prefix that the script's first model has not
  local model = Model()
  m.parameters(model)
  model.table:set((m.host("f32", 256, 8):fill(0.5)))
  local out = m.host("f32", 8, 256)
  for i = 1, #out do out[i] = math.sin(i) * 0.1 end
  model.out:set(out)
  return model
end

-- Appends the losses of a training to a list.
local function train(model, losses, options)
  local o = {
    model = model, batch = A.batch, seq = A.seq, steps = 6, log_every = 1000, seed = 5,
    on_step = function(_, out) losses[#losses + 1] = out.loss end,
  }
  for key, value in pairs(options) do o[key] = value end
  m.train(o)
  return losses
end
local function same(actual, expected, what)
  check.equal(#actual, #expected, what)
  for i = 1, #expected do check.equal(actual[i], expected[i], what .. " " .. i) end
end

-- Data, dropout and AdamW's bias correction of two trainings are those of a long one, to the bit.
local whole = train(fresh(), {}, { steps = 7, optimizer = m.adamw { lr = 0.05 } })
local model, optimizer, parts = fresh(), m.adamw { lr = 0.05 }, {}
train(model, parts, { steps = 3, optimizer = optimizer })
train(model, parts, { steps = 4, optimizer = optimizer })
same(parts, whole, "in two trainings")
local accumulated = fresh()
parts, optimizer = {}, m.adamw { lr = 0.05 }
train(accumulated, parts, { steps = 3, optimizer = optimizer, accum = 2 })
train(accumulated, parts, { steps = 4, optimizer = optimizer, accum = 4 })
for i = 1, 7 do check.near(parts[i], whole[i], 1e-5, "in two trainings, of 2 and 4 microbatches") end

-- Another optimizer counts its own updates, which begin at 1: its first is that of a fresh one on the same values.
local function moved(before)
  local p = fresh()
  local first = m.adamw { lr = 0.05, weight_decay = 0 }
  if before then
    train(p, {}, { steps = 3, optimizer = m.sgd { lr = 0 }, skip = 0 })
  end
  train(p, {}, { steps = 1, optimizer = first, skip = 0, clip = 0 })
  local largest = 0
  for i = 1, 2048 do largest = math.max(largest, math.abs(p.table:get()[i] - 0.5)) end
  return largest
end
check.near(moved(true), 0.05, 1e-3, "the first update of another optimizer")
check.near(moved(false), 0.05, 1e-3, "the first update")

-- At a rate of 0 a loss says which samples it is of. Without dropout, which differs by step.
local Plain = m.module("Plain", function(self) self.table, self.out = m.param { A.vocab, A.embed }, m.param { A.embed, A.vocab } end)
function Plain:forward(tokens) return self.table:gather(tokens, "vocab"):dot(self.out, "embed") end
local function plain()
  local p = Plain()
  m.parameters(p)
  local values = m.host("f32", 256, 8)
  for i = 1, #values do values[i] = math.cos(i) end
  p.table:set(values)
  p.out:set(values, { A.vocab, A.embed })
  return p
end
local still = m.sgd { lr = 0 }
local function samples(p, steps, options)
  options.steps, options.optimizer = steps, still
  return train(p, {}, options)
end
local all = samples(plain(), 12, { batch = m.axis("batch", 4) })
local p = plain()
local double = samples(p, 2, {})
check.near(double[1], (all[1] + all[2]) / 2, 1e-6, "batch of 8")
check.near(double[2], (all[3] + all[4]) / 2, 1e-6, "batch of 8")
local four = { batch = m.axis("batch", 4) }
same(samples(p, 2, four), { all[5], all[6] }, "another batch goes on by the samples")
same(samples(plain(), 2, four), { all[1], all[2] }, "another model")
same(samples(p, 1, { batch = four.batch, skip = 4 }), { all[2] }, "skip")
same(samples(p, 1, four), { all[3] }, "after skip")
local other = samples(p, 2, { batch = four.batch, seed = 6 })
check.equal(other[1] ~= all[4], true, "another seed")
same(samples(plain(), 2, { batch = four.batch, seed = 6 }), other, "another seed begins at 0")
local file = os.tmpname()
local f = assert(io.open(file, "w"))
for i = 1, 500 do f:write(("%d squared is %d. "):format(i, i * i)) end
f:close()
local of_file = samples(plain(), 3, { batch = four.batch, data = file })
same(samples(p, 2, { batch = four.batch, data = file }), { of_file[1], of_file[2] }, "another file begins at 0")
same(samples(p, 1, four), { all[4] }, "the first file again")
same(samples(p, 1, { batch = four.batch, data = m.corpus(file) }), { of_file[3] }, "the other file again, as a corpus")
os.remove(file)

-- The same parameters in a wrapper go on, and so does what is added to those that are frozen.
local Wrapper = m.module("Wrapper", function(self) self.inner = p end)
function Wrapper:forward(tokens) return self.inner(tokens) end
same(samples(Wrapper(), 1, four), { all[5] }, "in a wrapper")
m.freeze(p)
local Adapted = m.module("Adapted", function(self) self.base, self.shift = p, m.param { A.vocab } end)
function Adapted:forward(tokens) return self.base(tokens) + self.shift end
same(samples(Adapted(), 1, four), { all[6] }, "beside frozen weights")
check.done()
