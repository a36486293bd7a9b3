local core = require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
dofile(root .. "tests/lua/lib/parity.lua")("llama", "models/llama.lua", {
  layers = 2, embed = 32, heads = 4, vocab = 61, seq = 16, batch = 2, kv_heads = 2, ffn = 48,
})
