local core = require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
dofile(root .. "tests/lua/lib/parity.lua")("llava", "models/llava.lua", {
  layers = 2, embed = 16, heads = 2, ffn = 32, batch = 3, kv_heads = 1, vocab = 40, seq = 16, image = 8, patch = 4, eye_layers = 2, eye_embed = 16, eye_heads = 2, eye_ffn = 32,
})
