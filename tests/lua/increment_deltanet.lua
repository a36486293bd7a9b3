-- The increments of models/deltanet.lua.
local root = require "mlua.core".options().script:match "^(.*)tests/lua/" or ""
dofile(root .. "tests/lua/lib/increment_model.lua")("deltanet", { embed = 32, heads = 2, vocab = 40 })
