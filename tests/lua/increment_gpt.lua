-- The increments of models/gpt.lua: learned positions.
local root = require "mlua.core".options().script:match "^(.*)tests/lua/" or ""
dofile(root .. "tests/lua/lib/increment_model.lua")("gpt", { embed = 32, heads = 4, vocab = 40 })
