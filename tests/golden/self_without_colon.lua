local m = require "mlua"
local Net = m.module("Net", function(self) self.w = m.param { m.axis("a", 4) } end)
function Net.forward(x) return self.w * x end
Net()(m.zeros { m.axis("a", 4) })
