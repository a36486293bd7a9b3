-- args: check --device rtx4090 SCRIPT > /dev/null
local m = require "mlua"
local A = m.axes { batch = 64, seq = 2048, embed = 1024, vocab = 50304 }
local out = m.param { A.embed, A.vocab, name = "out" }
m.compile(function(i)
  return i.x:dot(out, "embed", { dtype = "f32" })
end, { x = { A.batch, A.seq, A.embed, dtype = "bf16" } })
