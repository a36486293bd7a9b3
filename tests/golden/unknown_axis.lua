local m = require "mlua"
local A = m.axes { batch = 8, embed = 64 }
local x = m.input("x", { A.batch, A.embed })
print(x:sum("embde"))
