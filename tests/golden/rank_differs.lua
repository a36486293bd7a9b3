-- args: run --device cpu -n 2
local m, core = require "mlua", require "mlua.core"
local layout = m.layout { mesh = { { "dp", 2 } }, acts = { dp = { "batch" } } }
local A = m.axes { batch = 4 }
local factor = core.options().rank == 1 and 3 or 2
local f = m.compile(function(feeds) return (feeds.x * factor):sum() end, { x = { A.batch } }, { layout = layout })
