-- args: run --device cpu -n 4 --dtype fp8
-- The same on four ranks, by the scales of whole tensors.
local core = require "mlua.core"
dofile((core.options().script:match "^(.*)tests/lua/" or "") .. "tests/lua/fp8.lua")
