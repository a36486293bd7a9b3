local m = require "mlua"
local double = m.compile(function(i) return { y = 2 * i.x } end, { x = { m.axis("seq", 4) } })
double { z = { 1, 2, 3, 4 }, x = { 1, 2, 3, 4 } }
