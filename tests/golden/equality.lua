local m = require "mlua"
local x = m.input("x", { m.axis("seq", 8) })
local function is_zero(t) return t:sum() == 0 end
print(is_zero(x))
