local m = require "mlua"
local shared, layers = require "axes", require("layers")
local A = shared.A
local Model = m.module("Model", function(self)
  self.table, self.layers = m.param { A.vocab, A.embed }, m.stack(layers.count(), layers.MLP)
end)
function Model:forward(tokens)
  local x = self.table:gather(tokens, "vocab")
  for _, layer in ipairs(self.layers) do x = layer(x) end
  return x:dot(self.table, "embed")
end
m.train { model = Model(), batch = A.batch, seq = A.seq, steps = shared.cfg.steps, optimizer = m.sgd { lr = 0.1 } }
