-- editor/mlua.lua must be what the program would write now: `make editor` does.
local core = require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")
local binary = os.getenv "MLUA" or root .. "build/mlua"

local pipe = io.popen(("'%s' editor"):format(binary))
local now = pipe:read "a"
pipe:close()
local file = assert(io.open(root .. "editor/mlua.lua"))
local stored = file:read "a"
file:close()
if stored ~= now then error("editor/mlua.lua is stale: run `make editor` and commit it", 0) end

-- The definitions are Lua, and document every public function.
check.equal(load(stored) ~= nil, true, "definitions that load")
local m = require "mlua"
local undocumented = {}
for name, value in pairs(m) do
  if type(value) == "function" and not stored:find(("function m.%s("):format(name), 1, true) then
    undocumented[#undocumented + 1] = name
  end
end
table.sort(undocumented)
print("without documentation: " .. table.concat(undocumented, " "))
check.done()
