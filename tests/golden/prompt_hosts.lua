-- args: repl --device cpu < SCRIPT
m = require "mlua"
h, x = m.host("i32", 4, 8), m.input("x", { m.axis("batch", 4) })
h[1][2]
h + 1
("%g"):format(x)
h.shape
