-- The increments of models/rwkv.lua: each token is mixed with the one before it.
local root = require "mlua.core".options().script:match "^(.*)tests/lua/" or ""
dofile(root .. "tests/lua/lib/increment_model.lua")("rwkv", { embed = 32, heads = 2, ffn = 48, vocab = 40 })
