-- args: run --device cpu -n 4 --mesh dp=2
local m = require "mlua"
local layout = m.layout.ddp {}
local x = m.compile(function(feeds) return feeds.x * 2 end, { x = {} }, { layout = layout })
