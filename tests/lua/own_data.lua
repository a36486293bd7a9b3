-- Examples of a script's own: the numbers they draw, which indices are asked for, and that nothing but the index matters.
local m = require "mlua"
local core = require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")

-- Numbers are of (seed, index) and their place in what is drawn, whether one by one or in bulk.
local a, b, c = m.random_numbers(7, 3), m.random_numbers(7, 3), m.random_numbers(7, 4)
local whole = a:fill(m.host("i32", 100), -5, 5)
local least, largest, same, mean, square = 5, -5, 0, 0, 0
for i = 1, 100 do
  check.equal(b:integer(-5, 5), whole[i], "an integer")
  least, largest = math.min(least, whole[i]), math.max(largest, whole[i])
  if c:integer(-5, 5) == whole[i] then same = same + 1 end
end
check.equal(least, -5, "the least")
check.equal(largest, 5, "the largest")
check.equal(same < 40, true, "another index draws other numbers")
check.equal(a:uniform(), b:uniform(), "what follows")
check.equal(a:integer(math.mininteger, math.maxinteger), b:integer(math.mininteger, math.maxinteger), "all integers")
check.equal(a:restart(7, 3):integer(-5, 5), whole[1], "restart")
local normals = a:fill_normal(m.host("f32", 20000), 2, 3)
for i = 1, #normals do mean, square = mean + normals[i] / #normals, square + normals[i] ^ 2 / #normals end
check.near(mean, 2, 0.05, "the mean")
check.near(math.sqrt(square - mean ^ 2), 3, 0.05, "the deviation")
local uniform = a:fill(m.host("f64", 1000), 10, 20)
for i = 1, #uniform do check.equal(uniform[i] >= 10 and uniform[i] < 20, true, "uniform") end

-- A corpus by position.
local corpus, tokens = m.corpus(), m.host("i32", 32)
check.equal(corpus:text(corpus:read(tokens, 100)):sub(11), corpus:text(corpus:read(m.host("i32", 22), 110)), "read")
check.equal(#corpus:text(corpus:read(tokens, corpus:size() - 32)), 32, "the end")
check.raises("are not among them", corpus.read, corpus, tokens, corpus:size() - 31)
check.raises("are not among them", corpus.read, corpus, tokens, -1)
check.raises("host array of i32", corpus.read, corpus, m.host("f32", 4), 0)

-- Each step has the examples of its own indices, whatever it is cut into; a second training continues, and none is made beyond the
-- last step. Evaluations begin at 0.
local A = m.axes { batch = 4, seq = 3, embed = 2, vocab = 8 }
local Model = m.module("Model", function(self) self.table = m.param { A.vocab, A.embed } end)
function Model:forward(ids) return self.table:gather(ids, "vocab"):dot(self.table, "embed") end
local function train(model, options)
  local made, evaluated, losses = {}, {}, {}
  local function example(list)
    return function(index, random)
      list[#list + 1] = index
      return { tokens = random:fill(m.host("i32", 3), 0, 7), targets = random:fill(m.host("i32", 3), 0, 7) }
    end
  end
  local o = {
    model = model, batch = A.batch, seq = A.seq, steps = 3, seed = 5, optimizer = m.sgd { lr = 0.5 },
    inputs = { tokens = { A.batch, A.seq, dtype = "i32" }, targets = { A.batch, A.seq, dtype = "i32" } },
    sample = example(made), eval_sample = example(evaluated),
    on_step = function(_, out) losses[#losses + 1] = out.loss end,
  }
  for key, value in pairs(options or {}) do o[key] = value end
  m.train(o)
  return made, losses, evaluated
end
local function indices(first, count)
  local list = {}
  for i = 1, count do list[i] = first + i - 1 end
  return list
end
local model = Model()
local made, losses = train(model)
check.all(made, indices(0, 12), 0, "the first training")
check.all(train(model), indices(12, 12), 0, "the second")
check.all(train(model, { skip = 2, steps = 1 }), indices(2, 4), 0, "skip")
local start = model.table:get()
local function again(options)
  model.table:set(start)
  local indices_made, again_losses, evaluated = train(model, options)
  return indices_made, again_losses, evaluated
end
local _, whole_losses = again { skip = 0 }
local cut_made, cut_losses, evaluated = again { skip = 0, accum = 2, eval_every = 3, eval_batches = 1 }
check.all(cut_made, indices(0, 12), 0, "microbatches")
check.all(cut_losses, whole_losses, 1e-6, "losses of microbatches")
check.all(evaluated, { 0, 1, 0, 1, 2, 3 }, 0, "evaluation") -- the first microbatch before the first step
check.equal(#losses, 3, "on_step")
check.done()
