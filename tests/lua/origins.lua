-- The line that a tensor comes from, as errors tell it: of the script's innermost function that is
-- active, else of the line that called the library; core.from_here looks for that once.
local m = require "mlua"
local core = require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")

local A = m.axes { a = 2 }
local x, other = core.full({ A.a }, 1, "f32"), core.full({ core.axis("a", 3) }, 1, "f32")

local function here() return tonumber((select(2, pcall(error, "", 3))):match ":(%d+):") end
local function line_of(t)
  local _, message = pcall(function() return t + other end)
  return tonumber(tostring(message):match "a=2%]%s+from [^\n]-origins%.lua:(%d+)")
end

-- Equal tensors are one, and come from where the first was made.
local count = 1
local function new()
  count = count + 1
  return x * count
end
local own = function() return x * 1.5 end
local inner = here() - 1
local library = m.gelu -- a function of the library, which has no line of a script

check.equal(line_of(library(new())), here(), "called")
check.equal(line_of((select(2, pcall(library, new())))), here(), "called by pcall")
check.equal(line_of(core.from_here(library, new())), here(), "from here")
check.equal(line_of(core.from_here(own)), inner, "the script's own function")
check.equal(line_of(core.from_here(core.from_here, library, new())), here(), "from here twice")
check.equal(select("#", core.from_here(function(...) return ... end, 1, nil, nil)), 3, "arguments and results")

-- What m.scope holds ends with it, by an error too, and calls within it hold lines of their own.
check.equal(line_of(m.scope("outer", library, new())), here(), "in a scope")
local first, second
m.scope("outer", function()
  first = m.scope("inner", library, new())
  second = library(new())
end)
check.equal(line_of(first), here() - 3, "in a scope in a scope")
check.equal(line_of(second), here() - 3, "after it")
check.equal(pcall(m.scope, "failing", error, "on purpose"), false)
check.equal(line_of(library(new())), here(), "after an error")

-- A coroutine has frames of its own, also where it began within a call that holds a line.
local resumed
core.from_here(function()
  resumed = coroutine.wrap(function()
    coroutine.yield(library(new()))
    return library(new())
  end)
  check.equal(line_of(resumed()), here() - 3, "in a coroutine")
end)
check.equal(line_of(resumed()), here() - 4, "in a coroutine that outlives the call")
check.done()
