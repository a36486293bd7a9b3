-- args: run --device cpu -n 2
local m, core = require "mlua", require "mlua.core"
local layout = m.layout { mesh = { { "dp", 2 } }, acts = { dp = { "batch" } } }
local A = m.axes { batch = 4 }
local f = m.compile(function(feeds) return feeds.x:sum() end, { x = { A.batch } }, { layout = layout })
math.randomseed(3)
print(f { x = { 1, 2, 3, 4 } })
math.randomseed(3 + core.options().rank)
print(f { x = { math.random(), 2, 3, 4 } })
