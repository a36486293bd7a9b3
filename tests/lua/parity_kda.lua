local core = require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
dofile(root .. "tests/lua/lib/parity.lua")("kda", "models/deltanet.lua", {
  layers = 2, embed = 32, heads = 2, key_dim = 12, value_dim = 10, rank = 5, decay_per = "key", ffn = 48, vocab = 61, seq = 37, batch = 2,
})
