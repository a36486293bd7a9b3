-- args: MLUA_RECOMPUTE=1 run --device cpu -n 4
-- As dist_largest.lua, where the backward pass computes what it can again.
local core = require "mlua.core"
dofile((core.options().script:match "^(.*)tests/lua/" or "") .. "tests/lua/dist_largest.lua")
