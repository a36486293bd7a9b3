-- args: repl --device cpu < SCRIPT
m = require "mlua"
A = m.axes { batch = 8, embed = 16, ffn = 32 }
x = m.input("x", { A.batch, A.embed })
x
m.use_layout(m.layout { mesh = { { "dp", 2 }, { "tp", 4 } }, params = { tp = { "ffn" } }, acts = { dp = { "batch" }, tp = { "ffn" } } })
x
w = m.param { A.embed, A.ffn, name = "w" }
w
x:dot(w, "embed")
x:dot(w, "embed"):dot(w, "ffn")
(x * x):sum()
m.input("narrow", { A.batch, A.ffn }, "bf16"):cast "f32":on { tp = {} } -- the narrow one is gathered
