local m = require "mlua"
local axes = require "axes"
local A = axes.A
local layers = {}
layers.MLP = m.module("MLP", function(self)
  self.up, self.down = m.param { A.embed, A.ffn }, m.param { A.ffn, A.embed }
end)
function layers.MLP:forward(x) return x + m.gelu(x:dot(self.up, "embed")):dot(self.down, "ffn") end
function layers.count() return 2 end
return layers
