-- mlua export: a model's weights for other programs. With --hf the folder that transformers loads: config.json, tensors by
-- the names and shapes of the model's table hf in files of at most 5 GB, generation_config.json, the tokenizer's files.
-- With --adapter too the model's adapters alone, as PEFT has them (peft.lua). Without --hf the model's own names and axes, in safetensors files too.
local config = require "mlua.hf_config"
local core = require "mlua.core"
local text_files = require "mlua.text_files"
local from = require "mlua.from"
local m = require "mlua"
local tokenizer_files = require "mlua.tokenizer_files"
local views = require "mlua.hf_views"

local WIDTH = { f32 = 4, f64 = 8, bf16 = 2, f16 = 2 }
local NAMES = { f32 = "F32", f64 = "F64", bf16 = "BF16", f16 = "F16" }
local TORCH = { f32 = "float32", f64 = "float64", bf16 = "bfloat16", f16 = "float16" }
local MOST = 5 * 10 ^ 9 -- bytes of a file
local AHEAD = 2 ^ 25 -- elements that are read at once

-- The tensors to write, in the order of the model: {name, shape, parts = {{state, view}...}}.
local function tensors_of(model, hf)
  local list, by_name = {}, {}
  for _, p in ipairs(m.module_states(model)) do
    local forms
    if hf then
      forms = views.forms(model.hf, p:name(), m.axes_of(p))
      if not forms and p:kind() == "parameter" then core.fail(("the model's table hf has no entry for the parameter %s"):format(p:name())) end
    elseif p:kind() == "parameter" then
      forms = { { name = p:name(), dims = table.concat(p:axes(), " ") } }
    end
    for _, view in ipairs(forms and views.of(forms[1], m.axes_of(p), hf and model.hf.axes) or {}) do
      local tensor = by_name[view.name]
      if not tensor then
        tensor = { name = view.name, shape = view.shape, parts = {} }
        by_name[view.name], list[#list + 1] = tensor, tensor
      end
      tensor.parts[#tensor.parts + 1] = { p, view }
    end
  end
  return list
end

local function elements(shape)
  local n = 1
  for _, size in ipairs(shape) do n = n * size end
  return n
end

-- Files of at most MOST bytes: lists of tensors.
local function cut(list, width)
  local files, bytes = { {} }, 0
  for _, tensor in ipairs(list) do
    tensor.bytes = elements(tensor.shape) * width
    if bytes > 0 and bytes + tensor.bytes > MOST then
      files[#files + 1], bytes = {}, 0
    end
    table.insert(files[#files], tensor)
    bytes = bytes + tensor.bytes
  end
  return files
end

local function header_of(tensors, dtype)
  local header, offset = { __metadata__ = { format = "pt" } }, 0
  for _, tensor in ipairs(tensors) do
    local shape = core.list { table.unpack(tensor.shape) }
    header[tensor.name] = { dtype = NAMES[dtype], shape = shape, data_offsets = { offset, offset + tensor.bytes } }
    offset = offset + tensor.bytes
  end
  local text = core.to_json(header)
  return text .. (" "):rep(-#text % 8)
end

-- Reads what from.load left, {State, views}..., in the order in which tensors are written: some while those before are
-- written. All at once where a state that is written is not among them.
local function ahead(files, loads)
  local by_name, queue, waits, all, at = {}, {}, {}, false, 1
  for _, load in ipairs(loads) do by_name[load[1]:name()] = load end
  for _, tensors in ipairs(files) do
    for _, tensor in ipairs(tensors) do
      for _, part in ipairs(tensor.parts) do
        local name = part[1]:name()
        all = all or not by_name[name]
        if not waits[name] then queue[#queue + 1], waits[name] = by_name[name], true end
      end
    end
  end
  if all then
    if #loads > 0 then core.load_views(loads, from.source().path) end
    return function() end
  end
  return function(p)
    if not waits[p:name()] then return end
    local list, size = {}, 0
    repeat
      local state = queue[at][1]
      list[#list + 1], waits[state:name()] = queue[at], nil
      at, size = at + 1, size + state:elements()
    until size >= AHEAD or at > #queue
    core.load_views(list, from.source().path)
  end
end

-- The values of a state on the host: the state itself where it is there. Of copies the last few are held, for experts
-- are written one by one.
local function reader(load)
  local held, order = {}, {}
  return function(p)
    load(p)
    if core.is_in_memory(p) then return p end
    if not held[p] then
      held[p], order[#order + 1] = p:get(), p
      if #order > 4 then held[table.remove(order, 1)] = nil end
    end
    return held[p]
  end
end

-- Memory for a tensor that is put together: while one is written the other is filled. What no part covers is zero.
local function assembler()
  local rooms, at = {}, 1
  return function(dtype, count, parts)
    local covered, room = 0, rooms[3 - at]
    for _, part in ipairs(parts) do covered = covered + elements(part[2].count) end
    at = 3 - at
    if not room or room:dtype() ~= dtype or #room < count or covered < count then rooms[at] = core.host(dtype, count) end
    return rooms[at]
  end
end

local function write_text(path, text)
  local written, problem = text_files.write(path, text)
  if not written then core.fail(("cannot write %s: %s"):format(path, problem)) end
end

local function copy(path, to)
  local text = text_files.read(path)
  if text then write_text(to, text) end
  return text ~= nil
end

-- Whether a tensor is a state's elements in their order.
local function as_it_is(view, tensor)
  local step = 1
  for i = #view.count, 1, -1 do
    if view.start[i] ~= 0 or view.count[i] ~= 1 and view.stride[i] ~= step then return false end
    step = step * view.count[i]
  end
  return view.offset == 0 and #tensor.parts == 1 and step == elements(tensor.shape)
end

local function write_tensors(out, files, dtype, first, stem, loads)
  local read, room, total = reader(ahead(files, loads)), assembler(), 0
  local index = { metadata = {}, weight_map = {} }
  for i, tensors in ipairs(files) do
    local name = #files == 1 and stem .. ".safetensors" or ("model-%05d-of-%05d.safetensors"):format(i, #files)
    local writer = first and core.tensor_writer(out .. "/" .. name, header_of(tensors, dtype))
    for _, tensor in ipairs(tensors) do
      local values, count = nil, elements(tensor.shape)
      for _, part in ipairs(tensor.parts) do
        local state, view = table.unpack(part)
        local source = read(state) -- all ranks together
        if first and as_it_is(view, tensor) then
          values = source
        elseif first then
          values = values or room(state:dtype(), count, tensor.parts)
          core.paste_view(values, source, view)
        end
      end
      if first then writer:write(values, dtype, count) end
      index.weight_map[tensor.name], total = name, total + tensor.bytes
    end
    if first then writer:close() end
  end
  index.metadata.total_size = total
  if first and #files > 1 then write_text(out .. "/model.safetensors.index.json", core.to_json(index, 2) .. "\n") end
end

-- The fields of the folder that the weights come from which say how text is drawn and what ids mean.
local KEPT = { "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "use_cache", "attention_dropout" }

-- Where the weights came from that a run's adapters are for; nil where it is not known.
local function base_of(s)
  if not s or s.kind ~= "checkpoint" then return s and s.path end
  local settings = from.run_settings()
  return settings and settings.from
end

local function write_config(out, s, dtype)
  local hf = rawget(m, "settings_hf")
  if not hf then
    core.fail("the script's m.config has no table hf, which says what config.json holds", { help = "without --hf the model's own names are written" })
  end
  local fields = config.write(hf, m.settings)
  for _, key in ipairs(KEPT) do
    if fields[key] == nil and s and s.config then fields[key] = s.config[key] end
  end
  fields.torch_dtype = TORCH[dtype]
  write_text(out .. "/config.json", core.to_json(fields, 2) .. "\n")
  local generation = { _from_model_config = true, bos_token_id = fields.bos_token_id, eos_token_id = fields.eos_token_id, pad_token_id = fields.pad_token_id }
  for _, key in ipairs { "bos_token_id", "eos_token_id", "pad_token_id" } do
    if generation[key] == core.null then generation[key] = nil end
  end
  if not (s and copy(s.path .. "/generation_config.json", out .. "/generation_config.json")) then
    write_text(out .. "/generation_config.json", core.to_json(generation, 2) .. "\n")
  end
  local tokenizer = tokenizer_files.of_weights()
  local copied, problem = true, nil
  if tokenizer then copied, problem = tokenizer_files.copy(tokenizer, out) end
  if not copied then core.fail("cannot copy the tokenizer: " .. problem) end
end

---Write the model's weights as the command line asks.
---@param model Module
return function(model)
  local options = core.options()
  local out, dtype, first = options.export_to, options.file_dtype or "f32", options.rank == 0
  if not WIDTH[dtype] then core.fail(("--dtype %s: tensors are written in f32, bf16, f16 or f64"):format(dtype)) end
  if options.hf and not model.hf then
    core.fail("the model has no table hf, which says how its parameters are called", { help = "Model.hf = { ... }; see models/llama.lua" })
  end
  if first then core.make_folder(out) end
  local adapts = options.adapter_alone or options.ranks > 1
  for _, p in ipairs(m.parameters(model)) do adapts = adapts or m.attributes(p).adapts end
  local loads = from.load(model, not adapts) -- these while others are written, where the tensors are the states
  local list, adapter
  if options.adapter_alone then list, adapter = require "mlua.peft".export(model, base_of(from.source())) end
  for _, p in ipairs(options.hf and not adapter and m.parameters(model) or {}) do
    if m.attributes(p).adapts then -- which other programs know nothing of
      m.merge_lora(model)
      break
    end
  end
  local files = cut(list or tensors_of(model, options.hf), WIDTH[dtype])
  write_tensors(out, files, dtype, first, adapter and "adapter_model" or "model", loads or {})
  if not first then return end
  if adapter then write_text(out .. "/adapter_config.json", core.to_json(adapter, 2) .. "\n") elseif options.hf then write_config(out, from.source(), dtype) end
  local count = 0
  for _, tensors in ipairs(files) do count = count + #tensors end
  core.write(("%d tensors of %s in %d file%s: %s\n"):format(count, dtype, #files, #files == 1 and "" or "s", out))
end
