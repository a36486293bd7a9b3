local core = require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
dofile(root .. "tests/lua/lib/parity.lua")("t5", "models/t5.lua", {
  layers = 2, embed = 16, heads = 2, ffn = 32, batch = 3, vocab = 40, seq = 24, head_dim = 6, buckets = 8, reach = 12,
})
