-- Closing Lua's traps must not change what a script means. Each text is run as it is loaded (with
-- traps closed) and must give what Lua alone gives, which is written beside it.
local m = require "mlua"
local core = require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")

local function show(...)
  local list = table.pack(...)
  for i = 1, list.n do list[i] = tostring(list[i]) end
  return table.concat(list, " ")
end
local function same(expected, text, ...)
  local chunk, message = load(text, "=text")
  check.equal(chunk and show(chunk(...)) or message, expected, text)
end

same("1 2 3", "return ...", 1, 2, 3)
same("1", "return (...)", 1, 2, 3)
same("a", "return ... or 'x'", "a", "b")
same("x", "return false or nil or 'x'")
same("1 2 3", "local function f() return 1, 2, 3 end return f()")
same("1", "local function f() return 1, 2, 3 end return (f())")
same("", "local function f() end return f()")
same("nil", "local function f() end return (f())")
same("false true", "local function f() end return f() == 1, f() == nil")
same("true", "local function f() return 1, 2 end local function g() return 1, 3 end return f() == g()")
same("false", "local function f() return 1, 2 end return not f()")
same("2", "local function f() return 1, 2 end return f() and 2")
same("1", "local function f() return 1, 2 end return false or f()")
same("true false", "return 1 == 1.0, 1 ~= 1.0")
same("true", "return (1 == 2) == (3 == 4)")
same("true", "return 1 < 2 == true")
same("false", "return not 1 == 2")
same("true", "return not (1 == 2)")
same("true", "local a = {} return a == a and a ~= {}")
same("true", "local mt = {__eq = function() return true end} return setmetatable({}, mt) == setmetatable({}, mt)")
same("3", "local x = 0 while x ~= 3 do x = x + 1 end return x")
same("3", "local x = 0 repeat local y = x x = x + 1 until y == 2 return x")
same("no", "if nil then return 'yes' elseif false then return 'maybe' else return 'no' end")
same("b", "local t = {a = 1 == 2, [1 == 1] = 'b', 'c'} return t[true]")
same("c 1", "local t = {'c', n = 1} return t[1], t.n")
same("5", "local function f(t) return t[1] end return f{5}")
same("x", "return ('x'):rep(1)")
same("-1", "return - 1 and -1")
same("2", "return #'ab' == 2 and #'ab'")
same("7", "return 1 + 2 * 3 == 7 and 7")
same("true", "return 2 ^ 3 ^ 2 == 512.0")
same("abc", "return 'a' .. 'b' .. 'c'")
same("true", "return 'a' .. 'b' == 'ab'")
same("6", "local s = 0 for i = 1, 3 do s = s + i end return s")
same("1 2", "for k, v in pairs{a=1} do if k == 'a' and v == 1 then return v, 2 end end")
same("3", "goto done do return 1 end ::done:: return 3")
same("4", "local x <const> = 4 local y <close> = nil return x")
same("if then", "return 'if' .. [[ ]] .. [==[then]==] -- if x == y then")
same("1", "--[[ if a == b ]] return 1 --[==[ ]] ]==]")
same("\"'", [[return "\"" .. '\'']])
same("0x10", "return 0x10 == 16 and '0x10'")
same("1e3", "return 1e3 == 1000 and 1E+3 == 1000 and 0x.8p1 == 1 and '1e3'")
same("ok", "local function even(n) if n == 0 then return 'ok' end return even(n - 1) end return even(1000)")
same("3 4", "local t = {} function t.f(...) return select('#', ...), ... end local n, x = t.f(4, nil, 5) return n, x")
same("2", "local t = {x = {y = function(self, a) return a end}} return t.x:y(2)")
same("1", "local s <const> = 1; ; return s;")
same("text:1: boom", "return select(2, pcall(function() error('boom') end))")
same("text:3: boom", "return select(2, pcall(function()\n if 1 == 2 then end\n error('boom') end))")
same("12", "return (function(...) local a, b = ... return a == 1 and b == 2 and '12' end)(1, 2)")
same("nil", "if nil == false then return 1 end return nil")

-- What a nested function returns by a tail call names its own line.
local _, message = pcall(load("local t = ...\nlocal function f()\n  return t:sum('nope')\nend\nreturn f()", "=text"),
  m.input("x", { m.axis("seq", 4) }))
check.equal(tostring(message):match "^[^\n]*", "text:3: cannot sum over \"nope\": the tensor has no such axis")

-- Tensors.
local x = m.input("x", { m.axis("seq", 4) })
local function raises(text, expected) check.raises(expected or "neither true nor false", load(text, "=text"), x) end
raises "local x = ... if x then end"
raises "local x = ... while x do end"
raises "local x = ... repeat until x"
raises "local x = ... if false then elseif x then end"
raises "local x = ... return not x"
raises "local x = ... return x:gt(0) and 1"
raises "local x = ... return x:gt(0) or 1"
raises "local x = ... return (1 == 1 and x:gt(0)) or 1"
raises("local x = ... return x == 1", "cannot compare tensors with ==")
raises("local x = ... return 1 ~= x", "cannot compare tensors with ~=")
raises("local x = ... return x == true", "cannot compare tensors with ==")
same("false true", "local x = ... return x == nil, x ~= nil", x)
same("1", "local x = ... return x and 1", x)
same("f32[seq=4]", "local x = ... return x or 1", x)
same("false", "local x = ... return x == 'none'", x)
same("true", "local p = ... return p and not not p == true", m.param { m.axis("seq", 4) })
-- Environments.
same("5", "return load('return x == 5 and x', 'e', 't', {x = 5})()")
same("nil syntax", "local f, message = load('return = 1', 'e') return f, message and 'syntax'")
check.done()
