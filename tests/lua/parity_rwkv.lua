local core = require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
dofile(root .. "tests/lua/lib/parity.lua")("rwkv", "models/rwkv.lua", {
  layers = 2, embed = 32, heads = 4, ffn = 48, rank_w = 5, rank_a = 4, rank_v = 3, rank_g = 6, vocab = 61, seq = 37, batch = 2,
})
