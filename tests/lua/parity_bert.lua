local core = require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
dofile(root .. "tests/lua/lib/parity.lua")("bert", "models/bert.lua", {
  layers = 2, embed = 16, heads = 2, ffn = 32, batch = 3, vocab = 40, seq = 16, hidden = 0.25,
})
