-- args: run --device cpu --mesh dq=2
local m = require "mlua"
local layout = m.layout { mesh = { { "dp", 1 }, { "cp", 1 } }, acts = { dp = { "batch" } } }
