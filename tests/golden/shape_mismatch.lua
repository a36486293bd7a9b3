local m = require "mlua"
local cfg = m.config { embed = 4096, width = 2048 }
local A = m.axes { batch = 8, seq = 16, embed = cfg.embed, heads = 4 }
local B = m.axes { embed = cfg.width }

local Block = m.module("Block", function(self)
  self.wq = m.param { B.embed, A.heads }
end)

function Block:forward(h)
  return h:dot(self.wq, "embed")
end

Block()(m.input("x", { A.batch, A.seq, A.embed }))
