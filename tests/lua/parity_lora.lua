local core = require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
dofile(root .. "tests/lua/lib/parity.lua")("lora", "models/lora.lua", {
  layers = 2, embed = 16, heads = 2, ffn = 32, batch = 3, kv_heads = 1, vocab = 40, seq = 16, rank = 3, alpha = 6.0, pretrain = 0,
})
