-- args: check SCRIPT
-- A program beside training, whose batch two mesh axes split and do not divide; called otherwise it is whole on each.
local m = require "mlua"
m.use_layout(m.layout { mesh = { { "dp", 2 }, { "ep", 2 } }, acts = { dp = { "batch" }, ep = { "batch" } } })
local w = m.param { m.axis("embed", 4), name = "w" }
local function program(axis)
  m.compile(function(feeds) return feeds.x:dot(w, "embed") end, { x = { m.axis(axis, 6), m.axis("embed", 4) } }):plan()
end
program "sample"
program "batch"
