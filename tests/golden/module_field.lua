local m = require "mlua"
local embed = m.axis("embed", 8)
local Norm = m.module("Norm", function(self) self.gain = m.param { embed } end)
function Norm:forward(x)
  return x * self.gian
end
Norm()(m.input("x", { embed }))
