local core = require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
dofile(root .. "tests/lua/lib/parity.lua")("vit", "models/vit.lua", {
  layers = 2, embed = 16, heads = 2, ffn = 32, batch = 3, image = 12, patch = 4,
})
