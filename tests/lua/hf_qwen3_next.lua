-- See lib/hf.lua.
local root = require "mlua.core".options().script:match "^(.*)tests/lua/" or ""
dofile(root .. "tests/lua/lib/hf.lua")("qwen3_next", { gradients = true })
