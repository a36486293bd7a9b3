-- args: repl --device cpu < SCRIPT
m = require "mlua"
A = m.axes { batch = 8, seq = 16, embed = 16, ffn = 32, odd = 6 }
x = m.input("x", { A.batch, A.seq, A.embed })
w = m.param { A.embed, A.ffn, name = "w" }
x:on { tp = { "embed" } }
x:on { "tp" }
x:on { tp = "embed" }
x:on { tp = { "sek" } }
x:on { tp = { "ffn" } }
m.use_layout(m.layout { mesh = { { "dp", 2 }, { "tp", 4 } }, params = { tp = { "ffn" } }, acts = { dp = { "batch" }, tp = { "ffn" } } })
h = x:dot(w, "embed")
h
h:on { tp = { "vocab", "seq" } }
h:on { tp = {} }
h:on { tp = { "seq" }, dp = {} }
h:on { dp = { "seq" }, tp = { "seq" } }
h:dot(w, "ffn"):on { tp = { "seq" } }
require "mlua.core".grad((h:on { dp = { "seq" }, tp = {} } * h):sum(), { h })[1]
h:on { tq = {} }
m.input("y", { A.odd }):on { tp = { "odd" } }
