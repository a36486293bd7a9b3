-- args: check --device cpu
local m = require "mlua"
local A = m.axes { batch = 8, seq = 16 }
local x = m.input("x", { A.batch, A.seq })
local y = x:on { ep = { "seq" } }
m.use_layout(m.layout { mesh = { { "dp", 2 }, { "cp", 1 } }, acts = { dp = { "batch" } } })
