-- args: run --device cpu -n 2 --dtype fp8
-- The same with experts of two ranks, by the scales of whole tensors.
local core = require "mlua.core"
dofile((core.options().script:match "^(.*)tests/lua/" or "") .. "tests/lua/fp8_experts.lua")
