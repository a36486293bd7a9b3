-- Tensors of safetensors files and of checkpoints. Headers are checked; data are not read, but to compare hashes.
local core = require "mlua.core"

local BITS = {
  F64 = 64, F32 = 32, BF16 = 16, F16 = 16, F8_E4M3 = 8, F8_E5M2 = 8, F8_E8M0 = 8, F6_E2M3 = 6, F6_E3M2 = 6, F4 = 4, C64 = 64,
  I64 = 64, I32 = 32, I16 = 16, I8 = 8, U64 = 64, U32 = 32, U16 = 16, U8 = 8, BOOL = 8,
}
local INDEX = "model.safetensors.index.json"

local show = {}

---A JSON object in a folder; raises where there is none.
---@param folder string
---@param name string
---@return table
function show.load_json(folder, name)
  local path = folder .. "/" .. name
  local file, unreadable = io.open(path, "rb")
  if not file then core.fail("cannot open " .. unreadable) end
  local value, problem = core.json(file:read "a" or "")
  file:close()
  if value == nil then
    local what, line = problem:match "^(.*) %(line (%d+), "
    core.fail(("%s:%s: not valid JSON: %s"):format(path, line, what))
  end
  if type(value) ~= "table" or value[1] ~= nil then core.fail(path .. " is not a JSON object") end
  return value
end

-- Count, elements and bytes, of all and by dtype.
local function add_sums(shown)
  local sums = { tensors = #shown.tensors, elements = 0, bytes = 0, dtypes = {} }
  for _, tensor in ipairs(shown.tensors) do
    local sum = sums.dtypes[tensor.dtype] or { tensors = 0, elements = 0, bytes = 0 }
    sums.dtypes[tensor.dtype], sum.tensors = sum, sum.tensors + 1
    for _, part in ipairs { "elements", "bytes" } do
      sum[part], sums[part] = sum[part] + tensor[part], sums[part] + tensor[part]
    end
  end
  shown.sums = sums
  return shown
end

-- Safetensors files ----------------------------------------------------------------------------------------------------------

local function is_size(value) return math.type(value) == "integer" and value >= 0 end

-- The elements and bytes that a shape and dtype need; nil where they are too many. Bytes of unknown dtypes are false.
local function measure(shape, dtype)
  local elements = 1
  for _, size in ipairs(shape) do
    if not is_size(size) or size > 0 and elements > math.maxinteger // size // 64 then return nil end
    elements = elements * size
  end
  local bits = BITS[dtype]
  if not bits then return elements, false end
  return elements, elements * bits % 8 == 0 and elements * bits // 8
end

-- One entry of a header, of a file with `room` bytes of data.
local function read_entry(path, file, name, entry, room)
  local function malformed(what) core.fail(('%s: tensor "%s" %s'):format(path, name, what)) end
  if type(entry) ~= "table" or type(entry.dtype) ~= "string" then malformed "has no dtype" end
  if type(entry.shape) ~= "table" then malformed "has no shape" end
  local offsets = type(entry.data_offsets) == "table" and entry.data_offsets or {}
  local first, last = offsets[1], offsets[2]
  if #offsets ~= 2 or math.type(first) ~= "integer" or math.type(last) ~= "integer" then malformed "has no data_offsets" end
  if first < 0 or last < first or last > room then malformed(("is at bytes %d to %d of %d"):format(first, last, room)) end
  local elements, bytes = measure(entry.shape, entry.dtype)
  if not elements or BITS[entry.dtype] and bytes ~= last - first then
    malformed "has another number of bytes than its shape and dtype need"
  end
  local dtype = BITS[entry.dtype] and entry.dtype:lower() or entry.dtype
  return { name = name, dtype = dtype, shape = entry.shape, elements = elements, bytes = last - first, file = file, first = first }
end

-- Append the tensors of one file in the order of their bytes, and its metadata, to those of `shown`.
local function add_file(shown, path, file)
  local header, room = core.tensor_header(path)
  local entries, problem = core.json(header)
  if type(entries) ~= "table" or entries[1] ~= nil then
    core.fail(("%s: the header is not a JSON object: %s"):format(path, problem or "another value"))
  end
  local list = {}
  for name, entry in pairs(entries) do
    if name ~= "__metadata__" then
      list[#list + 1] = read_entry(path, file, name, entry, room)
    elseif type(entry) == "table" then
      for key, value in pairs(entry) do shown.metadata[key] = value end
    end
  end
  table.sort(list, function(a, b) return a.first < b.first end)
  for _, tensor in ipairs(list) do
    tensor.first = nil
    table.insert(shown.tensors, tensor)
  end
end

local function safetensors(path) return { kind = "safetensors", path = path, metadata = {}, tensors = core.list {} } end

---@param path string
---@return table shown
function show.read_file(path)
  local shown = safetensors(path)
  add_file(shown, path, path:match "[^/]*$")
  return add_sums(shown)
end

-- What the index promises and the files do not have: the first of them.
local function compare_index(shown, index)
  local there, missing, first = {}, 0, nil
  for _, tensor in ipairs(shown.tensors) do there[tensor.name] = tensor.file end
  for name, file in pairs(type(index.weight_map) == "table" and index.weight_map or {}) do
    if there[name] ~= file then
      missing = missing + 1
      first = first or ('%s has no tensor "%s", which %s names'):format(type(file) == "string" and file or "the folder", name, INDEX)
    end
  end
  shown.problem = missing > 1 and ("%s, and %d more"):format(first, missing - 1) or first
end

---The safetensors files of a folder; nil where it has none.
---@param path string
---@param names string[] in order
---@return table? shown
function show.read_folder(path, names)
  local shown, found, index = safetensors(path), false, false
  for _, name in ipairs(names) do
    index = index or name == INDEX
    if name:find ".%.safetensors$" then
      found = true
      add_file(shown, path .. "/" .. name, name)
    end
  end
  if not found then return nil end
  if index then compare_index(shown, show.load_json(path, INDEX)) end
  return add_sums(shown)
end

-- Checkpoints ----------------------------------------------------------------------------------------------------------------

---@param path string
---@param verify boolean read every tensor and compare its hash
---@return table shown
function show.read_checkpoint(path, verify)
  local tensors, record = core.checkpoint_tensors(path, verify)
  if not tensors then core.fail(record, { help = "mlua show FILE.safetensors shows the tensors of one file" }) end
  for _, tensor in ipairs(tensors) do
    tensor.elements = 1
    for _, axis in ipairs(tensor.axes) do tensor.elements = tensor.elements * axis[2] end
  end
  return add_sums { kind = "checkpoint", path = path, verified = verify, tensors = core.list(tensors), record = core.json(record) or {} }
end

-- A problem without the path that stands before it anyway.
local function without(path, problem)
  if problem:sub(1, #path) ~= path then return problem end
  local rest = problem:sub(#path + 1)
  return rest:match "^/(.*)$" or rest:match "^ is no whole checkpoint: (.*)$" or problem
end

---The checkpoints in a folder, the newest first: {path, step, bytes, whole, problem}.
---@param folder string
---@param verify boolean
---@return table[]
function show.read_checkpoints(folder, verify)
  local list = core.checkpoint_list(folder)
  for _, checkpoint in ipairs(list) do
    if checkpoint.whole and verify then
      local read, problem = core.checkpoint_tensors(checkpoint.path, true)
      checkpoint.problem = not read and problem or nil
    end
    local files, bytes = core.folder(checkpoint.path)
    checkpoint.bytes, checkpoint.whole = files and bytes or 0, checkpoint.problem == nil
    checkpoint.problem = checkpoint.problem and without(checkpoint.path, checkpoint.problem)
  end
  return core.list(list)
end

return show
