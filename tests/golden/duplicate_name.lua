local m = require "mlua"
local embed = m.axis("embed", 8)
m.param { embed, name = "gain" }
m.param { embed, name = "gain" }
