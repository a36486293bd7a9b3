-- Adapters of m.lora in the files of PEFT (Hugging Face): adapter_config.json, and adapter_model.safetensors with
-- base_model.model.MODULE.lora_A.weight [r, in] and .lora_B.weight [out, r] of each module, whose weight [out, in] they add
-- lora_alpha / r B A to. Which parameter is which module, and how its axes are flattened, is the model's table hf
-- (hf_views.lua); `fan_in_fan_out = true` there says that weights lie [in, out], as GPT-2's do.
local core = require "mlua.core"
local lora = require "mlua.lora"
local m = require "mlua"
local text_files = require "mlua.text_files"
local views = require "mlua.hf_views"

local peft = {}

-- adapter_config.json --------------------------------------------------------------------------------------------------------

-- Fields that are read, and those that say how an adapter began or is trained. All others must be null, false or empty.
local KNOWN = {}
for name in ("r lora_alpha use_rslora init_lora_weights peft_type bias auto_mapping base_model_name_or_path revision inference_mode task_type peft_version "
  .. "lora_dropout target_modules exclude_modules fan_in_fan_out layers_to_transform layers_pattern megatron_config megatron_core loftq_config "
  .. "eva_config corda_config qalora_group_size runtime_config ensure_weight_tying"):gmatch "%S+" do KNOWN[name] = true end
local BEGINNINGS = { gaussian = true, orthogonal = true, eva = true } -- others change the weights that are adapted, too

local function nothing(value) return value == nil or value == core.null or value == false or type(value) == "table" and next(value) == nil end

local function shown(value) return type(value) == "table" and core.to_json(value) or m.shown(value) end

local function read_config(path)
  local name = path .. "/adapter_config.json"
  local file, problem = io.open(name, "rb")
  if not file then core.fail(problem) end
  local c = core.json(file:read "a", name)
  file:close()
  if type(c) ~= "table" then core.fail(name .. " holds no object") end
  local function refuse(key, help) core.fail(("%s: %s = %s is not supported"):format(name, key, shown(c[key])), help and { help = help }) end
  if c.peft_type ~= "LORA" then refuse("peft_type", "LORA is") end
  if not nothing(c.bias) and c.bias ~= "none" then refuse("bias", "\"none\" is") end
  if type(c.init_lora_weights) == "string" and not BEGINNINGS[c.init_lora_weights] then
    refuse("init_lora_weights", "PEFT's save_pretrained(..., path_initial_model_for_weight_conversion=...) writes a plain adapter")
  end
  for key in pairs(c) do
    if not KNOWN[key] and not nothing(c[key]) then refuse(key, "PEFT's merge_and_unload() makes weights of it that --from takes") end
  end
  if not math.tointeger(c.r) or c.r < 1 then core.fail(("%s: r must be a positive integer, got %s"):format(name, shown(c.r))) end
  if type(c.lora_alpha) ~= "number" or not (c.lora_alpha > 0) then core.fail(("%s: lora_alpha must be a number above 0, got %s"):format(name, shown(c.lora_alpha))) end
  local rank = math.tointeger(c.r)
  return { rank = rank, alpha = c.lora_alpha * (c.use_rslora == true and math.sqrt(rank) or 1), rslora = c.use_rslora == true }
end

-- Where adapters lie ---------------------------------------------------------------------------------------------------------

-- The dimensions of a tensor: "(heads head_dim) embed" is two.
local function dimensions(spec)
  local list = {}
  while spec:find "%S" do
    local part = spec:match "^%s*(%b())" or spec:match "^%s*([%w_]+)"
    if not part then return {} end
    list[#list + 1], spec = part, spec:sub(select(2, spec:find(part, 1, true)) + 1)
  end
  return list
end

-- The module whose weight a parameter is (or is a part of), and its form; nil where adapters cannot be of it.
local function module_of(hf, weight)
  local axes = m.axes_of(weight)
  local forms = #axes > 1 and views.forms(hf, weight:name(), axes)
  local name = forms and forms[1].name:match "^([^{]*)%.weight$"
  if name and #dimensions(forms[1].dims) == 2 then return name, forms[1] end
end

-- The views of a weight's adapters of this rank into lora_A and lora_B: {a, b}, and whether a lies in A.
local function views_of(hf, module, form, weight, rank)
  local axes = m.axes_of(weight)
  local first, last = lora.split_axes(weight:name(), axes)
  local out, input = table.unpack(dimensions(form.dims))
  if hf.fan_in_fan_out and not module:find "lm_head$" then out, input = input, out end
  local in_a = (" " .. input .. " "):find("[^%w_]" .. first[1].name .. "[^%w_]") ~= nil -- a reads what the module does
  local r = core.axis("rank", rank)
  first[#first + 1] = r
  table.insert(last, 1, r)
  local A = { name = "base_model.model." .. module .. ".lora_A.weight", dims = "rank " .. input }
  local B = { name = "base_model.model." .. module .. ".lora_B.weight", dims = out .. " rank" }
  return { a = views.of(in_a and A or B, first, hf.axes)[1], b = views.of(in_a and B or A, last, hf.axes)[1] }
end

local function weights_of(model)
  local list = {}
  for _, p in ipairs(m.module_states(model)) do
    if p:kind() == "parameter" and not m.attributes(p).adapts then list[#list + 1] = p end
  end
  return list
end

local function hf_of(model)
  return model.hf or core.fail("the model has no table hf, which says which parameters are which modules of an adapter", { help = "Model.hf = { ... }; see models/llama.lua" })
end

-- Reading --------------------------------------------------------------------------------------------------------------------

local function open(path)
  local config, name = read_config(path), path .. "/adapter_model.safetensors"
  if not text_files.exists(name) then core.fail(("--from %s: there is no adapter_model.safetensors"):format(path), { help = "PEFT writes it with safe_serialization=True" }) end
  local file = core.tensor_file(name)
  config.path, config.modules, config.base, config.tensors = path, {}, {}, file:tensors()
  for tensor, t in pairs(config.tensors) do
    local module = tensor:match "^base_model%.model%.(.+)%.lora_[AB]%.weight$"
    local base = not module and (tensor:match "^base_model%.model%.(.+)%.base_layer%.weight$" or tensor:match "^base_model%.model%.([^%d]+)%.weight$")
    if base then
      config.base[base .. ".weight"] = tensor -- PEFT adds embeddings and heads that are adapted or resized
    elseif not module then
      core.fail(("--from %s: the tensor %s is not supported"):format(path, tensor), { help = "lora_A.weight and lora_B.weight of products are" })
    end
    if module then config.modules[module] = true end
    t.file = file
  end
  if not next(config.modules) then core.fail(("--from %s: adapter_model.safetensors holds no adapters"):format(path)) end
  return config
end

local function list_of(names)
  table.sort(names)
  return #names == 0 and "none" or table.concat(names, ", ", 1, math.min(#names, 4)) .. (#names > 4 and (" and %d more"):format(#names - 4) or "")
end

local function check_options(file, own)
  if own.rank == file.rank and math.abs(own.alpha - file.alpha) <= 1e-6 * file.alpha then return end
  core.fail(("--from %s: its adapters have r = %d and lora_alpha = %g%s, and the script's m.lora has rank = %d and alpha = %g"):format(
    file.path, file.rank, file.alpha, file.rslora and " (with use_rslora's root of r)" or "", own.rank, own.alpha), {
    help = ("m.lora(model, {rank = %d, alpha = %g, ...})"):format(file.rank, file.alpha),
  })
end

-- The file's name of a module: some lack a prefix of the table.
local function spelt(hf, modules, module)
  if modules[module] then return module end
  for prefix, others in pairs(hf.prefixes or {}) do
    for _, other in ipairs(module:sub(1, #prefix) == prefix and others or {}) do
      if modules[other .. module:sub(#prefix + 1)] then return other .. module:sub(#prefix + 1) end
    end
  end
end

local function bind(file, view)
  local tensor = file.tensors[view.name]
  if not tensor then core.fail(("--from %s: the tensor %s is missing"):format(file.path, view.name)) end
  if table.concat(tensor.shape, ", ") ~= table.concat(view.shape, ", ") then
    core.fail(("--from %s: %s is [%s], and [%s] by adapter_config.json and the model"):format(
      file.path, view.name, table.concat(tensor.shape, ", "), table.concat(view.shape, ", ")))
  end
  if not ({ f32 = 1, f64 = 1, bf16 = 1, f16 = 1 })[tensor.dtype] then
    core.fail(("--from %s: %s is of dtype %s"):format(file.path, view.name, tensor.dtype))
  end
  view.file, view.place = tensor.file, tensor.place
end

-- What loads the base weights that the folder holds too.
local function match_base(file, model, hf)
  local loads = {}
  for _, weight in ipairs(weights_of(model)) do
    local forms = views.forms(hf, weight:name(), m.axes_of(weight))
    local tensor = forms and file.base[forms[1].name]
    local list = tensor and views.of(forms[1], m.axes_of(weight), hf.axes)
    if list and #list == 1 then
      file.base[forms[1].name], list[1].name = nil, tensor
      bind(file, list[1])
      loads[#loads + 1] = { weight, list }
    end
  end
  for name, tensor in pairs(file.base) do
    local ignored = false
    for _, pattern in ipairs(hf.ignore or {}) do ignored = ignored or name:find(pattern) end
    if not ignored then core.fail(("--from %s: the tensor %s is no weight of the model"):format(file.path, tensor)) end
  end
  return loads
end

---Compare the adapters of a folder with a model: those of m.lora, or, without any, its weights. Gives what loads them;
---into weights they are merged.
---@param model Module
---@param path string
---@return fun()
function peft.match(model, path)
  local file, hf, own = open(path), hf_of(model), lora.of(model)
  if own then check_options(file, own) end
  local found, used, in_file, in_script = {}, {}, {}, {}
  for _, weight in ipairs(weights_of(model)) do
    local module, form = module_of(hf, weight)
    local name, adapter = module and spelt(hf, file.modules, module), own and own.adapters[weight]
    if name then used[name] = true end
    if name and (adapter or not own) then
      found[#found + 1] = { weight = weight, views = views_of(hf, name, form, weight, file.rank) }
    elseif name then
      in_file[#in_file + 1] = ("%s (%s)"):format(name, weight:name())
    elseif adapter then
      in_script[#in_script + 1] = ("%s (%s)"):format(module or "no module", weight:name())
    end
  end
  local base, extra = match_base(file, model, hf), {}
  for name in pairs(file.modules) do extra[#extra + 1] = not used[name] and name or nil end
  if #extra > 0 then core.fail(("--from %s: adapters of what is no weight of the model, or one that takes none: %s"):format(path, list_of(extra))) end
  if #in_file + #in_script > 0 then
    core.fail(("--from %s adapts other weights than the script's m.lora\n    the file alone: %s\n    the script alone: %s"):format(path, list_of(in_file), list_of(in_script)))
  end
  for _, f in ipairs(found) do
    bind(file, f.views.a)
    bind(file, f.views.b)
  end
  return function()
    core.load_views(base, path)
    if not own then
      local names = {}
      for i, f in ipairs(found) do names[i] = f.weight:name():gsub("%.", "%%.") end
      m.lora(model, { rank = file.rank, alpha = file.alpha, match = names })
    end
    local adapters, loads = lora.of(model).adapters, {}
    for _, f in ipairs(found) do
      loads[#loads + 1] = { adapters[f.weight].a, { f.views.a } }
      loads[#loads + 1] = { adapters[f.weight].b, { f.views.b } }
    end
    core.load_views(loads, path)
    if not own then m.merge_lora(model) end
  end
end

-- Writing --------------------------------------------------------------------------------------------------------------------

-- Modules as PEFT's target_modules: by their last names where all modules of that name are adapted, else whole.
local function targets(adapted, others)
  local set, list = {}, {}
  for module in pairs(adapted) do
    local last = module:match "[^.]*$"
    set[others[last] and module or last] = true
  end
  for name in pairs(set) do list[#list + 1] = name end
  table.sort(list)
  return core.list(list)
end

---The tensors of a model's adapters, {name, shape, parts = {{state, view}}}, and its adapter_config.json.
---@param model Module
---@param base? string where its base weights come from
---@return table[] tensors
---@return table config
function peft.export(model, base)
  local own, hf, list, adapted, others = lora.of(model), hf_of(model), {}, {}, {}
  if not own then core.fail("the model has no adapters", { help = "m.lora(model, ...) in its script makes them; without --adapter its weights are written" }) end
  for _, p in ipairs(m.parameters(model)) do
    if not m.attributes(p).adapts then
      core.fail(("%s is trained too, and an adapter does not hold it"):format(p:name()), { help = "without --adapter all weights are written, adapters within them" })
    end
  end
  for _, weight in ipairs(weights_of(model)) do
    local adapter, module, form = own.adapters[weight], module_of(hf, weight)
    if adapter and (not module or form.dims:find "|") then
      core.fail(("%s is no whole tensor of the table hf, which PEFT's adapters are of"):format(weight:name()), { help = "without --adapter adapters are written within the weights" })
    end
    if adapter and form.dims:find "^vocab " and not module:find "head$" then
      core.fail(("%s: adapters of embeddings are not supported in PEFT's files"):format(weight:name()), { help = "without --adapter adapters are written within the weights" })
    end
    if adapter then
      adapted[module] = true
      local at = views_of(hf, module, form, weight, own.rank)
      for _, key in ipairs { "a", "b" } do list[#list + 1] = { name = at[key].name, shape = at[key].shape, parts = { { adapter[key], at[key] } } } end
    elseif module then
      others[module:match "[^.]*$"] = true
    end
  end
  return list, {
    peft_type = "LORA", task_type = "CAUSAL_LM", r = own.rank, lora_alpha = math.tointeger(own.alpha) or own.alpha, lora_dropout = own.dropout, bias = "none",
    target_modules = targets(adapted, others), fan_in_fan_out = hf.fan_in_fan_out == true, base_model_name_or_path = base or core.null, inference_mode = true,
    init_lora_weights = true, use_rslora = false, use_dora = false, rank_pattern = {}, alpha_pattern = {}, modules_to_save = core.null,
  }
end

return peft
