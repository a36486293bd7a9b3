-- Headers of safetensors files, altered at random: each is read by mlua show or refused with an error of the file's.
local core = require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")
local show = require "mlua.show_tensors"

local HEADER = '{"__metadata__":{"format":"pt"},"wte":{"dtype":"F32","shape":[8,4],"data_offsets":[0,128]},'
  .. '"b":{"dtype":"BF16","shape":[],"data_offsets":[128,130]}}'
local MARKS = "{}[]\",:0123456789.-+eE\\ntfu \n"

math.randomseed(1)

-- Between one and four bytes are changed, inserted or removed, or a piece is repeated.
local function alter(text)
  for _ = 1, math.random(4) do
    local at, count, mark = math.random(#text), math.random(8), math.random(#MARKS)
    local with = math.random(4) > 1 and MARKS:sub(mark, mark) or string.char(math.random(0, 255))
    local kind = math.random(4)
    if kind == 1 then text = text:sub(1, at - 1) .. with .. text:sub(at + 1) end
    if kind == 2 and #text > 16 then text = text:sub(1, at - 1) .. text:sub(at + count) end
    if kind == 3 then text = text:sub(1, at) .. with .. text:sub(at + 1) end
    if kind == 4 then text = text:sub(1, at + count) .. text:sub(at) end
  end
  return text
end

local path, read = os.tmpname() .. ".safetensors", 0
for _ = 1, 2000 do
  local header = alter(HEADER)
  local length = math.random(10) > 1 and #header or math.random(0) >> math.random(0, 63)
  local bytes = string.pack("<I8", length) .. header .. ("\7"):rep(130)
  local file = assert(io.open(path, "wb"))
  file:write(math.random(10) > 1 and bytes or bytes:sub(1, math.random(0, #bytes)))
  file:close()
  local good, problem = pcall(show.read_file, path)
  if not good and not tostring(problem):find(path, 1, true) then error(("of %q: %s"):format(header, problem)) end
  read = read + (good and 1 or 0)
end
os.remove(path)
check.equal(read > 20 and read < 1500, true, "some are read, some refused: " .. read)
