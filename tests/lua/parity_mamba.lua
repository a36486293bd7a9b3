local core = require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
dofile(root .. "tests/lua/lib/parity.lua")("mamba", "models/mamba.lua", {
  layers = 2, embed = 32, groups = 2, heads = 4, head_dim = 8, state = 6, vocab = 61, seq = 37, batch = 2,
})
