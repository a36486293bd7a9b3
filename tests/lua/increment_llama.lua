-- The increments of models/llama.lua: grouped keys, rotary positions, a window.
local root = require "mlua.core".options().script:match "^(.*)tests/lua/" or ""
dofile(root .. "tests/lua/lib/increment_model.lua")("llama", { embed = 32, heads = 4, kv_heads = 2, ffn = 48, vocab = 40, window = 5, window_from = 1 })
