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

local WIDTH = { f32 = 4, f64 = 8, bf16 = 2 }
local NAMES = { f32 = "F32", f64 = "F64", bf16 = "BF16" }
local MOST = 5 * 10 ^ 9 -- bytes of a file

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
    local shape = setmetatable({ table.unpack(tensor.shape) }, { __list = true })
    header[tensor.name] = { dtype = NAMES[dtype], shape = shape, data_offsets = { offset, offset + tensor.bytes } }
    offset = offset + tensor.bytes
  end
  local text = core.to_json(header)
  return text .. (" "):rep(-#text % 8)
end

-- The values of a state on the host; the last few states are kept, for experts are written one by one.
local function reader()
  local kept, order = {}, {}
  return function(p)
    if not kept[p] then
      kept[p], order[#order + 1] = p:get(), p
      if #order > 4 then kept[table.remove(order, 1)] = nil end
    end
    return kept[p]
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

local function write_tensors(out, files, dtype, first, stem)
  local read, total = reader(), 0
  local index = { metadata = {}, weight_map = {} }
  for i, tensors in ipairs(files) do
    local name = #files == 1 and stem .. ".safetensors" or ("model-%05d-of-%05d.safetensors"):format(i, #files)
    local writer = first and core.tensor_writer(out .. "/" .. name, header_of(tensors, dtype))
    for _, tensor in ipairs(tensors) do
      local host
      for _, part in ipairs(tensor.parts) do
        local values = read(part[1]) -- all ranks together
        if first and as_it_is(part[2], tensor) then
          host = values
        elseif first then
          host = host or core.host(values:dtype(), elements(tensor.shape))
          core.paste_view(host, values, part[2])
        end
      end
      if first then writer:write(host, dtype) end
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
  fields.torch_dtype = dtype == "f32" and "float32" or dtype == "bf16" and "bfloat16" or "float64"
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
  if not WIDTH[dtype] then core.fail(("--dtype %s: tensors are written in f32, bf16 or f64"):format(dtype)) end
  if options.hf and not model.hf then
    core.fail("the model has no table hf, which says how its parameters are called", { help = "Model.hf = { ... }; see models/llama.lua" })
  end
  if first then core.make_folder(out) end
  from.load(model)
  local list, adapter
  if options.adapter_alone then list, adapter = require "mlua.peft".export(model, base_of(from.source())) end
  for _, p in ipairs(options.hf and not adapter and m.parameters(model) or {}) do
    if m.attributes(p).adapts then -- which other programs know nothing of
      m.merge_lora(model)
      break
    end
  end
  local files = cut(list or tensors_of(model, options.hf), WIDTH[dtype])
  write_tensors(out, files, dtype, first, adapter and "adapter_model" or "model")
  if not first then return end
  if adapter then write_text(out .. "/adapter_config.json", core.to_json(adapter, 2) .. "\n") elseif options.hf then write_config(out, from.source(), dtype) end
  local count = 0
  for _, tensors in ipairs(files) do count = count + #tensors end
  core.write(("%d tensors of %s in %d file%s: %s\n"):format(count, dtype, #files, #files == 1 and "" or "s", out))
end
