local m = require "mlua"
local x = m.input("x", { m.axis("seq", 8) })
print(x == nil, x ~= nil)
print(x:sum() < 3)
