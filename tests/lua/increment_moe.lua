-- The increments of models/gpt_moe.lua: choices sorted by their experts, of softmax and sigmoid routers; a shared expert; capacities that
-- drop rows, whose counts are kept.
local root = require "mlua.core".options().script:match "^(.*)tests/lua/" or ""
local compare = dofile(root .. "tests/lua/lib/increment_model.lua")
for _, settings in ipairs {
  { experts = 6, top_k = 3, router = "sigmoid", shared = 1 },
  { experts = 4, top_k = 2, capacity = 0.6, draws = 11 },
} do
  for key, value in pairs { layers = 1, embed = 16, heads = 2, kv_heads = 1, ffn = 8, vocab = 24, seq = 20 } do settings[key] = value end
  compare("gpt_moe", settings)
end
