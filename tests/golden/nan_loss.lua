-- args: run --device cpu --json SCRIPT > /dev/null
-- The scale of the second block is learned away below zero: its square root is no number at step 5.
local m = require "mlua"
local A = m.axes { vocab = 256, embed = 8, seq = 4, batch = 2 }
local Scale = m.module("Scale", function(self, start)
  self.gain = m.param { init = m.init.constant(start) }
end)
function Scale:forward(x)
  return x * m.sqrt(self.gain)
end
local Model = m.module("Model", function(self)
  self.table = m.param { A.vocab, A.embed }
  self.blocks = { Scale(100), Scale(3.5) }
end)
function Model:forward(tokens)
  local x = self.table:gather(tokens, "vocab")
  for _, block in ipairs(self.blocks) do x = block(x) end
  return x:dot(self.table, "embed")
end
local decay = m.optimizer("decay", { lr = 1 }, function(p, g, s, t) -- takes one away from the scales
  return t.parameter:kind() == "parameter" and #p:axes() == 0 and p - t.lr or p
end)
m.train { model = Model(), batch = A.batch, seq = A.seq, vocab = 256, steps = 10, optimizer = decay(), log_every = 100 }
