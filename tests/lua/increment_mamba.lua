-- The increments of models/mamba.lua: short convolutions and a scan.
local root = require "mlua.core".options().script:match "^(.*)tests/lua/" or ""
dofile(root .. "tests/lua/lib/increment_model.lua")("mamba", { embed = 32, vocab = 40 })
