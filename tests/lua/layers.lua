-- Layers against their formulas in plain Lua; dropout; weights that are used twice; initial values; groups.
local m = require "mlua"
local core = require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")
core.compute_dtype "f32"

local ROWS, DIM = 3, 8
local A = m.axes { seq = ROWS, embed = DIM }
local data = {}
for i = 1, ROWS * DIM do data[i] = 2 * math.cos(i * i) + 0.3 end

local function values(fn) return m.compile(function(i) return fn(i.x) end, { x = { A.seq, A.embed } }) { x = data } end
-- Apply f(row, column) -> value to every element.
local function table_of(f)
  local list = {}
  for i = 1, ROWS do for j = 1, DIM do list[#list + 1] = f(i, j) end end
  return list
end
local function row_sum(i, f)
  local sum = 0
  for j = 1, DIM do sum = sum + f(data[(i - 1) * DIM + j]) end
  return sum
end
local function at(i, j) return data[(i - 1) * DIM + j] end

-- Normalisation, with a gain and bias that are not one and zero.
local gain, bias = {}, {}
for j = 1, DIM do gain[j], bias[j] = 1 + j / 10, j / 7 - 0.5 end
local norms = m.module("Norms", function(self)
  self.rms, self.layer = m.rms_norm { A.embed, eps = 1e-3 }, m.layer_norm { A.embed }
end)()
m.parameters(norms)
local function host(list)
  local h = core.host("f32", #list)
  return h:fill(list)
end
norms.rms.gain:set(host(gain))
norms.layer.gain:set(host(gain))
norms.layer.bias:set(host(bias))
check.all(values(function(x) return norms.rms(x) end), table_of(function(i, j)
  return at(i, j) / math.sqrt(row_sum(i, function(x) return x * x end) / DIM + 1e-3) * gain[j]
end), 1e-5, "rms_norm")
check.all(values(function(x) return norms.layer(x) end), table_of(function(i, j)
  local mean = row_sum(i, function(x) return x end) / DIM
  local variance = row_sum(i, function(x) return (x - mean) ^ 2 end) / DIM
  return (at(i, j) - mean) / math.sqrt(variance + 1e-5) * gain[j] + bias[j]
end), 1e-5, "layer_norm")

-- Activations.
local function tanh(x) return 1 - 2 / (1 + math.exp(2 * x)) end
check.all(values(m.gelu), table_of(function(i, j)
  local x = at(i, j)
  return 0.5 * x * (1 + tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x ^ 3)))
end), 1e-5, "gelu")
check.all(values(m.silu), table_of(function(i, j) return at(i, j) / (1 + math.exp(-at(i, j))) end), 1e-5, "silu")
check.all(values(function(x) return m.swiglu(x, x + 1) end), table_of(function(i, j)
  return at(i, j) / (1 + math.exp(-at(i, j))) * (at(i, j) + 1)
end), 1e-5, "swiglu")

-- Rotary positions: pairs (j, j + dim/2) turn by position * base^(-2j/dim).
local R = m.axes { seq = ROWS, head_dim = DIM }
local rope = m.compile(function(i) return m.rope(i.x, { base = 100, offset = 5 }) end, { x = { R.seq, R.head_dim } })
check.all(rope { x = data }, table_of(function(i, j)
  local pair = (j - 1) % (DIM // 2)
  local angle = (i - 1 + 5) * 100 ^ (-2 * pair / DIM)
  local a, b = at(i, pair + 1), at(i, pair + 1 + DIM // 2)
  return j <= DIM // 2 and a * math.cos(angle) - b * math.sin(angle) or b * math.cos(angle) + a * math.sin(angle)
end), 1e-5, "rope")

-- Dropout keeps the mean, drops the share asked for, differs by step and by call site, is the same
-- for the same step, and does nothing outside of training.
local W = m.axes { wide = 20000 }
local function dropped(training)
  return m.compile(function(i)
    local ones = m.ones { W.wide }
    local a, b = m.dropout(ones, 0.25), m.dropout(ones, 0.25)
    return { a = a, both = (a * b):mean(), mean = a:mean(), zeros = m.eq(a, 0):cast("f32"):mean(), largest = a:max(),
      gradient = m.grad(m.dropout(i.x, 0.5):sum(), { i.x })[1] }
  end, { x = { W.wide }, step = { dtype = "i64" } }, { training = training })
end
local program = dropped(true)
local ones = core.host("f32", W.wide.size):fill(1)
local first, second, again = program { x = ones, step = 1 }, program { x = ones, step = 2 }, program { x = ones, step = 1 }
check.near(first.zeros, 0.25, 0.02, "share of zeros")
check.near(first.mean, 1, 0.02, "mean under dropout")
check.near(first.both, 1, 0.03, "two sites are independent")
check.near(first.largest, 1 / 0.75, 1e-6, "scale")
local function same_share(a, b)
  local same = 0
  for i = 1, #a do if (a[i] == 0) == (b[i] == 0) then same = same + 1 end end
  return same / #a
end
check.equal(same_share(first.a, again.a), 1, "the same step again")
check.near(same_share(first.a, second.a), 0.25 ^ 2 + 0.75 ^ 2, 0.02, "another step")
local kept = 0
for i = 1, #first.gradient do
  if first.gradient[i] ~= 0 then kept = kept + 1 end
  if first.gradient[i] ~= 0 and first.gradient[i] ~= 2 then check.equal(first.gradient[i], 2, "gradient of dropout") end
end
check.near(kept / #first.gradient, 0.5, 0.02, "share of gradients")
local quiet = dropped(false) { x = ones, step = 1 }
check.equal(quiet.zeros, 0, "no dropout outside of training")
check.equal(quiet.mean, 1, "mean outside of training")

-- A weight used twice gets the sum of both gradients; tied modules hold one parameter.
local V = m.axes { vocab = 5, embed = 3 }
local Tied = m.module("Tied", function(self)
  self.table = m.param { V.vocab, V.embed, init = 0.5 }
  self.head = { weight = self.table }
end)
local Untied = m.module("Untied", function(self)
  self.table, self.weight = m.param { V.vocab, V.embed, name = "first" }, m.param { V.vocab, V.embed, name = "second" }
end)
local tied, untied = Tied(), Untied()
local parameters, names = m.parameters(tied)
check.equal(#parameters, 1, "parameters of tied weights")
check.equal(names[1], "table", "their name")
local start = parameters[1]:get()
untied.table:set(start)
untied.weight:set(start)
local both = m.compile(function(i)
  local function loss(table, weight) return m.tanh(table:gather(i.tokens, "vocab"):dot(weight, "embed")):sum() end
  local one = m.grad(loss(tied.table, tied.head.weight), parameters)[1]
  local two = m.grad(loss(untied.table, untied.weight), { untied.table, untied.weight })
  return { one = one, two = two[1] + two[2], part = two[1] }
end, { tokens = { m.axis("seq", 4), dtype = "i32" } }) { tokens = { 0, 3, 3, 1 } }
check.all(both.one, both.two:table(), 1e-6, "gradient of tied weights")
check.equal(math.abs(both.one[1] - both.part[1]) > 1e-6, true, "that both uses count")

-- Initial values: their spread, and that they depend on name and seed alone.
local I = m.axes { rows = 200, columns = 100 }
local Net = m.module("Net", function(self, extra)
  if extra then self.before = m.param { I.columns, I.rows } end
  self.w = m.param { I.rows, I.columns, init = 0.02 }
  self.u = m.param { I.rows, I.columns, init = m.init.uniform(0.5) }
  self.b = m.bias { I.rows }
  self.twos = m.param { I.columns, init = m.init.constant(2) }
end)
local net = Net(true)
m.parameters(net)
local w, u = net.w:get(), net.u:get()
local function moments(h)
  local sum, square, largest = 0, 0, 0
  for i = 1, #h do sum, square, largest = sum + h[i], square + h[i] ^ 2, math.max(largest, math.abs(h[i])) end
  return sum / #h, math.sqrt(square / #h), largest
end
local mean, deviation, largest = moments(w)
check.near(mean, 0, 5e-4, "mean of initial values")
check.near(deviation / 0.02, 1, 0.02, "their deviation")
check.equal(largest > 0.06 and largest < 0.12, true, "the largest")
mean, deviation, largest = moments(u)
check.near(deviation / (0.5 / math.sqrt(3)), 1, 0.02, "deviation of uniform values")
check.equal(largest <= 0.5, true, "their bound")
check.equal(select(2, moments(net.b:get())), 0, "a bias")
check.equal(select(2, moments(net.twos:get())), 2, "a constant")

-- Groups: overrides by name; a parameter that they freeze stays.
local G = m.axes { n = 4 }
local Two = m.module("Two", function(self) self.fast, self.frozen = m.param { G.n, init = "ones" }, m.param { G.n, init = "ones" } end)
local two = Two()
local list = m.parameters(two)
local optimizer = m.sgd { lr = 0.5, momentum = 0, groups = function(name)
  if name == "frozen" then return { lr = 0 } end
end }
m.compile(function(i)
  local loss = (two.fast * two.frozen * i.x):sum()
  optimizer.update(list, m.grad(loss, list), { rate = i.rate, step = i.step:cast "f32" })
end, { x = { G.n }, rate = {}, step = { dtype = "i64" } }) { x = { 1, 2, 3, 4 }, rate = 1, step = 1 }
check.all(two.fast:get(), { 0.5, 0, -0.5, -1 }, 1e-6, "the group that learns")
check.all(two.frozen:get(), { 1, 1, 1, 1 }, 0, "the frozen group")
check.raises("m.stack takes a count, 0 or more, and a class, got -1", m.stack, -1, function() end)
check.done()
