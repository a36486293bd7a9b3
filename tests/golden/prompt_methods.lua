-- args: repl --device cpu < SCRIPT
A = m.axes { batch = 2, embed = 4 }
h = m.zeros { A.batch, A.embed }
host = m.host("f32", 2)
t = {}
h.mean "embed"
h.gelu()
(h + 1).var("embed")
m.gelu(h):silu().relu()
host.fill(1)
math:sqrt(2)
h + t.bias
m.exp(t.bias)
h:dot(t.bias, "embed")
m.where(h:gt(0), h, t.bias)
h + print()
m.gelu(t.bias)
unpack { 1, 2 }
arg[1]
bit32.band(1, 2)
math.sqrt(h)
A.batch + 1
for _, x in ipairs(t.list) do print(x) end
for k in pairs(t.list) do print(k) end
math.floor()
table.sort { 1, "a" }
math.round(2.5)
t.items = {}
t.items:append(1)
("a b"):split()
table.join({ 1, 2 })
