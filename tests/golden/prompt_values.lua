-- args: repl --device cpu < SCRIPT
A = m.axes { a = 2, b = 3, c = 20, big = 100000000 }
= m.iota(A.c):sum()
= m.iota(A.b):cast("f32") / 7
= m.iota(A.b):broadcast { A.a, A.b }:cast("f32") * 0.1
= m.eq(m.iota(A.b), 1)
= m.iota(A.c):broadcast { A.a, A.b, A.c }
= (m.iota(A.c):cast("f32"):broadcast { A.c, A.b } / 7):cast("bf16"):cast("f64")
= m.where(m.eq(m.iota(A.b), 1), 1.5, 0) / 0
w = m.param { A.a, A.b, name = "w", init = 1.5 }
= w
= w:get()
= w:sum("b"), w * 0 + 1
p = m.param { A.a }
= p
x = m.input("x", { A.a })
= x:sum() + 1
= m.normal({ A.big }, 1):mean()
f = m.compile(function(i)
  w:assign(w:read() * 0 + i.x)
  return { y = i.x * 2, s = i.x:sum() }
end, { x = { A.a } })
= f { x = { 1, 2 } }
= w
= _:sum()
= "a", 1 + 1, { 1, x = 2 }
= 1 +
41
= = 3
= m.host("i32", 3)
x == nil
