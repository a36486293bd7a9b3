-- The increments of models/gemma.lua: windows, scores and logits bounded by tanh.
local root = require "mlua.core".options().script:match "^(.*)tests/lua/" or ""
dofile(root .. "tests/lua/lib/increment_model.lua")("gemma", { embed = 32, heads = 4, kv_heads = 2, head_dim = 8, ffn = 48, vocab = 40, window = 6, pattern = 2, score_cap = 5.0, logit_cap = 6.0 })
