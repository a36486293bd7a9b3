-- args: check --device cpu SCRIPT
-- What an own loop feeds is looked at where nothing runs, too.
local m = require "mlua"
local run = m.compile(function(i) return i.x * 2 end, { x = { m.axis("embed", 2), m.axis("ffn", 3) } })
for _ = 1, 2 do run { x = m.host("f32", 3, 2) } end
