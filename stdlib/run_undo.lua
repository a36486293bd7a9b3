-- What an edit of `mlua run --watch` leaves out, in host memory for an undo: tensors of the checkpoint before the edit, as a
-- safetensors file that the watching process holds (core.lsp_memory). The program after the next edit takes from it what it has again.
local core = require "mlua.core"
local format = require "mlua.lsp_format"
local text_files = require "mlua.text_files"

local undo = {}

local PIECE = 1 << 22 -- bytes that are copied at once
local DTYPES = { f64 = "F64", f32 = "F32", bf16 = "BF16", i64 = "I64", i32 = "I32", i8 = "I8", u8 = "U8", bool = "BOOL" }

-- "f32[embed=16, hidden=32]"
local function type_of(dtype, axes)
  local parts = {}
  for i, axis in ipairs(axes) do parts[i] = ("%s=%d"):format(axis[1], axis[2]) end
  return ("%s[%s]"):format(dtype, table.concat(parts, ", "))
end

local function type_of_state(state)
  local axes = {}
  for i, name in ipairs(state:axes()) do axes[i] = { name, state:size(name) } end
  return type_of(state:dtype(), axes)
end

-- The host memory that may be taken: --undo-memory, else half of what is available.
local function most()
  local given = core.options().undo_memory
  return given and given * 2 ^ 30 or core.host_memory() / 2
end

-- The header of a file of these tensors of a manifest.
local function header_of(tensors)
  local header, types, at = {}, {}, 0
  for _, tensor in ipairs(tensors) do
    local shape = {}
    for i, axis in ipairs(tensor.axes) do shape[i] = axis[2] end
    header[tensor.name] = { dtype = DTYPES[tensor.dtype], shape = core.list(shape), data_offsets = { at, at + tensor.bytes } }
    types[tensor.name] = type_of(tensor.dtype, tensor.axes)
    at = at + tensor.bytes
  end
  header.__metadata__ = { types = core.to_json(types) }
  return core.to_json(header)
end

local function copy(from, to, bytes)
  while bytes > 0 do
    local piece = from:read(math.min(bytes, PIECE))
    if not piece then return nil, "the checkpoint's file ends early" end
    local ok, problem = to:write(piece)
    if not ok then return nil, problem end
    bytes = bytes - #piece
  end
  return true
end

local function write(to, checkpoint, tensors)
  local header = header_of(tensors)
  local file, problem = io.open(to, "wb")
  if not file then return nil, problem end
  local ok
  ok, problem = file:write(("<I8"):pack(#header), header)
  for _, tensor in ipairs(tensors) do
    local from = ok and io.open(checkpoint .. "/" .. tensor.file, "rb")
    ok = from and from:seek("set", tensor.offset)
    if ok then ok, problem = copy(from, file, tensor.bytes) end
    if from then from:close() end
  end
  return file:close() and ok, problem
end

---Hold tensors of a checkpoint in the file, in place of what it holds; without names the file is empty. The first rank does.
---@param to string
---@param checkpoint string
---@param names table<string, boolean>
---@return number? bytes nil where they are not held
---@return string? problem
function undo.hold(to, checkpoint, names)
  if next(names) == nil then return text_files.write(to, "") and 0, "the memory cannot be written" end
  local manifest, tensors, bytes = core.json(text_files.read(checkpoint .. "/manifest.json"), checkpoint), {}, 0
  for _, tensor in ipairs(manifest.tensors) do
    if names[tensor.name] then tensors[#tensors + 1], bytes = tensor, bytes + tensor.bytes end
  end
  local limit = most()
  if bytes > limit then
    write(to, checkpoint, {})
    return nil, ("they take %s, and %s of host memory may be taken (--undo-memory)"):format(format.bytes(bytes), format.bytes(limit))
  end
  local ok, problem = write(to, checkpoint, tensors)
  if ok then return bytes end
  write(to, checkpoint, {})
  return nil, problem or "the checkpoint cannot be read"
end

-- {name = type} of what the file holds.
local function held(from)
  local file = io.open(from, "rb")
  local size = file and file:read(8)
  local header = size and file:read((("<I8"):unpack(size)))
  if file then file:close() end
  return header and core.json(core.json(header, from).__metadata__.types, from) or {}
end

---Whether an edit left something out, so that the file stands for what an edit before did.
---@param path string
---@return boolean
function undo.is_of_an_edit(path)
  local file = io.open(path, "rb")
  local size = file and file:seek "end" or 0
  if file then file:close() end
  return size > 0
end

---Give states the values that the file holds for them; all ranks at once.
---@param from string
---@param names string[] states without values of the checkpoint
---@return table<string, boolean> loaded
function undo.load(from, names)
  local wanted, loaded, loads = {}, {}, {}
  for _, name in ipairs(names) do wanted[name] = true end
  local text = core.share(core.options().rank == 0 and core.to_json(held(from)) or nil)
  local types = core.json(text, from)
  if next(types) == nil then return loaded end
  local file = core.tensor_file(from)
  local tensors = file:tensors()
  for _, state in ipairs(core.states()) do
    local name = state:name()
    if wanted[name] and types[name] == type_of_state(state) then
      local stride, start, count, elements = {}, {}, {}, 1
      local shape = tensors[name].shape
      for i = #shape, 1, -1 do stride[i], start[i], count[i], elements = elements, 0, shape[i], elements * shape[i] end
      loads[#loads + 1] = { state, { { file = file, place = tensors[name].place, offset = 0, stride = stride, start = start, count = count } } }
      loaded[name] = true
    end
  end
  core.load_views(loads, "what an edit left out")
  return loaded
end

return undo
