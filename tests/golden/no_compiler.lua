-- args: PATH=/nonexistent CC= MLUA_CACHE=build/no-cache run --device cpu
local m = require "mlua"
local x = m.compile(function(i) return m.exp(i.x) + 0.123456 end, { x = { m.axis("seq", 4) } })
x { x = { 1, 2, 3, 4 } }
