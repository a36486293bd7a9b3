-- Gradients of compositions, in f64, against central differences.
local m = require "mlua"
local core = require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")

local function sample(n, seed)
  local list, x = {}, (seed * 7919 + 1) % 2147483647
  for i = 1, n do
    x = x * 48271 % 2147483647
    list[i] = 2 * (x / 2147483647) - 1
  end
  return list
end

-- spec: {x = {axes...}}; i32 inputs give their values as `data` and are not differentiated.
local function gradcheck(name, spec, fn)
  local inputs, data, names = {}, {}, {}
  for key, axes in pairs(spec) do
    local n = 1
    for _, axis in ipairs(axes) do n = n * axis.size end
    inputs[key] = { dtype = axes.data and "i32" or "f64", table.unpack(axes) }
    data[key] = axes.data or sample(n, #name + n + key:byte())
    if not axes.data then names[#names + 1] = key end
  end
  table.sort(names)
  local program = m.compile(function(feeds)
    local y = fn(feeds)
    local loss = (y:cast "f64" * m.uniform(m.axes_of(y), 5):cast "f64"):sum()
    local wrt, outputs = {}, { loss = loss }
    for i, key in ipairs(names) do wrt[i] = feeds[key] end
    for i, g in ipairs(m.grad(loss, wrt)) do outputs["of_" .. names[i]] = g end
    return outputs
  end, inputs)
  local base = program(data)
  for _, key in ipairs(names) do
    local g, values = base["of_" .. key], data[key]
    g = type(g) == "number" and { g } or g:table()
    for k = 1, math.min(#values, 5) do
      local at, h = (k * 7919) % #values + 1, 1e-5
      local old = values[at]
      values[at] = old + h
      local above = program(data).loss
      values[at] = old - h
      local below = program(data).loss
      values[at] = old
      check.near(g[at], (above - below) / (2 * h), 1e-5, ("%s: gradient of %s[%d]"):format(name, key, at))
    end
  end
end

local A = m.axes { a = 5, b = 7, c = 3, d = 1, e = 4, n = 12, seq = 6, head_dim = 8, vocab = 11 }
local X, P, Q = { A.a, A.b }, m.axis("p", 3), m.axis("q", 4)
local index = { 3, 0, 6, 2, 2, 5, 1, 4, 6, 0, 3, 3, 1, 5, 2, 0, 4, 6, 1, 2 }

gradcheck("cumsum", { x = X }, function(i) return i.x:cumsum "a" * i.x:cumsum("b", { reverse = true }) end)
gradcheck("cumsum over one", { x = { A.d, A.b } }, function(i) return i.x:cumsum("d", { reverse = true }) * i.x end)
gradcheck("sort", { x = X }, function(i)
  local up, down = i.x:sort "b", (i.x:sort("a", { descending = true }))
  return up * down
end)
gradcheck("top_k", { x = X }, function(i)
  local value = i.x:top_k("b", 3, m.axis("k", 3))
  return value * value:sum "k"
end)
gradcheck("max and min", { x = X }, function(i) return i.x:max "b" * i.x:min "b" + i.x:max() end)
gradcheck("softmax over two", { x = { A.a, A.b, A.c } }, function(i) return i.x:softmax("a", "c") + i.x:log_softmax "c" end)
gradcheck("var and logsumexp", { x = { A.a, A.b, A.c } }, function(i) return i.x:var("a", "c") * i.x:logsumexp("a", "c") end)
gradcheck("power, quotient, remainder", { x = X, y = { A.b } }, function(i)
  local y = i.y * i.y + 0.5
  return (i.x * i.x + 0.1) ^ i.y + i.x / y + i.x % y
end)
gradcheck("functions", { x = X }, function(i)
  local x = i.x
  return m.exp(x) + m.log(x * x + 1) + m.sqrt(x * x + 1) * m.rsqrt(x * x + 2) + m.sin(x) * m.cos(x) + m.tanh(x) * m.erf(x)
    + m.sigmoid(x) + m.abs(x) + x:gelu() + x:gelu { exact = true } + x:silu() + x:softplus() + x:relu() + x:clamp(-0.5, 0.3)
end)
gradcheck("where", { x = X, y = { A.a } }, function(i)
  return m.where(m.gt(i.x, i.y), i.x * i.x, i.y) + m.maximum(i.x, i.y) * m.minimum(i.x, i.y)
end)
gradcheck("slice, pad, concat", { x = X, y = X }, function(i)
  local z = m.concat({ i.x, i.y * 2, i.x * i.y }, "b"):pad("b", 1, 2)
  return m.exp(z:slice("b", 3, 19)) + z:slice("b", -17, -1):cumsum "b"
end)
gradcheck("split and merge", { x = { A.a, A.n } }, function(i)
  local z = i.x:split("n", P, Q):permute("q", "a", "p")
  return m.exp(z:merge("q", "a", m.axis("qa", 20))) * z:merge("q", "p", A.n):sum "a":mean()
end)
gradcheck("softmax over merged", { x = { A.a, A.n } }, function(i)
  return i.x:split("n", P, Q):merge("a", "p", m.axis("ap", 15)):softmax "ap"
end)
gradcheck("dot with a batch axis", { x = { A.a, A.b, A.c }, y = { A.a, A.c, A.e } }, function(i) return i.x:dot(i.y, "c") end)
gradcheck("dot over two", { x = { A.a, A.b, A.c }, y = { A.b, A.c, A.e } }, function(i) return i.x:dot(i.y, "c", "b") end)
gradcheck("dot over one", { x = { A.a, A.d, A.c }, y = { A.d, A.c, A.e } }, function(i) return i.x:dot(i.y, "d"):sum "c" end)
gradcheck("gather", { x = { A.b, A.c }, n = { A.a, A.e, data = index } }, function(i) return m.exp(i.x:gather(i.n, "b")) end)
gradcheck("gather with a shared axis", { x = { A.a, A.b, A.c }, n = { A.a, A.e, data = index } },
  function(i) return m.exp(i.x:gather(i.n, "b")) end)
gradcheck("gather at one place", { x = { A.a, A.b, A.c }, n = { data = { 3 } } }, function(i) return m.exp(i.x:gather(i.n, "b")) end)
gradcheck("scatter_add", { x = { A.a, A.e, A.c }, n = { A.a, A.e, data = index } },
  function(i) return m.exp(m.scatter_add(i.n, i.x, "e", A.b)) end)
gradcheck("one_hot", { x = { A.b, A.c }, n = { A.a, data = { 3, 0, 6, 2, 2 } } },
  function(i) return m.exp(i.n:one_hot(A.b, "f64"):dot(i.x, "b")) end)
gradcheck("cross-entropy", { x = { A.a, A.vocab }, n = { A.a, data = { 0, -1, 10, 3, 4 } } }, function(i)
  local sum, count = m.cross_entropy(i.x, i.n, { label_smoothing = 0.1, z_loss = 0.01 })
  return sum / count:cast "f64"
end)
gradcheck("norms", { x = { A.a, A.b, A.c } }, function(i) return m.rms_norm { A.b, A.c }(i.x) * m.layer_norm { A.b }(i.x) end)
gradcheck("rope", { x = { A.seq, A.c, A.head_dim } }, function(i) return m.rope(i.x, { offset = 3, base = 100 }) end)
gradcheck("a scalar", { x = {} }, function(i) return i.x * i.x + m.exp(i.x) end)
gradcheck("broadcast", { x = { A.b } }, function(i) return m.exp(i.x:broadcast { A.a, A.b, A.c }:permute("c", "b", "a")) end)

-- The gradient of MAX goes to the elements that equal it: they must be the same numbers wherever a
-- compiler rounds a product and a sum together, or apart (codegen/lower/fuse.c).
local P4 = m.axes { row = 5, place = 9, part = 3, column = 4 }
local largest = m.compile(function(i)
  local x = i.x:softmax "column"
  local y = (x + x:max "part") * i.scale
  local values = m.abs(y * y) + 0.3
  local loss = m.tanh(values:max "place"):sum()
  local chosen = m.ge(y:detach() * y + 0.3, (y:detach() * y + 0.3):max "place"):cast "f32":sum()
  return { loss = loss, slope = m.grad(loss, { i.scale })[1], chosen = chosen }
end, { x = { P4.row, P4.place, P4.part, P4.column }, scale = {} })
local wave = {}
for i = 1, 540 do wave[i] = 1.3 * math.sin(0.23 * i * i + i) end
local function at(scale) return largest { x = wave, scale = scale } end
check.near(at(1).slope, (at(1.01).loss - at(0.99).loss) / 0.02, 1e-3, "gradient of the largest")
check.near(at(1).chosen, 60, 0, "values that are at least the largest")

-- RELU is flat at 0, and keeps what is no number.
local relu = m.compile(function(i)
  return { y = m.relu(i.x), slope = m.grad(m.relu(i.x):sum(), { i.x })[1] }
end, { x = { m.axis("n", 4) } })
local out = relu { x = { -1, 0, 2, 0 / 0 } }
for n, expected in ipairs { { 0, 0 }, { 0, 0 }, { 2, 1 } } do
  check.equal(out.y[n], expected[1] + 0.0, "relu")
  check.equal(out.slope[n], expected[2] + 0.0, "slope of relu")
end
check.equal(out.y[4] ~= out.y[4], true, "relu of nan")

do -- by a tensor of the script that is a permutation of another one: what reads it reads it in orders of its own
  local A = m.axes { seq = 3, heads = 2, head_dim = 2 }
  local program = m.compile(function(i)
    local moved = i.x:permute("head_dim", "seq", "heads")
    local by_moved = m.grad((m.attention(moved, i.y, i.y, { causal = true }) ^ 2):sum(), { moved })[1]
    local by_x = m.grad((m.attention(i.x, i.y, i.y, { causal = true }) ^ 2):sum(), { i.x })[1]
    return { moved = by_moved:permute("seq", "heads", "head_dim"), x = by_x }
  end, { x = { A.seq, A.heads, A.head_dim }, y = { A.seq, A.heads, A.head_dim } })
  local list, other = {}, {}
  for i = 1, 12 do list[i], other[i] = math.sin(i), math.cos(2 * i) end
  local out = program { x = list, y = other }
  local most = 0
  for i = 1, 12 do most = math.max(most, math.abs(out.x[i])) end
  check.equal(most > 0.01, true, "the gradient is not 0")
  for i = 1, 12 do check.near(out.moved[i], out.x[i], 1e-6, "the gradient by a permutation") end
end

do -- what rounds to 8 bits passes no gradient, and says how one passes
  local A = core.axis("eight", 4)
  for _, dtype in ipairs { "i8", "e4m3" } do
    local x = m.param { A, name = "x in " .. dtype }
    check.raises("no gradient passes through " .. dtype, m.grad, (x:read():cast(dtype):cast "f32"):sum(), { x })
    local y = x:read()
    local rounded = y + m.stop_gradient(y:cast(dtype):cast "f32" - y)
    x:set { 1.3, 2.7, 0.1, 100.3 }
    check.all(m.compile(function() return m.grad((rounded * 3):sum(), { x })[1] end, {})():table(), { 3, 3, 3, 3 }, 0, dtype)
  end
end

check.done()
