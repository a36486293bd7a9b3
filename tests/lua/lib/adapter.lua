-- Makes NAME-adapter, an adapter as PEFT writes them of the tiny model tests/hf/NAME, and NAME-merged, its weights with
-- alpha / r B A added here by hand. With compare=A against=B: whether two safetensors files hold the same to `within`.
local m, core = require "mlua", require "mlua.core"
local cfg = m.config { modules = "q_proj k_proj o_proj down_proj lm_head", r = 2, alpha = 6.0, name = "llama", held = "", compare = "", against = "", within = 0.0 }
if cfg.compare ~= "" then
  local a, b = m.read_tensors(cfg.compare), m.read_tensors(cfg.against)
  for key in pairs(a) do assert(b[key], key) end
  for key, values in pairs(b) do
    assert(a[key] and #a[key] == #values and table.concat(a[key]:dims(), " ") == table.concat(values:dims(), " "), key)
    for i = 1, #values do assert(math.abs(values[i] - a[key][i]) <= cfg.within, key) end
  end
  return
end

local base = os.getenv "ROOT" .. "/tests/hf/" .. cfg.name
local weights, order, adapters = m.read_tensors(base .. "/model.safetensors"), {}, {}
for name in pairs(weights) do order[#order + 1] = name end
table.sort(order)
local function write(path, names, tensors)
  local header, offset = { __metadata__ = { format = "pt" } }, 0
  for _, name in ipairs(names) do
    local dims = setmetatable(tensors[name]:dims(), { __list = true })
    header[name] = { dtype = "F32", shape = dims, data_offsets = { offset, offset + 4 * #tensors[name] } }
    offset = offset + 4 * #tensors[name]
  end
  local text = core.to_json(header)
  local writer = core.tensor_writer(path, text .. (" "):rep(-#text % 8))
  for _, name in ipairs(names) do writer:write(tensors[name]) end
  writer:close()
end
local names = {}
if cfg.held ~= "" then -- a base weight that the adapter's file holds, changed
  local W, full = weights[cfg.held .. ".weight"], ("base_model.model.%s.base_layer.weight"):format(cfg.held)
  local copy = m.host("f32", table.unpack(W:dims()))
  for i = 1, #W do
    W[i] = 1.5 * W[i]
    copy[i] = W[i]
  end
  adapters[full], names[1] = copy, full
end
for n, name in ipairs(order) do
  local module = name:match "^(.*)%.weight$"
  if (" " .. cfg.modules .. " "):find(" " .. (module or ""):match "[^.]*$" .. " ", 1, true) then
    local W = weights[name]
    local out, inner = W:dims()[1], W:dims()[2]
    local turned = cfg.name == "gpt2" -- its weights lie [in, out]
    if turned then out, inner = inner, out end
    local A, B = m.host("f32", cfg.r, inner), m.host("f32", out, cfg.r)
    for i = 1, #A do A[i] = 0.3 * math.sin(7 * n + 3 * i) end
    for i = 1, #B do B[i] = 0.3 * math.cos(5 * n + 2 * i) end
    for i = 0, out - 1 do
      for j = 1, inner do
        local sum = 0
        for k = 1, cfg.r do sum = sum + B[i * cfg.r + k] * A[(k - 1) * inner + j] end
        local at = turned and (j - 1) * out + i + 1 or i * inner + j
        W[at] = W[at] + cfg.alpha / cfg.r * sum
      end
    end
    for key, values in pairs { A = A, B = B } do
      local full = ("base_model.model.%s.lora_%s.weight"):format(module, key)
      adapters[full], names[#names + 1] = values, full
    end
  end
end
table.sort(names)
core.make_folder(cfg.name .. "-adapter")
write(cfg.name .. "-adapter/adapter_model.safetensors", names, adapters)
local file = io.open(cfg.name .. "-adapter/adapter_config.json", "w")
file:write(core.to_json { peft_type = "LORA", r = cfg.r, lora_alpha = cfg.alpha, base_model_name_or_path = base, bias = "none", task_type = "CAUSAL_LM" })
file:close()
core.make_folder(cfg.name .. "-merged")
write(cfg.name .. "-merged/model.safetensors", order, weights)
