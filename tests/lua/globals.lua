-- Which names a script may read: those that were ever set, and what rawget asks for.
local m = require "mlua"
local core = require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")
local function undefined(name, fn, ...) check.raises(("the name %q is not defined"):format(name), fn, ...) end

-- Every name of Lua.
for _, name in ipairs {
  "_G", "_VERSION", "assert", "collectgarbage", "coroutine", "debug", "dofile", "error", "getmetatable", "io", "ipairs", "load", "loadfile",
  "math", "next", "os", "package", "pairs", "pcall", "print", "rawequal", "rawget", "rawlen", "rawset", "require", "select",
  "setmetatable", "string", "table", "tonumber", "tostring", "type", "utf8", "warn", "xpcall",
} do
  check.equal(_G[name] ~= nil, true, name)
end

undefined("nowhere", function() return nowhere end)
undefined("nowhere", function() return nowhere or 1 end)
undefined("nowhere", function() if nowhere == nil then return 1 end end)
undefined("nowhere", function() return _G.nowhere end)
undefined("nowhere", function() return _ENV["nowhere"] end)
check.equal(rawget(_G, "nowhere"), nil)
check.equal(_G[1], nil, "no name")

-- A name that was set to nil, at first or later, is known; so is one that rawset set, while it has a value.
empty = nil
check.equal(empty, nil)
full = 1
full = nil
check.equal(full, nil)
rawset(_G, "raw", 5)
check.equal(raw, 5)
rawset(_G, "raw", nil)
undefined("raw", function() return raw end)

-- Functions see what is set later; coroutines see the same names.
local function later() return set_later end
undefined("set_later", later)
set_later = 3
check.equal(later(), 3)
check.equal(coroutine.wrap(later)(), 3)
undefined("nowhere", coroutine.wrap(function() return nowhere end))

-- Environments.
check.equal(load("return nowhere", "text", "t", {})(), nil, "an environment of one's own")
undefined("nowhere", load("return nowhere", "text", "t", setmetatable({}, { __index = _G })))
local environment = {}
load("inside = 1", "text", "t", environment)()
check.equal(environment.inside, 1)
undefined("inside", function() return inside end)
do
  local _ENV = { m = m }
  unknown = nowhere
end

-- A module that is required.
package.path = root .. "tests/lua/lib/?.lua;" .. package.path
local names = require "names"
check.equal(select("#", set_by_module(1, 2, 3)), 3, "a global that a module sets")
check.equal(names.jit, false)
check.equal(names.load, load)
undefined("undefined_in_module", names.undefined)

-- What a script does to the names of Lua does not reach the library.
local kept, print, pcall, error, tostring = {}, print, pcall, error, tostring
for _, name in ipairs { "type", "pairs", "ipairs", "table", "string", "math", "setmetatable", "core", "m" } do
  kept[name], _G[name] = rawget(_G, name), false
end
local ok, message = pcall(function()
  local A = m.axes { batch = 2 }
  return tostring(m.softmax(m.zeros { A.batch }, "batch"))
end)
for name, value in next, kept do rawset(_G, name, value) end
check.equal(message, "f32[batch=2]", "the library with the names of Lua gone")
check.equal(ok, true)
check.done()
