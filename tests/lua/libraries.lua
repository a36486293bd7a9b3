-- Lua's libraries as scripts see them: randomness follows the seed, and what could break the program is not there.
local m = require "mlua"
local core = require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")

-- math.random follows the seed of the session, until the script gives one itself.
local function draw() return math.random(1 << 30) end
local function drawn_after(n)
  math.randomseed(n)
  return draw()
end
local zero, five = drawn_after(0), drawn_after(5)
check.equal(math.randomseed(), 0, "the seed of the command line")
check.equal(draw(), zero)
m.config { seed = 5 }
check.equal(draw(), five, "a seed of m.config")
math.randomseed(7)
local _, seventh = draw(), draw()
math.randomseed(7)
draw()
core.set_seed(0)
check.equal(draw(), seventh, "a seed of the script stays")
math.randomseed()
check.equal(draw(), zero, "no seed: that of the session")
math.randomseed(5, 1)
check.equal(draw() ~= five, true, "two numbers")
check.raises("randomseed' (number expected", math.randomseed, "x")
-- In another process, where Lua alone would draw other numbers.
local pipe = io.popen(("echo 'print(math.random(1 << 30))' | '%s' run - --seed 5"):format(os.getenv "MLUA" or root .. "build/mlua"))
check.equal(pipe:read "n", five, "--seed")
pipe:close()

-- debug: traceback alone, also by require.
check.equal(debug.traceback("message"):match "^message\nstack traceback:" ~= nil, true)
check.equal(require "debug", debug)
for _, name in ipairs { "sethook", "setlocal", "setupvalue", "upvaluejoin", "setmetatable", "getregistry", "getinfo" } do
  check.raises("debug." .. name .. " is not there", function() return debug[name] end)
end
check.equal(xpcall(error, debug.traceback), false)

-- Locales: there is one.
check.equal(os.setlocale(), "C")
check.equal(os.setlocale("C.UTF-8"), nil)
check.equal(os.setlocale("de_DE.UTF-8", "numeric"), nil)
check.equal(os.setlocale("POSIX", "collate"), "C")
check.raises("invalid option", os.setlocale, "C", "decimal")

-- Code that was compiled is not loaded.
check.equal(select(2, load(string.dump(function() end), "x")):match "binary chunk" ~= nil, true)
check.equal(select(2, load("return 1", "x", "b")):match "text chunk" ~= nil, true)
check.equal(load("return 1", "x", "bt")(), 1)
check.equal(package.loadlib, nil)
check.done()
