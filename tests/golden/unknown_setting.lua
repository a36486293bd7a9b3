-- args: run --device cpu SCRIPT stesp=3
local m = require "mlua"
local cfg = m.config { steps = 10, lr = 1e-3 }
