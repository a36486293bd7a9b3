local m = require "mlua"
local A = m.axes { batch = 2, seq = 16, heads = 2, head_dim = 8 }
local q = m.input("q", { A.batch, A.seq, A.heads, A.head_dim })
print(m.attention(q, q, q, { casual = true }))
