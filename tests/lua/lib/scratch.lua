-- A folder of a test's own, not made yet, and the binary by a path that holds in any folder: `local scratch = require "lib.scratch"`.
local scratch = { folder = os.tmpname() }
os.remove(scratch.folder)

local binary = os.getenv "MLUA" or "build/mlua"
scratch.mlua = binary:sub(1, 1) == "/" and binary or assert(io.popen "pwd"):read "l" .. "/" .. binary

function scratch.write(name, text)
  local file = assert(io.open(scratch.folder .. "/" .. name, "w"))
  file:write(text)
  file:close()
end

function scratch.read(name)
  local file = assert(io.open(scratch.folder .. "/" .. name))
  local text = file:read "a"
  file:close()
  return text
end

return scratch
