-- States of many pieces: a leading axis whose rows are larger than a piece, elements of 2, 4 and 8 bytes. Damage in the middle
-- is found while several threads read; loading takes little memory beside the states; a step after damage is refused.
local m, core = require "mlua", require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")
local folder = os.tmpname()
os.remove(folder)

local A = m.axes { outer = 3, rows = 1100, columns = 1201 }
local zero = m.zeros { A.outer, A.rows, A.columns }
local ramp = (zero + m.iota(A.columns):cast "f32") + (zero + m.iota(A.rows):cast "f32" * 0.37) + (zero + m.iota(A.outer):cast "f32" * 1e3)
local states = {}
for i, dtype in ipairs { "f32", "bf16", "f64" } do
  states[i] = core.state { name = "large." .. dtype, axes = { A.outer, A.rows, A.columns }, dtype = dtype, kind = "parameter", init = ramp:cast(dtype) }
end
local sums = m.compile(function() return ((states[1] * 0.1 + states[2]:cast "f32" * 0.7 + states[3]:cast "f32" * 0.2) * ramp):sum() end)
local function peak()
  for line in io.lines "/proc/self/status" do
    local kib = line:match "^VmHWM:%s*(%d+)"
    if kib then return tonumber(kib) * 1024 end
  end
end

m.save(folder)
local before, bytes = sums(), 3 * 1100 * 1201 * (4 + 2 + 8)
for _, state in ipairs(states) do state:set(m.host(state:dtype(), 3, 1100, 1201):fill(1)) end
local held = peak()
m.load(folder)
-- Threads that write a GPU's memory have pinned buffers of 64 MiB together, which some systems count.
local pinned = core.options().device == "cuda" and 64 * 2 ^ 20 or 0
if held then check.equal(peak() - held < bytes / 4 + pinned, true, "memory beside the states") end
check.equal(sums(), before, "sums of what was loaded")

local path = folder .. "/model-00001-of-00001.safetensors"
local file = assert(io.open(path, "r+b"))
local size = file:seek "end"
for _, at in ipairs { size // 2, size - 1 } do
  file:seek("set", at)
  local byte = file:read(1)
  file:seek("set", at)
  file:write(string.char(byte:byte() ~ 16))
  file:flush()
  check.raises('model-00001-of-00001.safetensors is damaged: the values of tensor "large.', function() m.load(folder) end)
  check.raises('the state "large.f32" has no value: what was loaded into it was damaged', sums)
  file:seek("set", at)
  file:write(byte)
  file:flush()
end
file:close()
m.load(folder)
check.equal(sums(), before, "sums after a whole load")
core.checkpoint_remove(folder)
check.done()
