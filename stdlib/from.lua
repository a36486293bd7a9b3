-- Weights that are given: --from takes a run's folder (its newest whole checkpoint), a checkpoint, a Hugging Face folder
-- or a safetensors file; vm/cli finds the weights that an adapter of PEFT is for (peft.lua). Their settings become the script's where the command line does not set them (config.lua), their
-- tensors its model's values. Names and shapes are compared before anything is read.
local config = require "mlua.hf_config"
local core = require "mlua.core"
local text_files = require "mlua.text_files"
local m = require "mlua"
local views = require "mlua.hf_views"

local from = {}

local function read_json(path)
  local text = text_files.read(path)
  return text and core.json(text:gsub("([%[:,]%s*)Infinity", '%1{"__float__": "Infinity"}'), path) -- which Python writes, and JSON has not
end

-- What --from names --------------------------------------------------------------------------------------------------------

-- Settings of a run that say how it was trained, and not what its model is.
local TRAINING = {}
for name in ("data eval_data tokenizer pack save_every keep on_nan log_every eval_every steps lr warmup decay clip batch accum seed "
  .. "schedule layout reshard sample exchange"):gmatch "%S+" do TRAINING[name] = true end

local function newest_checkpoint(path)
  local list = rawget(core, "checkpoint_list") and core.checkpoint_list(path .. "/checkpoints") or {}
  for _, checkpoint in ipairs(list) do
    if checkpoint.whole then return checkpoint.path end
  end
  core.fail(("--from %s: the run has no whole checkpoint"):format(path))
end

local function open(path)
  if path:find "%.safetensors$" then return { kind = "file", path = path, files = { path } } end
  if text_files.exists(path .. "/settings.json") and not text_files.exists(path .. "/manifest.json") then path = newest_checkpoint(path) end
  local manifest = read_json(path .. "/manifest.json")
  local file = not manifest and read_json(path .. "/config.json")
  local index = read_json(path .. "/model.safetensors.index.json")
  local source = { path = path, config = file, record = manifest and (manifest.record or {}), kind = manifest and "checkpoint" or "hf" }
  if index then
    if type(index) ~= "table" or type(index.weight_map) ~= "table" then
      core.fail(path .. "/model.safetensors.index.json has no weight_map")
    end
    source.files, source.map = {}, index.weight_map
    local seen = {}
    for name, part in pairs(index.weight_map) do
      if type(name) ~= "string" or type(part) ~= "string" or part:find "/" or part == ".." then
        core.fail(("%s/model.safetensors.index.json: the tensor %s is in %s, which is not a file beside it"):format(path, m.shown(name), m.shown(part)))
      end
      if not seen[part] then source.files[#source.files + 1] = path .. "/" .. part end
      seen[part] = true
    end
  elseif text_files.exists(path .. "/model.safetensors") then
    source.files = { path .. "/model.safetensors" }
  elseif text_files.exists(path .. "/pytorch_model.bin") or text_files.exists(path .. "/pytorch_model.bin.index.json") then
    core.fail(("--from %s: its weights are pickled (pytorch_model.bin), which mlua does not read"):format(path), {
      help = "in Python: AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(OUT, safe_serialization=True)",
    })
  else
    core.fail(("--from %s: there is no run, checkpoint, model.safetensors or model.safetensors.index.json"):format(path))
  end
  if source.kind == "hf" and not file then core.fail(("--from %s: there is no config.json"):format(path)) end
  return source
end

local source -- of this script's --from

---What --from names: {kind = "checkpoint"|"hf"|"file", path=, files=, config=, record=}; nil without it.
---@return table?
function from.source()
  local path = core.options().from
  if path and not source then source = open(path) end
  return source
end

---What settings.json says of the run whose checkpoint --from names; nil of other weights.
---@return table?
function from.run_settings()
  local s = from.source()
  local settings = s and s.kind == "checkpoint" and read_json(s.path .. "/../../settings.json")
  return type(settings) == "table" and settings or nil
end

---The settings that --from gives a script with these values and this table `hf` of m.config.
---@param values table<string, any>
---@param hf? table
---@return table<string, any>
function from.settings(values, hf)
  local s = from.source()
  if not s or s.kind == "file" then return {} end
  local found = {}
  if s.kind == "hf" then
    if not hf then
      core.fail(("--from %s is a Hugging Face folder, and the script does not say which of its settings are which fields of config.json"):format(s.path), {
        help = "m.config { ..., hf = { layers = \"num_hidden_layers\", ..., { \"LlamaForCausalLM\", \"llama\" } } }; see models/llama.lua",
      })
    end
    found = config.settings(hf, s.config, values)
  else
    for key, value in pairs(s.record.settings or {}) do
      if values[key] ~= nil and not TRAINING[key] and type(value) == type(values[key]) then found[key] = value end
    end
  end
  for key, value in pairs(found) do -- 1.0 for an integer
    if math.type(values[key]) == "integer" and math.type(value) == "float" then found[key] = math.tointeger(value) or value end
  end
  return found
end

-- Tensors ------------------------------------------------------------------------------------------------------------------

-- The tensors of the source by name: {file, place, dtype, shape}.
local function tensors_of(s)
  local all = {}
  for _, path in ipairs(s.files) do
    local file = core.tensor_file(path)
    for name, tensor in pairs(file:tensors()) do
      if all[name] then core.fail(("the tensor %s is in two files: %s and %s"):format(name, all[name].path, path)) end
      tensor.file, tensor.path = file, path
      all[name] = tensor
    end
  end
  for name, part in pairs(s.map or {}) do
    if not all[name] then core.fail(("%s/model.safetensors.index.json names the tensor %s, which %s lacks"):format(s.path, name, part)) end
  end
  return all
end

-- The table's name of a tensor as the file has it: some files lack a prefix, or have another one.
local function lookup(tensors, map, name)
  if tensors[name] then return name end
  for prefix, others in pairs(map and map.prefixes or {}) do
    for _, other in ipairs(name:sub(1, #prefix) == prefix and others or {}) do
      local spelt = other .. name:sub(#prefix + 1)
      if tensors[spelt] then return spelt end
    end
  end
end

local function shape_text(shape) return "[" .. table.concat(shape, ", ") .. "]" end

local function same_shape(a, b)
  if #a ~= #b then return false end
  for i = 1, #a do
    if a[i] ~= b[i] then return false end
  end
  return true
end

local function some(list, what)
  local shown = table.concat(list, "\n      ", 1, math.min(#list, 6))
  return ("%d %s:\n      %s%s"):format(#list, what, shown, #list > 6 and "\n      ..." or "")
end

-- The forms in which a state may lie in the source.
local function forms_of(map, p)
  if map then return views.forms(map, p:name(), m.axes_of(p)) end
  local names = {}
  for i, axis in ipairs(m.axes_of(p)) do names[i] = axis.name end
  return { { name = p:name(), dims = table.concat(names, " ") } }
end

-- The first form whose tensors are all there, and its views; else nil, the first form's views and the missing name.
local function find(tensors, map, p, forms)
  local first, missing
  for _, form in ipairs(forms) do
    local list, whole = views.of(form, m.axes_of(p), map and map.axes), true
    for _, view in ipairs(list) do
      local name = lookup(tensors, map, view.name)
      if not name then
        whole, missing = false, missing or view.name
        break
      end
      view.name = name
    end
    first = first or list
    if whole then return list end
  end
  return nil, first, missing
end

local function add_scale(view, tensor, tensors, used, problems)
  local name = view.name .. "_scale_inv"
  local scale = tensors[name]
  if not scale then
    problems.shape[#problems.shape + 1] = ("%s is of 8 bits, and there is no %s"):format(view.name, name)
    return
  end
  used[name] = true
  local blocks = { (tensor.shape[1] + 127) // 128, tensor.shape[2] and (tensor.shape[2] + 127) // 128 }
  if not same_shape(scale.shape, blocks) or scale.dtype ~= "f32" then
    problems.shape[#problems.shape + 1] = ("%s is %s%s in the file, and f32%s is its blocks of 128"):format(name, scale.dtype, shape_text(scale.shape), shape_text(blocks))
    return
  end
  view.scale_file, view.scale_place = scale.file, scale.place
end

-- Views of all states, or an error that names what is missing, extra or of another shape.
local function match(model, s, tensors)
  local map = s.kind ~= "checkpoint" and not s.native and model.hf or nil
  local used, loads, problems, given = {}, {}, { missing = {}, shape = {}, extra = {} }, core.options().adapter
  for _, p in ipairs(m.module_states(model)) do
    local forms, adapts = forms_of(map, p), m.attributes(p).adapts -- m.lora's begin anew where they are not given
    if not forms and p:kind() == "parameter" and not adapts then
      core.fail(("the model's table hf has no entry for the parameter %s"):format(p:name()), {
        help = ('Model.hf = { ["%s"] = { "name of the tensor", "%s" } }'):format(p:name():gsub("%.%d+%.", ".*."), table.concat(p:axes(), " ")),
      })
    end
    local list, wanted, missing = nil, nil, nil
    if forms and not (adapts and given) then list, wanted, missing = find(tensors, map, p, forms) end
    if list then
      loads[#loads + 1] = { p, list }
      for _, view in ipairs(list) do
        local tensor = tensors[view.name]
        used[view.name] = true
        view.file, view.place = tensor.file, tensor.place
        if not same_shape(tensor.shape, view.shape) then
          problems.shape[#problems.shape + 1] = ("%s is %s in the file, and %s by %s"):format(view.name, shape_text(tensor.shape), shape_text(view.shape), tostring(p))
        elseif not ({ f32 = 1, f64 = 1, bf16 = 1, f16 = 1, e4m3 = 1 })[tensor.dtype] then
          problems.shape[#problems.shape + 1] = ("%s is of dtype %s, and %s is of floats"):format(view.name, tensor.dtype, p:name())
        elseif tensor.dtype == "e4m3" then
          add_scale(view, tensor, tensors, used, problems)
        end
      end
    elseif wanted and p:kind() == "parameter" and not adapts then
      problems.missing[#problems.missing + 1] = missing == p:name() and missing or ("%s, for %s"):format(missing, p:name())
    end
  end
  for name in pairs(tensors) do
    local ignored = used[name]
    for _, pattern in ipairs(map and map.ignore or {}) do ignored = ignored or name:find(pattern) end
    if not ignored then problems.extra[#problems.extra + 1] = name end
  end
  table.sort(problems.extra)
  return loads, problems
end

local function refuse(s, problems)
  local parts = {}
  if #problems.missing > 0 then parts[#parts + 1] = some(problems.missing, "tensors are missing") end
  if #problems.shape > 0 then parts[#parts + 1] = some(problems.shape, "tensors have another shape") end
  if #problems.extra > 0 then parts[#parts + 1] = some(problems.extra, "tensors are in the file and not in the model") end
  if #parts > 0 then core.fail(("--from %s does not fit the model\n    %s"):format(s.path, table.concat(parts, "\n    "))) end
end

---The folder or file that --from names, and the tokenizer of its weights, where it has one; nil without --from.
---@return string?
---@return string? tokenizer a file for m.tokenizer
function m.from() return core.options().from, require "mlua.tokenizer_files".of_weights() end

local done = false

---Give a model the weights that --from names; in a check their headers are compared alone. Once: the first model of a
---script gets them. With `later` they are not read, where no adapters are to be: gives the loads, for core.load_views.
---@param model Module
---@param later? boolean
---@return table[]? loads
function from.load(model, later)
  local s = from.source()
  if not s or done then return end
  done = true
  local tensors = tensors_of(s)
  local loads, problems = match(model, s, tensors)
  if s.kind ~= "checkpoint" and #problems.missing > 0 then -- a file of this model's own names
    s.native = true
    local others, fewer = match(model, s, tensors)
    if #fewer.missing < #problems.missing then loads, problems = others, fewer end
  end
  refuse(s, problems)
  local adapter = core.options().adapter and require "mlua.peft".match(model, core.options().adapter)
  if core.options().mode == "check" then return end
  if later and not adapter then return loads end
  local began = core.time()
  core.load_views(loads, s.path)
  if adapter then adapter() end
  local options = core.options()
  if options.rank == 0 and not options.quiet and not options.task then
    core.write_error(("weights of %s, read in %.3f s\n"):format(s.path, core.time() - began))
  end
end

return from
