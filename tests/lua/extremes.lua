-- Functions and their slopes where f32 runs out: beside their exact values, element by element. Slopes at kinks and at
-- powers of 0 are PyTorch's.
local m = require "mlua"
local core = require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")
core.compute_dtype "f32"

local inf, nan = math.huge, 0 / 0
local least = 2 ^ -126 -- below it exp is 0

local function near(actual, expected, tolerance, what)
  local same = actual == expected or (actual ~= actual and expected ~= expected)
  if same or math.abs(actual - expected) <= tolerance * math.abs(expected) or math.abs(actual - expected) <= least then return end
  check.equal(actual, expected, what)
end

local function as_f32(x) return (string.unpack("f", string.pack("f", x))) end

-- y and its slope at each of `points`, beside exact(x) -> y, slope.
local function at(points, fn, exact, tolerance, what)
  local out = m.compile(function(i)
    local y = fn(i.x)
    return { y = y, slope = m.grad(y:sum(), { i.x })[1] }
  end, { x = { m.axis("n", #points) } }) { x = points }
  for n, x in ipairs(points) do
    local y, slope = exact(as_f32(x))
    near(out.y[n], y, tolerance, ("%s(%g)"):format(what, x))
    if slope then near(out.slope[n], slope, tolerance, ("slope of %s(%g)"):format(what, x)) end
  end
end

-- log(1 + x), also where 1 + x is 1 in doubles.
local function log1p(x)
  if math.abs(x) > 1e-3 then return math.log(1 + x) end
  local sum, power = 0, -1
  for n = 1, 7 do
    power = -power * x
    sum = sum + power / n
  end
  return sum
end

local points = { 0, 1e-30, -1e-30, 1e-4, -1e-4, 0.5, -0.5, 3, -3, 9, -9, 10, -10, 12, -12, 17, -17, 20, -20, 40, -40, 87, -87, 104, -104,
  1e4, -1e4, 3e38, -3e38, inf, -inf, nan }
at(points, m.softplus, function(x)
  return math.max(x, 0) + log1p(math.exp(-math.abs(x))) + (x ~= x and x or 0), 1 / (1 + math.exp(-x))
end, 4e-7, "softplus")
at(points, function(x) return -m.softplus(-x) end, function(x)
  return math.min(x, 0) - log1p(math.exp(-math.abs(x))) + (x ~= x and x or 0), 1 / (1 + math.exp(x))
end, 4e-7, "log of sigmoid")
at({ 0, 1e-30, -1e-30, 1e-8, -1e-8, 1e-3, -1e-3, 0.4, -0.4, -0.99, 5, 1e10, 3e38, -1, inf, nan }, m.log1p, function(x)
  return log1p(x), 1 / (1 + x)
end, 3e-7, "log1p")
at({ 0, 1e-30, -1e-30, 1e-6, -1e-6, 1, -1, 17, -17, 30, -30, 88, -87, inf, -inf, nan }, m.expm1, function(x)
  local small = x + x * x / 2 + x ^ 3 / 6
  return math.abs(x) < 1e-4 and small or math.exp(x) - 1, math.exp(x)
end, 4e-7, "expm1")
at({ 3, -3, 0, nan }, m.sign, function(x) return x > 0 and 1 or x < 0 and -1 or x end, 0, "sign")

-- Slopes at kinks.
at({ -2, -1, 0, 1, 2, nan }, function(x) return x:clamp(-1, 1) end, function(x)
  return x ~= x and x or math.max(-1, math.min(x, 1)), x ~= x and 1 or math.abs(x) <= 1 and 1 or 0
end, 0, "clamp")
at({ -2, 0, 2 }, m.abs, function(x) return math.abs(x), x > 0 and 1 or x < 0 and -1 or 0 end, 0, "abs")
at({ 4, 0 }, m.sqrt, function(x) return math.sqrt(x), 0.5 / math.sqrt(x) end, 1e-6, "sqrt")
at({ 4, 0 }, m.rsqrt, function(x) return 1 / math.sqrt(x), -0.5 * x ^ -1.5 end, 1e-6, "rsqrt")
at({ 0, 1 }, function(x) return m.maximum(x, 0) + m.minimum(x, 1) end, function(x) return x + x, 1.5 end, 0, "equal operands")

-- x^y, its slopes in x and y, and the slope of the former in x.
local powers = {
  { 0, 0, 1, 0, 0 }, { 0, 1, 0, 1, 0 }, { 0, 2, 0, 0, 0 }, { 0, 3, 0, 0, 0 }, { 0, 0.5, 0, inf, 0 }, { 0, -1, inf, -inf, -inf },
  { -0.0, 0, 1, 0, 0 }, { 2, 0, 1, 0, math.log(2) }, { -2, 0, 1, 0, nan }, { -2, 3, -8, 12, nan }, { 2, 3, 8, 12, 8 * math.log(2) },
  { inf, 0, 1, 0, inf }, { inf, -1, 0, 0, 0 }, { 1e-40, 0, 1, 0, math.log(as_f32(1e-40)) }, { 1e-30, 2, 0, 2e-30, 0 }, { nan, 0, 1, 0, nan },
}
local function column(k)
  local list = {}
  for n, row in ipairs(powers) do list[n] = row[k] end
  return list
end
local N = m.axis("n", #powers)
local out = m.compile(function(i)
  local z = i.x ^ i.y
  local dx, dy = table.unpack(m.grad(z:sum(), { i.x, i.y }))
  return { z = z, dx = dx, dy = dy, second = m.grad(dx:sum(), { i.x })[1] }
end, { x = { N }, y = { N } }) { x = column(1), y = column(2) }
for n, row in ipairs(powers) do
  local what = ("%g ^ %g"):format(row[1], row[2])
  near(out.z[n], row[3], 1e-6, what)
  near(out.dx[n], row[4], 1e-6, "slope in x of " .. what)
  near(out.dy[n], row[5], 1e-6, "slope in y of " .. what)
end
for n = 1, 4 do check.equal(out.second[n] == out.second[n], true, "a second slope of x ^ y at 0 is a number") end
for _, power in ipairs { 0, 1, 1.5, 2, 3 } do
  at({ 0, 2 }, function(x) return x ^ power end, function(x) return x ^ power, power == 0 and 0 or power * x ^ (power - 1) end, 1e-6,
    ("x ^ %g"):format(power))
end
at({ 0, 1, 2 }, function(y) return 0 ^ y end, function(y) return 0 ^ y, 0 end, 0, "0 ^ y")

-- Rows of logits. Where one is far above 0 the spacing of numbers of its size must not show.
local rows = {
  { 0, 0, 0, 0 }, { -inf, 0, 1, 2 }, { 1e4, 1e4 - 1, 0, -1e4 }, { -1e4, -1e4 - 2, -2e4, -inf }, { 3e5, 3e5 - 4, 3e5 - 3, 3e5 - 2 },
  { 1e37, -1e37, 0, 1 }, { 100, 100.5, 99, 0 }, { -100, -101, -102, -1e30 },
}
local L = m.axes { row = #rows, vocab = 4 }
local flat = {}
for _, row in ipairs(rows) do for _, x in ipairs(row) do flat[#flat + 1] = x end end
local target, smooth = {}, 0.1
for r in ipairs(rows) do target[r] = r == 2 and 3 or 1 end
local losses = m.compile(function(i)
  local at_target = core.eq(core.iota(L.vocab, "i32"):broadcast { L.row, L.vocab }, i.target)
  local sum = m.cross_entropy(i.x, i.target)
  local apart = {} -- the losses of single rows
  for r = 1, #rows do
    apart[r] = m.cross_entropy(i.x:slice("row", r - 1, r), i.target:slice("row", r - 1, r))
    apart[#rows + r] = m.cross_entropy(i.x:slice("row", r - 1, r), i.target:slice("row", r - 1, r), { label_smoothing = smooth })
  end
  local result = { log = m.where(at_target, i.x:log_softmax "vocab", 0):sum "vocab", lse = i.x:logsumexp "vocab", share = i.x:softmax "vocab",
    slope = m.grad(sum, { i.x })[1] }
  for k, loss in ipairs(apart) do result["loss" .. k] = loss end
  return result
end, { x = { L.row, L.vocab }, target = { L.row, dtype = "i32" } }) { x = flat, target = target }
for r, row in ipairs(rows) do
  local most, sum, mean = -inf, 0, 0
  for _, x in ipairs(row) do most = math.max(most, x) end
  for _, x in ipairs(row) do sum, mean = sum + math.exp(x - most), mean + x / 4 end
  local loss = most - row[target[r] + 1] + math.log(sum)
  near(losses.log[r], -loss, 1e-6, "log_softmax of row " .. r)
  near(losses["loss" .. r], loss, 1e-6, "cross-entropy of row " .. r)
  near(losses["loss" .. #rows + r], (1 - smooth) * loss + smooth * (most - mean + math.log(sum)), 1e-6, "smoothed cross-entropy of row " .. r)
  near(losses.lse[r], most + math.log(sum), 1e-6, "logsumexp of row " .. r)
  for k, x in ipairs(row) do
    local n, share = (r - 1) * 4 + k, math.exp(x - most) / sum
    near(losses.share[n], share, 1e-6, "softmax")
    local slope = share - (k == target[r] + 1 and 1 or 0)
    check.near(losses.slope[n], slope, 2e-7, "slope of the cross-entropy of row " .. r)
  end
end
local none = m.compile(function(i) return { lse = i.x:logsumexp "vocab", slope = m.grad(i.x:logsumexp "vocab", { i.x })[1] } end,
  { x = { L.vocab } }) { x = { -inf, -inf, -inf, -inf } }
check.equal(none.lse, -inf, "logsumexp of nothing")
check.all(none.slope, { 0, 0, 0, 0 }, 0, "its slope")

-- Norms of zeros and of equal elements.
local SIZE = 1000 -- of which f32 has no exact reciprocal
local E = m.axes { row = 5, embed = SIZE }
local equal = {}
for r, x in ipairs { 0, 3.3, 4096.1, 1e-20, 1e5 + 0.1 } do for k = 1, SIZE do equal[(r - 1) * SIZE + k] = x end end
local layer = m.layer_norm { E.embed }
m.parameters(layer)
local norms = m.compile(function(i)
  local rms, centred = m.rms_norm { E.embed, gain = false }(i.x), layer(i.x)
  return { rms = rms, layer = centred, var = i.x:var "embed", slope = m.grad((rms * rms):sum() + (centred * centred):sum(), { i.x })[1] }
end, { x = { E.row, E.embed } }) { x = equal }
for r = 1, 5 do check.near(norms.var[r], 0, 1e-9, "variance of equal elements") end
for n = 1, #equal, 37 do
  local x = as_f32(equal[n])
  near(norms.rms[n], x / math.sqrt(x * x + 1e-5), 1e-6, "rms_norm of equal elements")
  check.near(norms.layer[n], 0, 1e-6, "layer_norm of equal elements")
  check.equal(norms.slope[n] == norms.slope[n], true, "slopes of norms are numbers")
end
check.done()
