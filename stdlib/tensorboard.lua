-- Event files of TensorBoard: records of TFRecord (length, its masked CRC-32C, data, theirs), each a protobuf message Event.
-- Field numbers: Event {wall_time = 1, step = 2, file_version = 3, summary = 5, session_log = 7}, Summary {value = 1},
-- Value {tag = 1, simple_value = 2}, SessionLog {status = 1}.
local tensorboard = {}

local TABLE = {}
for i = 0, 255 do
  local c = i
  for _ = 1, 8 do c = c & 1 == 1 and (c >> 1) ~ 0x82F63B78 or c >> 1 end
  TABLE[i] = c
end

local function masked_crc(data)
  local c = 0xFFFFFFFF
  local at, whole = 1, #data - 3
  while at <= whole do
    local p, q, r, s = data:byte(at, at + 3)
    c = TABLE[(c ~ p) & 0xFF] ~ (c >> 8)
    c = TABLE[(c ~ q) & 0xFF] ~ (c >> 8)
    c = TABLE[(c ~ r) & 0xFF] ~ (c >> 8)
    c = TABLE[(c ~ s) & 0xFF] ~ (c >> 8)
    at = at + 4
  end
  for i = at, #data do c = TABLE[(c ~ data:byte(i)) & 0xFF] ~ (c >> 8) end
  c = c ~ 0xFFFFFFFF
  return ((c >> 15 | c << 17) + 0xA282EAD8) & 0xFFFFFFFF
end

local function varint(n)
  local bytes = {}
  repeat
    bytes[#bytes + 1] = string.char(n & 0x7F | (n > 0x7F and 0x80 or 0))
    n = n >> 7
  until n == 0
  return table.concat(bytes)
end

local function bytes_field(number, data) return string.char(number << 3 | 2) .. varint(#data) .. data end

local function record(data)
  local length = ("<I8"):pack(#data)
  return length .. ("<I4"):pack(masked_crc(length)) .. data .. ("<I4"):pack(masked_crc(data))
end

local function event(time, step, rest) return record(("<Bd"):pack(1 << 3 | 1, time) .. "\16" .. varint(step) .. rest) end

---A new event file in a folder: .scalars(step, {{name, number}...}). What an earlier file has of later steps counts no more.
---@param folder string
---@param step integer where the run continues
---@return table? writer nil, and the reason, where it cannot be written
---@return string? problem
function tensorboard.open(folder, step)
  local path, tries = nil, 0
  repeat -- a name of its own, also of a run that starts twice within a second
    path, tries = ("%s/events.out.tfevents.%010d.mlua.%d"):format(folder, os.time(), tries), tries + 1
    local there = io.open(path, "rb")
    if there then there:close() end
  until not there
  local file, problem = io.open(path, "wb")
  if not file then return nil, problem end
  local writer = {}
  local function write(text)
    local ok, why = file:write(text)
    if ok then ok, why = file:flush() end
    return ok and true, why
  end
  ---@param at integer
  ---@param values table[]
  function writer.scalars(at, values)
    local parts = {}
    for _, pair in ipairs(values) do
      local value = bytes_field(1, pair[1]) .. "\21" .. ("<f"):pack(pair[2])
      parts[#parts + 1] = bytes_field(1, value)
    end
    return write(event(os.time(), at, bytes_field(5, table.concat(parts))))
  end
  function writer.close() file:close() end
  local ok, why = write(event(os.time(), 0, bytes_field(3, "brain.Event:2")) .. (step > 0 and event(os.time(), step, bytes_field(7, "\8\1")) or ""))
  if not ok then return nil, why end
  return writer
end

return tensorboard
