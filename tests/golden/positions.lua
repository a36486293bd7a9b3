-- args: repl --device cpu < SCRIPT
seq, head_dim, experts = m.axis("seq", 4), m.axis("head_dim", 8), m.axis("experts", 3)
q, k = m.input("q", { seq, m.axis("heads", 2), head_dim }), m.input("k", { seq, m.axis("heads", 2), head_dim })
q:dot(k, "head_dim")
q:dot(k, "head_dim") -- told once
for i = 1, 2 do local s = q:dot(2 * k, "head_dim") end
q:dot(k:rename("seq", "kv_seq"), "head_dim")
q:dot(k, "seq")
q:dot(m.param { seq, head_dim, name = "positions" }, "head_dim")
m.input("share", { seq, experts }):dot(m.input("out", { seq, experts, head_dim }), "experts")
m.input("grouped", { seq, m.axis("group", 2), m.axis("heads", 2), head_dim }):dot(k, "head_dim")
time = m.axis("time", 4)
m.input("a", { time, head_dim }):dot(m.input("b", { time, head_dim }), "head_dim")
require("mlua.core").sequence_axis "time"
m.input("a", { time, head_dim }):dot(m.input("b", { time, head_dim }), "head_dim")
