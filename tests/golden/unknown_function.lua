local m = require "mlua"
print(m.rmsnorm)
