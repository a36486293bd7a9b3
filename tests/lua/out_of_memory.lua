-- MLUA_OOM=n lets the n-th allocation fail: whatever n is, a small script ends with its result (Lua
-- collects garbage and tries again) or with a message about memory, never with a crash. Every n at
-- first, then ever fewer.
local core = require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")
local binary = os.getenv "MLUA" or root .. "build/mlua"
local script = os.tmpname()
local f = assert(io.open(script, "w"))
f:write [[
local m = require "mlua"
local A = m.axes { a = 2, b = 3 }
local p = m.param { A.b, name = "p" }
local step = m.compile(function(i)
  local loss = ((i.x * p):sum("b") - 1):sum()
  p:assign(p:read() - 0.1 * m.grad(loss, { p })[1])
  return { loss = loss }
end, { x = { A.a, A.b } })
print(step { x = { 1, 2, 3, 4, 5, 6 } }.loss)
local ok, message = pcall(function() return p + m.input("c", { m.axis("c", 2) }) end)
assert(not ok and tostring(message):find "lacks" or tostring(message):find "memory", message)
]]
f:close()

local n, failed = 1, 0
while n < 40000 do
  local pipe = io.popen(("MLUA_OOM=%d '%s' run --device cpu %s </dev/null 2>&1; echo exit: $?"):format(n, binary, script))
  local output = pipe:read "a"
  pipe:close()
  local code = output:match "exit: (%d+)\n$"
  if code == "1" then
    failed = failed + 1
    if not output:find "memory" then check.equal(output, "a message about memory", "n = " .. n) end
  else
    check.equal(code, "0", ("n = %d: %s"):format(n, output))
  end
  n = n + 1 + n // (os.getenv "DIST_ALL" and 20 or 8)
end
os.remove(script)
check.equal(failed > 10, true, "that allocations failed at all")
check.done()
