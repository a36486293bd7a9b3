-- The increments of models/gpt_moe.lua: choices sorted by their experts, of softmax and sigmoid routers; shared experts; one expert a token.
local root = require "mlua.core".options().script:match "^(.*)tests/lua/" or ""
local compare = dofile(root .. "tests/lua/lib/increment_model.lua")
for _, settings in ipairs {
  { experts = 4, top_k = 2 },
  { experts = 6, top_k = 3, router = "sigmoid", shared = 1, qk_norm = true, draws = 11 },
  { experts = 4, top_k = 1, draws = 5 },
} do
  for key, value in pairs { embed = 32, heads = 2, kv_heads = 1, ffn = 16, vocab = 32 } do settings[key] = value end
  compare("gpt_moe", settings)
end
