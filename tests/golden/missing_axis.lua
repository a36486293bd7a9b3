local m = require "mlua"
local A = m.axes { batch = 8, seq = 16, embed = 64 }
local x, bias = m.input("x", { A.batch, A.embed }), m.input("bias", { A.seq })
print(x + bias)
