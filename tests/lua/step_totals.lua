-- m.step_total: while a step's microbatches add to a total, the model reads the one of the step before.
local m = require "mlua"
local core = require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")

local A = m.axes { batch = 4, seq = 8, vocab = 256, embed = 8 }
local Net = m.module("Net", function(self)
  self.table, self.seen, self.count = m.param { A.vocab, A.embed, init = 0.5 }, m.buffer { A.vocab }, m.buffer {}
  self.whole = core.state { axes = {}, dtype = "i32", kind = "other", init = m.full({}, 0, "i32") } -- of no name, as is the next
  self.row = core.state { axes = { A.embed }, dtype = "f32", kind = "other", init = m.zeros { A.embed } }
end)
function Net:forward(tokens)
  m.step_total(self.seen, m.one_hot(tokens, A.vocab):sum("batch", "seq"))
  m.step_total(self.count, m.ge(tokens, 0):cast("f32"):sum())
  m.step_total(self.whole, m.ge(tokens, 0):cast("i32"):sum())
  m.step_total(self.row, m.ones { A.embed })
  return self.table:gather(tokens, "vocab"):dot(self.table, "embed") + 0.1 * self.seen:read()
end

local function train(accum)
  local losses, values, net = {}, {}, Net()
  for i = 1, A.vocab.size * A.embed.size do values[i] = 0.5 * math.sin(i * i) end
  net.table:set(values)
  m.train {
    model = net, batch = A.batch, seq = A.seq, steps = 3, accum = accum, skip = 0, log_every = 100,
    on_step = function(step, out) losses[step] = out.loss end,
  }
  local total = m.compile(function() return { count = net.count:read(), whole = net.whole:read(), row = net.row:read():sum() } end, {})
  return losses, total {}.count, total {}
end

local whole, count = train(1)
local cut, of_cut, totals = train(4)
check.equal(totals.whole, count, "tokens as an integer")
check.equal(totals.row, 4 * A.embed.size, "one for each microbatch")
check.equal(count, A.batch.size * A.seq.size, "tokens")
check.equal(of_cut, count, "tokens of all microbatches")
for step = 1, 3 do check.near(cut[step], whole[step], 1e-5, ("the loss of step %d"):format(step)) end
check.done()
