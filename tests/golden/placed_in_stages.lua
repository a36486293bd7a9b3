-- args: check --device cpu
-- What cuts stages splits no tensor: ranks of other stages do not hold it.
local m = require "mlua"
local A = m.axes { embed = 8, vocab = 16, seq = 4, batch = 4 }
local Block = m.module("Block", function(self) self.w = m.param { A.embed } end)
function Block:forward(x) return (x * self.w):on { pp = { "batch" } } end
local Model = m.module("Model", function(self)
  self.table, self.blocks = m.param { A.vocab, A.embed }, m.stack(2, Block)
end)
function Model:forward(tokens)
  local x = self.table:gather(tokens, "vocab")
  for _, block in ipairs(self.blocks) do x = block(x) end
  return x:dot(self.table, "embed")
end
m.train {
  model = Model(), batch = A.batch, seq = A.seq, vocab = 16, steps = 1,
  layout = m.layout { mesh = { { "pp", 2 } }, stages = { pp = "blocks" } },
}
