local core = require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
dofile(root .. "tests/lua/lib/parity.lua")("hybrid", "models/hybrid.lua", {
  pattern = "DE M- *E", layers = 3, embed = 32, heads = 4, kv_heads = 2, head_dim = 8, rope_part = 0.5, key_heads = 2, value_heads = 4, key_dim = 12, value_dim = 10,
  ssm_groups = 2, ssm_heads = 4, ssm_dim = 8, state = 6, ffn = 48, expert_ffn = 12, shared_ffn = 20, experts = 4, top_k = 2, aux = 0, vocab = 61, seq = 37, batch = 2,
})
