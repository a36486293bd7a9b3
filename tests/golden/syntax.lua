local m = require "mlua"
local x = m.axes { batch = 8 
print(x)
