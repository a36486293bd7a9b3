-- args: check --device cpu --mesh ep=2
-- A mesh axis that the preset has not, and how it has: by its letters pp, dp, cp and tp would all be meant.
local m = require "mlua"
local A = m.axes { batch = 4, embed = 8 }
print(m.layout.megatron { ep = 1 })
m.layout.megatron { sp = true }
