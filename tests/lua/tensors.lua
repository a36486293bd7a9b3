-- The bindings: every op by name, as a method and by operator, in both operand orders; movements;
-- reductions; dtypes of numbers beside tensors. Values are computed on the device.
local m = require "mlua"
local core = require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")

local A = m.axes { a = 2, b = 3 }
local data = { 1, 2, 3, -4, 5, 6.5 }

-- The values of fn(x) for x = data.
local function values(fn, dtype)
  local result = m.compile(function(i) return fn(i.x) end, { x = { A.a, A.b, dtype = dtype or "f32" } }) { x = data }
  return type(result) == "userdata" and result:table() or { result }
end
local function map(f)
  local list = {}
  for i, x in ipairs(data) do list[i] = f(x) end
  return list
end
local function same(name, fn, f, tolerance) check.all(values(fn), map(f), tolerance or 1e-6, name) end

-- Operators, tensor and number on either side.
same("t + n", function(t) return t + 2 end, function(x) return x + 2 end)
same("n + t", function(t) return 2 + t end, function(x) return x + 2 end)
same("t - n", function(t) return t - 0.5 end, function(x) return x - 0.5 end)
same("n - t", function(t) return 0.5 - t end, function(x) return 0.5 - x end)
same("t * n", function(t) return t * 0.5 end, function(x) return x * 0.5 end)
same("n * t", function(t) return 0.5 * t end, function(x) return x * 0.5 end)
same("t / n", function(t) return t / 4 end, function(x) return x / 4 end)
same("n / t", function(t) return 4 / t end, function(x) return 4 / x end)
same("t // n", function(t) return t // 2 end, function(x) return x // 2 end)
same("n // t", function(t) return 7 // t end, function(x) return 7 // x end)
same("t % n", function(t) return t % 3 end, function(x) return x % 3 end)
same("n % t", function(t) return 7 % t end, function(x) return 7 % x end)
same("t ^ n", function(t) return (t * t) ^ 0.5 end, function(x) return math.abs(x) end)
same("n ^ t", function(t) return 2 ^ t end, function(x) return 2 ^ x end, 1e-5)
same("-t", function(t) return -t end, function(x) return -x end)
same("t + t", function(t) return t + t * t end, function(x) return x + x * x end)

-- Every elementwise op is callable by name and as a method, with the same node as result.
for _, name in ipairs(core.map_ops) do
  local x = m.input("x", { A.a, A.b })
  local test = m.gt(x, 0)
  local logical, ternary = name:find "^logical" ~= nil, name == "where"
  local first = x
  if logical or ternary then first = test end
  local second = 2
  if logical then second = test end
  local calls = {
    function() return m[name](first) end,
    function() return m[name](first, second) end,
    function() return m[name](first, x, 2) end,
  }
  local made = 0
  for count, call in ipairs(calls) do
    local ok, result = pcall(call)
    if ok then
      made = made + 1
      local rest = ({ {}, { second }, { x, 2 } })[count]
      check.equal(tostring(first[name](first, table.unpack(rest))), tostring(result), name)
      check.equal(result:elements(), 6, name)
    end
  end
  check.equal(made, 1, name .. ": numbers of operands that work")
end

-- Dtypes of numbers.
local x, i, w = m.input("x", { A.a }), m.input("i", { A.a }, "i32"), m.input("w", { A.a }, "bf16")
check.equal((x * 2):dtype(), "f32")
check.equal((i * 2):dtype(), "i32")
check.equal((i + 2.0):dtype(), "i32")
check.equal((w * 0.1):dtype(), "bf16")
check.equal((w * x):dtype(), "f32")
check.equal(m.where(m.gt(x, 0), 1, 0):dtype(), "i32")
check.equal(m.where(m.gt(x, 0), 1, 0.5):dtype(), "f32")
check.equal(m.where(m.gt(x, 0), w, 0):dtype(), "bf16")
check.equal(m.ge(i, 1):dtype(), "bool")
check.equal(m.exp(1):dtype(), "f32")
check.raises("cannot combine i32 with the number 0.5", function() return i * 0.5 end)
check.raises("must be a tensor or a number, got nil", function() return x + nil end)
check.raises("must be a tensor or a number, got table", function() return m.add(x, {}) end)
check.raises("takes 1 operand, got 2", function() return m.exp(x, x) end)

-- Movements.
local flat = { 1, 2, 3, -4, 5, 6.5 }
check.all(values(function(t) return t:permute("b", "a") end), { 1, -4, 2, 5, 3, 6.5 }, 0, "permute")
check.all(values(function(t) return t:slice("b", 1, 3) end), { 2, 3, 5, 6.5 }, 0, "slice")
check.all(values(function(t) return t:slice("b", -1) end), { 3, 6.5 }, 0, "slice from the end")
check.all(values(function(t) return t:pad("b", 1, 0) end), { 0, 1, 2, 3, 0, -4, 5, 6.5 }, 0, "pad")
check.all(values(function(t) return t:merge("a", "b", "c") end), flat, 0, "merge")
check.all(values(function(t) return t:merge("a", "b", "c"):split("c", A.b, A.a) end), flat, 0, "split")
check.all(values(function(t) return t:rename("a", "c") + t:rename { a = "c" } end), { 2, 4, 6, -8, 10, 13 }, 0, "rename")
check.all(values(function(t) return m.concat({ t, t:slice("b", 0, 1) }, "b") end), { 1, 2, 3, 1, -4, 5, 6.5, -4 }, 0, "concat")
check.all(values(function(t) return t:sum("b"):broadcast { A.b, A.a } end), { 6, 7.5, 6, 7.5, 6, 7.5 }, 0, "broadcast")
check.all(values(function(t) return t:sum("b"):broadcast { A.b } end), { 6, 6, 6, 7.5, 7.5, 7.5 }, 0, "broadcast along what it lacks")
check.equal(tostring(core.input("x", { A.a, A.b }):broadcast { A.a, m.axis("c", 4) }), "f32[b=3, a=2, c=4]", "axes of a broadcast")
check.raises('cannot broadcast "a" from 2 to 5', function() return core.input("x", { A.a, A.b }):broadcast { m.axis("a", 5) } end)
check.raises("the axes of broadcast and of the tensor may be at most 8, got 9", function()
  local list = {}
  for i = 1, 7 do list[i] = m.axis("n" .. i, 2) end
  return core.input("x", { A.a, A.b }):broadcast(list)
end)
check.all(values(function(t) return t:gather(core.iota(core.axis("k", 2), "i32"), "b"):permute("a", "k") end), { 1, 2, -4, 5 }, 0, "gather")
check.all(values(function(t) return core.scatter_add(core.iota(A.b) % 2, t:sum("a"), core.axis("k", 2)) end), { 6.5, 7 }, 0, "scatter_add")

-- Reductions, scans, products.
check.all(values(function(t) return t:sum() end), { 13.5 }, 0, "sum of all")
check.all(values(function(t) return t:sum("a", "b") end), { 13.5 }, 0, "sum")
check.all(values(function(t) return t:max(A.b) end), { 3, 6.5 }, 0, "max")
check.all(values(function(t) return t:min("a") end), { -4, 2, 3 }, 0, "min")
check.all(values(function(t) return t:argmax("b") end), { 2, 2 }, 0, "argmax")
check.all(values(function(t) return t:argmin("b") end), { 0, 0 }, 0, "argmin")
check.all(values(function(t) return t:argmin("a") end), { 1, 0, 0 }, 0, "argmin over the other axis")
check.all(values(function(t) return (m.ceil(t * 1e9):cast("i32")):argmin("b") end), { 0, 0 }, 0, "argmin of the smallest i32")
check.all(values(function(t) return t:std("b") end), { math.sqrt(2 / 3), math.sqrt(((-4 - 2.5) ^ 2 + (5 - 2.5) ^ 2 + (6.5 - 2.5) ^ 2) / 3) }, 1e-6, "std")
check.all(values(function(t) return m.std(t) end), { math.sqrt((16 + 1 + 4 + 9 + 25 + 42.25) / 6 - (13.5 / 6) ^ 2) }, 1e-5, "std over all")
check.raises("cannot take the std over", function() return m.zeros { A.a }:std "b" end)
check.all(values(function(t) return t:cumsum("b") end), { 1, 3, 6, -4, 1, 7.5 }, 0, "cumsum")
check.all(values(function(t) return t:cumsum("b", { reverse = true }) end), { 6, 5, 3, 7.5, 11.5, 6.5 }, 0, "reverse cumsum")
check.all(values(function(t) return (t:sort("b", { descending = true })) end), { 3, 2, 1, 6.5, 5, -4 }, 0, "sort")
check.all(values(function(t) return (select(2, t:top_k("b", 2, "k"))) end), { 2, 1, 2, 1 }, 0, "top_k")
check.all(values(function(t) return t:dot(t, "b") end), { 14, 83.25 }, 1e-6, "dot")
check.all(values(function(t) return t:dot(t:rename("a", "c"), "b") end), { 14, 25.5, 25.5, 83.25 }, 1e-6, "outer dot")
check.all(values(function(t) return core.full({ A.b }, 2.5) + core.iota(A.b, "f32") + 0 * t:sum() end), { 2.5, 3.5, 4.5 }, 0, "leaves")

-- What a tensor tells.
local t = m.input("t", { A.a, A.b }, "bf16")
check.equal(tostring(t), "bf16[a=2, b=3]")
check.equal(table.concat(t:axes(), " "), "a b")
check.equal(t:size "b", 3)
check.equal(t:has "b" and not t:has "c", true)
check.equal(tostring(A.a), "a=2")
check.equal(A.a == core.axis("a", 2), true)
check.equal(A.a == core.axis("a", 3), false)

-- Arguments that do not fit.
for text, fn in pairs {
  ["has no method \"foo\""] = function() return t:foo() end,
  ["cannot be indexed with 1"] = function() return t[1] end,
  ["cannot be assigned to"] = function() t.x = 1 end,
  ["has no length"] = function() return #t end,
  ["with .."] = function() return t .. "x" end,
  ["cannot be called"] = function() return t(1) end,
  ["cannot compare tensors with < or >:"] = function() return t < 1 end,
  ["cannot compare tensors with <= or >=:"] = function() return 1 >= t end,
  ["cannot compare tensors with ==:"] = function() return t == t end,
  ["cannot compare tensors with ~=:"] = function() return t ~= 1 end,
  ["neither true nor false"] = function() return not t end,
  ["there is no dtype \"f31\""] = function() return t:cast "f31" end,
  ["cannot slice \"c\": the tensor has no such axis"] = function() return t:slice("c", 0, 1) end,
  ["must be an Axis"] = function() return t:split("a", "b", "c") end,
  ["an axis cannot be called \"1x\""] = function() return core.axis("1x", 3) end,
  ["cannot have size 0"] = function() return core.axis("x", 0) end,
  ["must be an integer, got 1.5"] = function() return core.axis("x", 1.5) end,
  ["axis \"a\" has size 2 in the tensor, not 5"] = function() return t:slice(core.axis("a", 5), 0, 1) end,
  ["needs the axes that it sums over"] = function() return t:dot(t) end,
  ["sort has no option \"descend\""] = function() return t:sort("a", { descend = true }) end,
  ["an Axis has no field sise"] = function() return A.a.sise end,
  ["name \"a\" twice"] = function() return core.full({ A.a, A.a }, 0) end,
  ["cannot rename \"a\" of size 2 to \"b\" of size 3"] = function() return t:rename("a", A.b) end,
} do check.raises(text, fn) end
-- Padded rows that are short: loads with a guard in loops that a compiler unrolls (codegen/emit/c.c).
local short, widths = {}, { 3, 10 }
for _, width in ipairs(widths) do short["x" .. width] = { m.axis("row", 12), m.axis("column", width) } end
local padded = m.compile(function(feeds)
  local o = {}
  for _, width in ipairs(widths) do
    local x = feeds["x" .. width]:pad("row", 3, 0):slice("row", 0, 12)
    o["square" .. width], o["tanh" .. width] = (x * x):sum(), m.tanh(x):sum()
    o["centred" .. width] = x - x:mean "column"
  end
  return o
end, short)
local feeds = {}
for _, width in ipairs(widths) do
  feeds["x" .. width] = {}
  for i = 1, 12 * width do feeds["x" .. width][i] = math.sin(0.3 * i * i) end
end
local sums = padded(feeds)
for _, width in ipairs(widths) do
  local x, square, tanh, centred = feeds["x" .. width], 0, 0, {}
  for row = 0, 11 do
    local mean = 0
    local function value(column) return row < 3 and 0 or x[(row - 3) * width + column] end
    for column = 1, width do
      local v = value(column)
      square, tanh, mean = square + v * v, tanh + 1 - 2 / (math.exp(2 * v) + 1), mean + v / width
    end
    for column = 1, width do centred[#centred + 1] = value(column) - mean end
  end
  check.near(sums["square" .. width], square, 1e-5, "squares of short rows " .. width)
  check.near(sums["tanh" .. width], tanh, 1e-5, "tanh of short rows " .. width)
  check.all(sums["centred" .. width], centred, 1e-5, "short rows " .. width)
end

-- Whether any or all of a few comparisons hold, as integers and as booleans: of rows in groups that begin and end somewhere. Kernels
-- that go over rows compute them once for each, in straight lines, which GCC 12 got wrong.
for _, groups in ipairs { 4, 8 } do
  local B = m.axes { batch = 2, groups = groups, rows = 32, wide = 32 }
  local program = m.compile(function(i)
    local row = core.iota(B.rows, "i32"):broadcast { B.batch, B.rows, B.groups }
    local within = core.logical_and(core.ge(row, i.first), core.lt(row, i.last)):cast "i32"
    local function over(y) return core.where(y:cast "bool", i.x:sum "wide", 0) end
    return { any = over(within:max "groups"), all = over(within:min "groups") }
  end, { first = { B.batch, B.groups, dtype = "i32" }, last = { B.batch, B.groups, dtype = "i32" }, x = { B.batch, B.rows, B.wide } })
  local feeds, any, all = { first = {}, last = {}, x = {} }, {}, {}
  for i = 1, 2 * 32 * 32 do feeds.x[i] = 1 / 32 end
  for i = 1, 2 * groups do
    feeds.first[i], feeds.last[i] = (i - 1) % groups + (i > groups and 7 or 0), 12 + 3 * i % 16
  end
  for b = 0, 1 do
    for row = 0, 31 do
      local hits = 0
      for g = b * groups + 1, (b + 1) * groups do
        if row >= feeds.first[g] and row < feeds.last[g] then hits = hits + 1 end
      end
      any[#any + 1], all[#all + 1] = hits > 0 and 1 or 0, hits == groups and 1 or 0
    end
  end
  local out = program(feeds)
  check.all(out.any:table(), any, 0, "any of " .. groups)
  check.all(out.all:table(), all, 0, "all of " .. groups)
end
check.done()
