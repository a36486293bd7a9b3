-- The increments of models/deepseek.lua: experts within the best groups, by sigmoid scores and a bias; a shared one; a dense layer first.
local root = require "mlua.core".options().script:match "^(.*)tests/lua/" or ""
dofile(root .. "tests/lua/lib/increment_model.lua")("deepseek", {
  embed = 32, heads = 2, latent = 16, nope = 8, rope_dim = 4, v_dim = 8, ffn = 24, expert_ffn = 16, experts = 8, top_k = 3, groups = 4, top_groups = 2, vocab = 32,
})
