-- args: repl --device cpu < SCRIPT
x = m.input("x", { m.axis("seq", 4), m.axis("embed", 8) })
x
local y = x * 2
y:sum "seq"
y:smu()
_
for i = 1, 2 do
  print(i)
end
1 + 1, "a", { 1, 2, x = 3 }
if x then end
z = = 1
local function f() return y:sum "haeds" end
f()
m.compile(function(i) return i.x:sum() end, { x = { m.axis("seq", 4) } }) { x = { 1, 2, 3, 4 } }
nothing.at.all
