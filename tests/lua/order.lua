-- The order of pairs and next, and of equal elements in table.sort: the same in each process. Addresses and
-- the seed of Lua's hashes differ between processes, so that Lua's own order would fail here.
local m = require "mlua"
local core = require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")

local function by_pairs(t)
  local out = {}
  for _, value in pairs(t) do out[#out + 1] = tostring(value) end
  return table.concat(out, " ")
end
local function by_next(t)
  local out = {}
  for _, value in next, t do out[#out + 1] = tostring(value) end
  return table.concat(out, " ")
end
local function same(t, expected, what)
  check.equal(by_pairs(t), expected, what .. ", pairs")
  check.equal(by_next(t), expected, what .. ", next")
end

-- Texts by their bytes, also where they begin alike, end early or hold zeros.
local words = { "b", "a", "ab", "aa", "a\0", "a\0b", "", "abcdefgh", "abcdefghi", "abcdefg", "Z", "\xff", "abcdefgh\0" }
local set = {}
for i, word in ipairs(words) do set[word] = i end
same(set, "7 11 2 5 6 4 3 10 8 13 9 1 12", "texts")

-- Every kind of key.
local first, second, third = {}, {}, {}
local mixed = { [true] = "true", [false] = "false", [-1] = "-1", [0] = "0", [0.5] = "0.5", [-math.huge] = "-inf", [1e300] = "1e300", b = "b",
  a = "a", [third] = "third", [first] = "first", [second] = "second", [3] = "3", [2] = "2", [100] = "100", [math.maxinteger] = "max",
  [2.0 ^ 63] = "2^63", [math.mininteger] = "min" }
mixed[1] = "1"
same(mixed, "1 2 3 100 max -inf min -1 0 0.5 2^63 1e300 a b false true first second third", "kinds of keys")

-- Objects by when they were made: tables, functions, coroutines, axes, tensors, parameters, files.
local objects, made, expected = {}, {}, {}
for i = 1, 40 do
  local kind = i % 8
  made[i] = kind == 0 and {} or kind == 1 and function() return i end or kind == 2 and coroutine.create(print)
    or kind == 3 and core.axis("a" .. i, i) or kind == 4 and m.zeros {} + i or kind == 5 and m.param { core.axis("p" .. i, 2) }
    or kind == 6 and io.tmpfile() or m.state { name = "s" .. i, axes = {} }
  expected[i] = i
end
for i = 1, 40 do objects[made[i * 7 % 41]] = i * 7 % 41 end
same(objects, table.concat(expected, " "), "objects")
check.equal(select("#", pairs { [print] = 1, [type] = 2 }), 3, "functions of C")

-- Lists, also with other keys, holes and items that came in another order.
local list = {}
for i = 1, 1000 do list[i] = i end
same(list, table.concat(list, " "), "a list")
list.n, list[0], list[-5] = "n", "0", "-5"
same(list, table.concat(list, " ") .. " -5 0 n", "a list with more")
local backwards = { x = "x" }
for i = 100, 1, -1 do backwards[i] = i end
same(backwards, table.concat(backwards, " ") .. " x", "a list from its end")
same({ 1, nil, 3, nil, nil, 6 }, "1 3 6", "holes")
local sparse = {}
for i = 1, 4000, 3 do sparse[i] = i end
check.equal(#by_next(sparse), #by_pairs(sparse), "many holes")
same({}, "", "nothing")
same({ [5] = 5 }, "5", "one key")
same({ only = 1 }, "1", "one name")

-- Values may change and go while a loop runs, and keys be added that it does not visit.
for _, visit in ipairs { pairs, function(t) return next, t end } do
  local t, seen = { 1, 2, 3, 4, a = 5, b = 6, c = 7, d = 8 }, {}
  for key, value in visit(t) do
    seen[#seen + 1] = value
    t[key] = nil
    if key == 2 then t[3] = nil end
    if key == "a" then t.b, t.c = nil, 70 end
  end
  check.equal(table.concat(seen, " "), "1 2 4 5 70 8", "a loop that clears")
  check.equal(next(t), nil, "cleared")
end
local grown, count = { a = 1, b = 2, c = 3 }, 0
for key in pairs(grown) do
  count = count + 1
  grown[key .. "x"] = 1
end
check.equal(count, 3, "keys that are added meanwhile")

-- next alone: the first key, from the middle, over a table that two loops visit, and again after a change.
check.equal(next { b = 1, a = 2 }, "a")
check.equal(next({ b = 1, a = 2, c = 3 }, "a"), "b")
check.equal((next { 5, a = 1 }), 1)
check.equal(next({}, nil), nil)
local pairs_of = {}
local names = { c = 1, b = 2, a = 3 }
for x in next, names do
  for y in next, names do pairs_of[#pairs_of + 1] = x .. y end
end
check.equal(table.concat(pairs_of, " "), "aa ab ac ba bb bc ca cb cc", "loops in loops")
names.aa = 4
check.equal(by_next(names), "3 4 2 1", "a key that was added between loops")
check.equal(select(2, next(names, "aa")), 2)
for key in next, names do
  if key == "b" then break end
end
names.d = 5
check.equal(by_next(names), "3 4 2 1 5", "after a loop that was left")
check.equal(next({ 1, 2, x = 3 }, 1.0), 2, "1.0 is 1")
check.raises("table expected", next, 5)
check.raises("table expected", pairs, nil)

-- Loops do not keep their tables alive.
local gone = setmetatable({}, { __mode = "k" })
do
  local t = { x = 1, y = 2 }
  gone[t] = true
  next(t, next(t))
end
collectgarbage()
collectgarbage()
check.equal(next(gone), nil, "a table whose loop was left")

-- __pairs decides, also where it yields.
local proxy = setmetatable({}, { __pairs = function() return function(_, i) if i < 3 then return i + 1, "v" .. i end end, nil, 0 end })
check.equal(by_pairs(proxy), "v0 v1 v2")
local yielding = setmetatable({}, { __pairs = function() coroutine.yield "out" return next, { 1 } end })
local thread = coroutine.wrap(function() return by_pairs(yielding) end)
check.equal(thread(), "out")
check.equal(thread(), "1")

-- table.sort keeps the order of equal elements.
local items = {}
for i = 1, 3000 do items[i] = { key = i * i % 7, place = i } end
table.sort(items, function(a, b) return a.key < b.key end)
local sorted = true
for i = 2, #items do
  local a, b = items[i - 1], items[i]
  sorted = sorted and (a.key < b.key or a.key == b.key and a.place < b.place)
end
check.equal(sorted, true, "a stable sort")
local numbers = { 3, 1, 2.5, -7, 3 }
table.sort(numbers)
check.equal(table.concat(numbers, " "), "-7 1 2.5 3 3")
check.raises("attempt to compare", table.sort, { 1, "a" })
check.raises("function expected", table.sort, { 2, 1 }, 5)
local through = setmetatable({}, { __len = function() return 3 end, __index = function(_, i) return 4 - i end, __newindex = rawset })
table.sort(through)
check.equal(rawget(through, 1), 1, "a table with metamethods")
local kept = { 2, 1 }
pcall(table.sort, kept, function() error "no" end)
check.equal(kept[1], 2, "a sort that fails changes nothing")
check.done()
