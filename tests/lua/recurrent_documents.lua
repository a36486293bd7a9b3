-- Recurrent models with pack = "document": what each document of a row gives is what it gives alone.
local m, core = require "mlua", require "mlua.core"
local packing = require "mlua.packing"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")
local LENGTHS = { 5, 40, 1, 2, 17 }

-- What a model's script hands to m.train, under these settings.
local function model_of(file, settings)
  local config, train, generate, given = m.config, m.train, m.generate, nil
  m.config = function(defaults)
    for key, value in pairs(settings) do defaults[key] = value end
    return config(defaults)
  end
  m.train, m.generate = function(o) given = o end, function() end
  dofile(root .. "models/" .. file .. ".lua")
  m.config, m.train, m.generate = config, train, generate
  return given.model
end

local function logits(model, length, packed)
  local batch, seq = m.axis("batch", 1), m.axis("seq", length)
  local ids = { batch, seq, dtype = "i32" }
  return m.compile(function(i)
    local function forward() return model(i.tokens):permute("batch", "seq", "vocab") end
    return { y = packed and packing.trace({ batch = batch, seq = seq }, i, forward) or forward() }
  end, packed and { tokens = ids, documents = ids, positions = ids } or { tokens = ids })
end

local tokens, documents, positions = {}, {}, {}
for d, length in ipairs(LENGTHS) do
  for k = 1, length do
    tokens[#tokens + 1], documents[#documents + 1], positions[#positions + 1] = (d * 7 + k * k * 3) % 11, d - 1, k - 1
  end
end

local function compare(what, file, settings)
  settings.layers, settings.embed, settings.vocab, settings.seq = 2, 16, 11, #tokens
  local model = model_of(file, settings)
  local row = logits(model, #tokens, true) { tokens = tokens, documents = documents, positions = positions }.y
  local first = 0
  for d, length in ipairs(LENGTHS) do
    local part, expected = {}, {}
    for k = 1, length do part[k] = tokens[first + k] end
    local alone, actual = logits(model, length, false) { tokens = part }.y, {}
    for k = 1, length * 11 do actual[k], expected[k] = row[first * 11 + k], alone[k] end
    check.all(actual, expected, 1e-5, ("%s: document %d"):format(what, d))
    first = first + length
  end
end
compare("mamba", "mamba", { heads = 4, head_dim = 8, groups = 2, state = 4 })
compare("deltanet", "deltanet", { heads = 2, key_dim = 4, value_dim = 8, ffn = 16 })
compare("kda", "deltanet", { heads = 2, key_dim = 4, value_dim = 8, ffn = 16, rank = 3, decay_per = "key" })
compare("hybrid", "hybrid", {
  pattern = "DE M- *E", heads = 2, kv_heads = 1, head_dim = 8, rope_part = 0.5, key_heads = 2, value_heads = 4, key_dim = 4, value_dim = 8, ssm_groups = 2, ssm_heads = 4, ssm_dim = 8,
  state = 4, ffn = 16, expert_ffn = 8, shared_ffn = 8, experts = 4, top_k = 2,
})
compare("rwkv", "rwkv", { heads = 2, ffn = 16, rank_w = 3, rank_a = 3, rank_v = 3, rank_g = 3 })
check.done()
