-- args: run --device cpu SCRIPT batch_size=8
local m = require "mlua"
m.config { batch = 4, layers = 2 }
