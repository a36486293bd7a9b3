local m = require "mlua"
local tokens = m.input("tokens", { m.axis("seq", 8) }, "i32")
print(tokens * 0.5)
