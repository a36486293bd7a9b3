local m = require "mlua"
local A = m.axes { vocab = 256, embed = 64, seq = 8 }
local table, index = m.input("table", { A.vocab, A.embed }), m.input("index", { A.seq }, "f32")
print(table:gather(index, "vocab"))
