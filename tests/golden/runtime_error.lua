local m = require "mlua"
local x = m.input("x", { m.axis("seq", 8) })
print(math.exp(x))
