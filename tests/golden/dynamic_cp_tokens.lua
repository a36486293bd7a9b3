-- args: check --device cpu SCRIPT --mesh cp=4
-- A rank's share of a sequence that is so small that all ranks do not hold a window.
local m = require "mlua"
local A = m.axes { embed = 8, vocab = 16, seq = 64, batch = 16 }
local Net = m.module("Net", function(self) self.table = m.param { A.vocab, A.embed } end)
function Net:forward(tokens) return self.table:gather(tokens, "vocab"):dot(self.table, "embed") end
m.train { model = Net(), batch = A.batch, seq = A.seq, accum = 4, steps = 1, data = "text.jsonl", pack = "document", layout = m.layout.megatron { cp = "dynamic", cp_tokens = 12 } }
