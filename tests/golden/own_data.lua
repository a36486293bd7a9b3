-- args: run --device cpu --quiet SCRIPT
-- Examples that do not fit the inputs: the input, the index and the line of the function that made them.
local m = require "mlua"
local A = m.axes { vocab = 16, embed = 4, seq = 3, batch = 2, pixels = 2 }
local Model = m.module("Model", function(self) self.table, self.up = m.param { A.vocab, A.embed }, m.param { A.pixels, A.embed } end)
function Model:forward(tokens, image)
  return (self.table:gather(tokens, "vocab") + image:dot(self.up, "pixels")):dot(self.table, "embed")
end
local model = Model()
local specs = { tokens = { A.batch, A.seq, dtype = "i32" }, image = { A.batch, A.pixels } }

local function train(what, sample, options)
  local o = {
    model = model, batch = A.batch, seq = A.seq, steps = 2, skip = 0, inputs = specs, sample = sample,
    loss = function(i) return m.cross_entropy(model(i.tokens, i.image), i.tokens) end,
  }
  for key, value in pairs(options or {}) do o[key] = value or nil end
  local ok, message = pcall(m.train, o)
  print(("%s: %s"):format(what, ok and "trained" or tostring(message)))
end
local function with(key, value)
  return function(index)
    local example = { tokens = { 1, 2, 3 }, image = { 0, 0 } }
    if index == 1 then example[key] = value end
    return example
  end
end

train("whole", with("tokens", m.host("i32", 3)))
train("nothing", function() end)
train("a missing input", function() return { tokens = { 1, 2, 3 } } end)
train("an input too much", function(index) return { tokens = { 1, 2, 3 }, image = { 0, 0 }, imgae = index } end)
train("too long", with("tokens", { 1, 2, 3, 4 }))
train("of another size", with("image", m.host("f32", 3)))
train("of another dtype", with("tokens", m.host("f32", 3)))
train("not a number", with("image", { 0, 0 / 0 }))
train("outside of the vocabulary", with("tokens", { 1, 16, 3 }))
train("not an integer", with("tokens", { 1, 2.5, 3 }))
train("an error", function(index) return { tokens = index.x } end)
train("no sample", nil, {})
train("no loss", with(), { loss = false })
train("no eval_sample", with(), { eval_every = 1 })
train("a name that is taken", with(), { inputs = { step = { A.batch } } })
train("no batch", with(), { inputs = { tokens = { A.seq, A.batch, dtype = "i32" } } })
train("no inputs", with(), { inputs = false })
train("data too", with(), { vocab = 8 })
train("data from a file", with(), { data = "text" })
train("an unknown input", with(), { loss = function(i) return i.tokenz:sum(), 1 end })
local function result(what, results)
  train(what, with("tokens", { 1, 2, 3 }), { loss = function(i)
    local sum, count = m.cross_entropy(model(i.tokens, i.image), i.tokens)
    return sum, count, results(i, sum, count)
  end })
end
result("a result", function(_, sum, count) return { half = { sum, 2 * count }, one = { 1, 1 } } end)
result("a tensor", function(_, sum) return sum end)
result("no count", function(_, sum) return { half = sum } end)
result("an axis", function(i) return { pixels = { i.image:sum "batch", 1 } } end)
result("a name that each line has", function(_, sum) return { grad_norm = { sum, 1 } } end)
result("a name of evaluation", function(_, sum) return { eval_half = { sum, 1 } } end)
result("no name", function(_, sum) return { { sum, 1 } } end)

local random = m.random_numbers(1, 2)
for _, call in ipairs {
  function() random:fill(3) end, function() random:integer(3, 1) end, function() random:fill(m.host("i32", 2), 0, 1 << 40) end,
  function() random:fill_normal(m.host("i32", 2)) end, function() random:uniform("a") end,
} do
  print((select(2, pcall(call))))
end
