local m = require "mlua"
local A = m.axes { embed = 100 / 3 }
