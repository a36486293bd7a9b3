-- args: check --mesh dp=4 SCRIPT
-- A program beside training, whose batch its ranks cannot split; called otherwise it is whole on each.
local m = require "mlua"
m.use_layout(m.layout.ddp {})
local w = m.param { m.axis("embed", 4), name = "w" }
local function program(axis)
  m.compile(function(feeds) return feeds.x:dot(w, "embed") end, { x = { m.axis(axis, 2), m.axis("embed", 4) } }):plan()
end
program "sample"
program "batch"
