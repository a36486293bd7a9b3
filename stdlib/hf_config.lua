-- config.json of published models to settings and back, by the table `hf` of m.config:
--
--   hf = {
--     layers = "num_hidden_layers", eps = { "rms_norm_eps", absent = 1e-6 },    -- setting = field
--     rope_scaling = m.hf.rope_scaling,                                          -- setting = rule of several fields
--     must = { hidden_act = { "silu", "swish" } },                               -- fields that must hold one of these, where they
--     may = { use_bidirectional_attention = false },                             -- stand; of `must` exports have the first
--     { "LlamaForCausalLM", "llama", qkv_bias = false, must = { mlp_bias = false } },
--     { "Qwen2ForCausalLM", "qwen2", qkv_bias = true },                          -- an architecture, its model_type
--   }
--
-- m.hf.constant(text) is a constant that is a text; `unused` lists fields that change nothing here, and
-- also = function(settings) gives more of them to exports. What an architecture says adds to what stands beside it; a setting that is a constant there distinguishes architectures. A
-- mapping is a field, or { field, other names..., absent = value where the file has none, null = value where it is
-- null, write = function(settings) that gives the field }: `absent` may name another setting ("heads"). A field that no mapping, constant or list of harmless ones knows is
-- refused by its name.
local core = require "mlua.core"
local m = require "mlua"

local config = {}

-- Fields that change nothing of a forward pass: how the model was made, how text is drawn from it.
local HARMLESS = {}
for name in ([[
  architectures model_type transformers_version _name_or_path name_or_path torch_dtype dtype use_cache initializer_range
  bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id unk_token_id output_attentions output_hidden_states
  return_dict torchscript use_bfloat16 tf_legacy_loss task_specific_params summary_type summary_use_proj summary_activation
  summary_proj_to_labels summary_first_dropout id2label label2id num_labels problem_type finetuning_task prefix pretraining_tp
  max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p
  repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences
  output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values suppress_tokens
  begin_suppress_tokens exponential_decay_length_penalty tokenizer_class chunk_size_feed_forward cache_implementation
  attention_dropout attn_pdrop resid_pdrop embd_pdrop hidden_dropout output_router_logits router_jitter_noise
  router_aux_loss_coef aux_loss_alpha seq_aux auto_map n_ctx ep_size unsloth_version unsloth_fixed _attn_implementation
  _attn_implementation_autoset _attn_implementation_internal reorder_and_upcast_attn use_mamba_kernels gradient_checkpointing
  num_logits_to_keep quantization_config image_token_index mm_tokens_per_image boi_token_index eoi_token_index
]]):gmatch "%S+" do HARMLESS[name] = true end

-- Fields that must hold these values wherever they stand.
local MUST = {
  is_decoder = false, is_encoder_decoder = false, add_cross_attention = false, tie_encoder_decoder = false,
  partial_rotary_factor = 1, layer_norm_elementwise_affine = true,
}

local function equal(a, b)
  if type(a) == "table" and type(b) == "table" then return next(a) == nil and next(b) == nil or core.to_json(a) == core.to_json(b) end
  if type(a) == "number" and type(b) == "number" then return math.abs(a - b) <= 1e-12 * math.max(math.abs(a), math.abs(b)) end
  return a == b
end

local function shown(value)
  if value == core.null then return "null" end
  if type(value) == "table" then return core.to_json(value) end
  return m.shown(value)
end

-- Both spellings of rotary positions as the older one: rope_theta and rope_scaling (transformers 5 has rope_parameters,
-- for each type of layer where they differ).
local function normalise(file)
  local fields, names = {}, {}
  for key, value in pairs(file) do fields[key] = value end
  local rope = fields.rope_parameters
  if type(rope) == "table" then
    local inner = rope.full_attention or rope
    local copy = {}
    for key, value in pairs(inner) do copy[key] = value end
    if rope.sliding_attention then
      fields.rope_local_base_freq = rope.sliding_attention.rope_theta
      if (rope.sliding_attention.rope_type or "default") ~= "default" then
        core.fail(("config.json: rope_parameters.sliding_attention.rope_type %s is not supported"):format(shown(rope.sliding_attention.rope_type)))
      end
    end
    if copy.rope_theta ~= nil then fields.rope_theta = copy.rope_theta end
    copy.rope_theta = nil
    if copy.partial_rotary_factor ~= nil then fields.partial_rotary_factor = copy.partial_rotary_factor end
    copy.partial_rotary_factor = nil
    fields.rope_scaling = (copy.rope_type or "default") ~= "default" and copy or nil
    fields.rope_parameters = nil
  end
  if type(fields.rope_scaling) == "table" and (fields.rope_scaling.rope_type or fields.rope_scaling.type) == "default" then
    fields.rope_scaling = nil
  end
  for key in pairs(fields) do names[#names + 1] = key end
  return fields, names
end

-- Weights of 8 bits are read where blocks of 128 by 128 have a scale.
local function check_quantization(file)
  local q = file.quantization_config
  if q == nil or q == core.null then return end
  local block = type(q) == "table" and q.weight_block_size or {}
  if type(q) ~= "table" or q.quant_method ~= "fp8" or (q.fmt or "e4m3") ~= "e4m3" or type(block) ~= "table" or block[1] ~= 128 or block[2] ~= 128 then
    core.fail(("config.json: quantization_config %s is not supported"):format(shown(q)), { help = "weights of f32, bf16, f16, and e4m3 with scales of blocks of 128 x 128 are read" })
  end
end

-- Rules of several fields ------------------------------------------------------------------------------------------------

local rules = {}

local ROPE_KEYS = { -- of a scaling's text, and of config.json
  { "factor", "factor" }, { "original", "original_max_position_embeddings" }, { "low", "low_freq_factor" }, { "high", "high_freq_factor" },
  { "fast", "beta_fast" }, { "slow", "beta_slow" }, { "attention", "attention_factor" }, { "mscale", "mscale" },
  { "mscale_all", "mscale_all_dim" }, { "truncate", "truncate" },
}

---Rotary frequencies for longer texts, as one setting: rope_scaling="llama3 factor=8 low=1 high=4 original=8192" (also
---linear and yarn).
rules.rope_scaling = {
  fields = { "rope_scaling" },
  read = function(fields)
    local scaling = fields.rope_scaling
    if scaling == nil or scaling == core.null then return "" end
    if type(scaling) ~= "table" then core.fail("config.json: rope_scaling must be an object, got " .. shown(scaling)) end
    local kind = scaling.rope_type or scaling.type
    local known, words = { rope_type = true, type = true, rope_theta = true, finetuned = true }, { tostring(kind) }
    if kind ~= "llama3" and kind ~= "linear" and kind ~= "yarn" then
      core.fail(("config.json: rope_scaling of type %s is not supported"):format(shown(kind)), { help = "linear, llama3 and yarn are" })
    end
    for _, key in ipairs(ROPE_KEYS) do
      local value = scaling[key[2]]
      known[key[2]] = true
      if value ~= nil and value ~= core.null then words[#words + 1] = ("%s=%s"):format(key[1], tostring(value)) end
    end
    for key, value in pairs(scaling) do
      if not known[key] and value ~= core.null then
        core.fail(("config.json: rope_scaling.%s is not known: it may change what the model computes"):format(key))
      end
    end
    local text = table.concat(words, " ")
    if kind ~= "linear" and not scaling.original_max_position_embeddings then
      text = ("%s original=%s"):format(text, tostring(fields.max_position_embeddings))
    end
    return text
  end,
  write = function(text, fields)
    if text == "" then return end
    local scaling = { rope_type = text:match "^%S+" }
    for key, value in text:gmatch "([%w_]+)=(%S+)" do
      for _, known in ipairs(ROPE_KEYS) do
        if known[1] == key then
          scaling[known[2]] = key == "original" and rules.integer(tonumber(value)) or tonumber(value) and tonumber(value) + 0.0 -- as transformers' types
          if value == "true" or value == "false" then scaling[known[2]] = value == "true" end
        end
      end
    end
    fields.rope_scaling = scaling
  end,
}

-- The types of layers by a list or by "every n-th is global"; `first` is the number of the first windowed layer.
local function check_layer_types(fields, windowed)
  local types = fields.layer_types
  if type(types) ~= "table" then return end
  for i, kind in ipairs(types) do
    local wanted = windowed(i) and "sliding_attention" or "full_attention"
    if kind ~= wanted then
      core.fail(("config.json: layer_types[%d] is %s, and its other fields say %s"):format(i - 1, shown(kind), wanted), {
        help = "layers with a window in another order are not supported",
      })
    end
  end
end

---A window for all layers (Mistral).
rules.window = {
  fields = { "sliding_window", "layer_types" },
  read = function(fields)
    local window = fields.sliding_window
    local all = window and window ~= core.null
    check_layer_types(fields, function() return all end)
    return all and window or 0
  end,
  write = function(window, fields) fields.sliding_window = window > 0 and window or core.null end,
}

-- The layers of a pattern: every n-th has no window.
local function check_pattern(fields, pattern) check_layer_types(fields, function(i) return i % pattern ~= 0 end) end

---Every n-th layer has no window (Gemma-3).
rules.window_pattern = {
  fields = { "sliding_window_pattern", "_sliding_window_pattern", "layer_types" },
  read = function(fields)
    local pattern = fields.sliding_window_pattern or fields._sliding_window_pattern
    if pattern == nil and type(fields.layer_types) == "table" then
      pattern = #fields.layer_types + 1
      for i, kind in ipairs(fields.layer_types) do
        if kind == "full_attention" then pattern = math.min(pattern, i) end
      end
    end
    pattern = pattern or 6
    if math.type(pattern) ~= "integer" or pattern < 1 then core.fail("config.json: sliding_window_pattern must be a positive integer, got " .. shown(pattern)) end
    check_pattern(fields, pattern)
    return pattern
  end,
  write = function(pattern, fields)
    local types = {}
    for i = 1, fields.num_hidden_layers do types[i] = i % pattern == 0 and "full_attention" or "sliding_attention" end
    fields.layer_types, fields.sliding_window_pattern = core.list(types), pattern
  end,
}

---Every second layer has no window (Gemma-2).
rules.window_alternates = {
  fields = { "layer_types" },
  read = function(fields)
    check_pattern(fields, 2)
    return 2
  end,
  write = function(pattern)
    if pattern ~= 2 then core.fail(("pattern=%d: in Gemma-2 every second layer has no window"):format(pattern)) end
  end,
}

---A window for all layers, where use_sliding_window is true (Qwen3-MoE).
rules.window_if_used = {
  fields = { "sliding_window", "use_sliding_window", "layer_types" },
  read = function(fields) return fields.use_sliding_window == true and rules.window.read(fields) or 0 end,
  write = function(window, fields)
    fields.use_sliding_window = window > 0
    fields.sliding_window = window > 0 and window or core.null
  end,
}

---A window where use_sliding_window is true, for layers from max_window_layers on (Qwen).
rules.optional_window = {
  fields = { "sliding_window", "use_sliding_window", "max_window_layers", "layer_types" },
  read = function(fields)
    local window, from = fields.sliding_window, fields.max_window_layers or 28
    local used = fields.use_sliding_window == true and window ~= nil and window ~= core.null
    check_layer_types(fields, function(i) return used and i > from end)
    return used and window or 0
  end,
  write = function(window, fields)
    fields.use_sliding_window = window > 0
    fields.sliding_window = window > 0 and window or core.null
  end,
}
rules.optional_window_from = {
  fields = {},
  read = function(fields) return rules.optional_window.read(fields) > 0 and (fields.max_window_layers or 28) or 0 end,
  write = function(from, fields)
    if fields.use_sliding_window then fields.max_window_layers = from else fields.max_window_layers = fields.num_hidden_layers end
  end,
}

---The layers of Qwen3-Next as hybrid.lua's pattern: D or * with E or -, a word for each.
rules.next_pattern = {
  fields = { "layer_types", "full_attention_interval", "mlp_only_layers", "decoder_sparse_step", "num_experts" },
  read = function(fields)
    local words, dense, types = {}, {}, fields.layer_types
    local every, sparse = fields.full_attention_interval or 4, fields.decoder_sparse_step or 1
    for _, i in ipairs(type(fields.mlp_only_layers) == "table" and fields.mlp_only_layers or {}) do dense[i + 1] = true end
    for i = 1, fields.num_hidden_layers or 48 do
      local kind = type(types) == "table" and types[i] or i % every == 0 and "full_attention" or "linear_attention"
      if kind ~= "full_attention" and kind ~= "linear_attention" then core.fail(("config.json: layer_types[%d] is %s"):format(i - 1, shown(kind))) end
      local experts = not dense[i] and (fields.num_experts or 512) > 0 and i % sparse == 0
      words[i] = (kind == "full_attention" and "*" or "D") .. (experts and "E" or "-")
    end
    return table.concat(words, " ")
  end,
  write = function(pattern, fields, settings)
    local words, types, dense = {}, {}, {}
    for word in pattern:gmatch "%S+" do words[#words + 1] = word end
    for i = 1, settings.layers do
      local mixer, feed = words[(i - 1) % #words + 1]:match "^([D*])([E-])$"
      if not mixer then core.fail(("Qwen3-Next's layers are D or * with E or -, and layer %d is %q"):format(i, words[(i - 1) % #words + 1])) end
      types[i] = mixer == "*" and "full_attention" or "linear_attention"
      if feed == "-" then dense[#dense + 1] = i - 1 end
    end
    fields.layer_types, fields.mlp_only_layers, fields.decoder_sparse_step = setmetatable(types, { __list = true }), setmetatable(dense, { __list = true }), 1
  end,
}

-- Infinity as transformers writes it.
local function is_endless(x) return x == math.huge or type(x) == "table" and x.__float__ == "Infinity" end

---Bounds of Mamba-2's time steps as one setting: dt_limit="0.001 0.1"; empty from 0 to infinity.
rules.time_step_limit = {
  fields = { "time_step_limit" },
  read = function(fields)
    local limit = fields.time_step_limit
    if limit == nil or limit == core.null or limit[1] == 0 and is_endless(limit[2]) then return "" end
    if type(limit) ~= "table" or type(limit[1]) ~= "number" or type(limit[2]) ~= "number" then
      core.fail("config.json: time_step_limit must be two numbers, got " .. shown(limit))
    end
    return ("%g %g"):format(limit[1], limit[2])
  end,
  write = function(text, fields)
    local low, high = text:match "^(%S+) (%S+)$"
    if low then fields.time_step_limit = setmetatable({ tonumber(low), tonumber(high) }, { __list = true }) end
  end,
}

---A setting that must be this text for an architecture.
---@param value string
---@return table
function rules.constant(value) return { constant = value } end

---A whole number as an integer, which fields of config.json with that type must be.
function rules.integer(value) return math.tointeger(value) or value end

m.hf = rules

-- Reading ------------------------------------------------------------------------------------------------------------------

local function is_rule(mapping) return type(mapping) == "table" and mapping.read ~= nil end

-- What the table says for one architecture: settings -> mapping or constant, and constants of fields.
local function for_architecture(hf, entry)
  local mappings, must, unused, may, also = {}, {}, {}, {}, nil
  for field, value in pairs(MUST) do may[field] = value end
  for _, part in ipairs { hf, entry } do
    for key, value in pairs(part) do
      if key == "must" then
        for field, constant in pairs(value) do must[field] = constant end
      elseif key == "may" then
        for field, constant in pairs(value) do may[field] = constant end
      elseif key == "unused" then
        unused = value
      elseif key == "also" then
        also = value
      elseif type(key) == "string" then
        mappings[key] = value
      end
    end
  end
  for _, mapping in pairs(mappings) do -- a field that a setting reads may hold what it likes
    for _, field in ipairs(type(mapping) == "table" and mapping or { mapping }) do
      if type(field) == "string" then may[field] = nil end
    end
  end
  return { mappings = mappings, must = must, may = may, unused = unused, also = also }
end

-- The constant that a setting must be; nil where it is mapped.
local function constant_of(mapping)
  if type(mapping) == "table" then return mapping.constant end
  if type(mapping) ~= "string" then return mapping end
end

---The entry of an architecture in the table, or nil.
---@param hf table
---@param architecture string
---@return table?
function config.entry(hf, architecture)
  for _, entry in ipairs(hf) do
    if entry[1] == architecture then return entry end
  end
end

local function check_must(fields, must, known)
  for field, wanted in pairs(must) do
    known[field] = true
    local value, allowed = fields[field], type(wanted) == "table" and wanted or { wanted }
    local holds = value == nil or value == core.null
    for _, constant in ipairs(allowed) do holds = holds or equal(value, constant) end
    if not holds then
      local list = {}
      for i, constant in ipairs(allowed) do list[i] = shown(constant) end
      core.fail(("config.json: %s is %s, and this model computes with %s"):format(field, shown(value), table.concat(list, " or ")))
    end
  end
end

-- The value of a setting by its mapping; nil where the script's default stays.
local function read_field(fields, key, mapping, known)
  if type(mapping) == "string" then mapping = { mapping } end
  for _, name in ipairs(mapping) do
    known[name] = true
  end
  for _, name in ipairs(mapping) do
    local value = fields[name]
    if value == core.null then
      if mapping.null ~= nil then return mapping.null end
      if mapping.absent == nil then core.fail(("config.json: %s is null, and %s needs a value"):format(name, key)) end
      return mapping.absent
    end
    if value ~= nil and mapping.values then
      if mapping.values[value] == nil then core.fail(("config.json: %s is %s, which is not supported"):format(name, shown(value))) end
      return mapping.values[value]
    end
    if value ~= nil then return value end
  end
  if mapping.absent == nil then
    core.fail(("config.json has no %s, which the setting %s needs"):format(mapping[1], key))
  end
  return mapping.absent
end

---The settings that a config.json gives a script whose m.config has the table `hf`; `values` are the script's, for types.
---@param hf table
---@param file table config.json
---@param values table<string, any>
---@return table<string, any>
function config.settings(hf, file, values)
  local architecture = type(file.architectures) == "table" and file.architectures[1]
  local entry = config.entry(hf, architecture)
  if not entry then
    local names = {}
    for i, e in ipairs(hf) do names[i] = e[1] end
    core.fail(("this script is no %s, which config.json names"):format(tostring(architecture)), { help = "it is for " .. table.concat(names, ", ") })
  end
  check_quantization(file)
  local fields, names = normalise(file)
  local own = for_architecture(hf, entry)
  local known, settings = {}, {}
  for _, field in ipairs(own.unused) do known[field] = true end
  check_must(fields, own.must, known)
  check_must(fields, own.may, known)
  for key, mapping in pairs(own.mappings) do
    if is_rule(mapping) then
      for _, field in ipairs(mapping.fields) do known[field] = true end
      settings[key] = mapping.read(fields)
    elseif constant_of(mapping) ~= nil then
      settings[key] = constant_of(mapping)
    elseif type(mapping) == "string" or type(mapping) == "table" then
      settings[key] = read_field(fields, key, mapping, known)
    else
      core.fail(("hf.%s is no field, rule or constant"):format(key))
    end
  end
  for key, value in pairs(settings) do -- absent = "heads" is another setting's value
    if type(value) == "string" and type(values[key]) ~= "string" then settings[key] = settings[value] end
  end
  for _, name in ipairs(names) do
    if not known[name] and not HARMLESS[name] and fields[name] ~= core.null then
      core.fail(("config.json: the field %s = %s is not known: it may change what the model computes"):format(name, shown(fields[name])), {
        help = "remove it from config.json if it does not",
      })
    end
  end
  return settings
end

-- Writing ------------------------------------------------------------------------------------------------------------------

-- Whether the settings can be written as this architecture: its constants are theirs.
local function serves(hf, entry, values)
  for key, mapping in pairs(for_architecture(hf, entry).mappings) do
    local constant = constant_of(mapping)
    if constant ~= nil and not equal(values[key], constant) then return false, key, constant end
  end
  return true
end

---config.json of these settings: the first architecture of the table whose constants they have.
---@param hf table
---@param values table<string, any>
---@return table
function config.write(hf, values)
  local reasons = {}
  for _, entry in ipairs(hf) do
    local fits, key, wanted = serves(hf, entry, values)
    if fits then
      local own = for_architecture(hf, entry)
      local fields = { architectures = { entry[1] }, model_type = entry[2] }
      local late = {}
      for key2, mapping in pairs(own.mappings) do
        if is_rule(mapping) then
          late[#late + 1] = { mapping, values[key2] }
        elseif type(mapping) == "string" then
          fields[mapping] = values[key2]
        elseif type(mapping) == "table" and mapping.constant == nil then
          local value = mapping.write and mapping.write(values) or values[key2]
          for field_value, setting in pairs(mapping.values or {}) do
            if setting == values[key2] then value = field_value end
          end
          if mapping.null ~= nil and type(mapping.null) ~= "string" and equal(value, mapping.null) then value = core.null end
          fields[mapping[1]] = value
        end
      end
      for _, rule in ipairs(late) do rule[1].write(rule[2], fields, values) end
      for field, constant in pairs(own.must) do
        if type(constant) == "table" then constant = constant[1] end
        fields[field] = type(constant) == "table" and core.list {} or constant
      end
      for field, value in pairs(own.also and own.also(values) or {}) do fields[field] = value end
      return fields
    end
    reasons[#reasons + 1] = ("%s needs %s = %s"):format(entry[1], key, tostring(wanted))
  end
  core.fail("no published architecture of the script's hf table has these settings", { help = table.concat(reasons, "; ") })
end

return config
