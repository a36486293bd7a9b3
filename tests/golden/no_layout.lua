-- args: run --device cpu -n 2
local m = require "mlua"
local x = m.compile(function(feeds) return feeds.x * 2 end, { x = {} })
print(x { x = 1 })
