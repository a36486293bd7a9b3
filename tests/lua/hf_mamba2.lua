-- See lib/hf.lua.
local root = require "mlua.core".options().script:match "^(.*)tests/lua/" or ""
dofile(root .. "tests/lua/lib/hf.lua")("mamba2", { gradients = true })
