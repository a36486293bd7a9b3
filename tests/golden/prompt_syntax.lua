-- args: repl --device cpu < SCRIPT
count += 1
self.count[i] //= 2
a.b -= 1
x++
y = x++
if a != b then end
if !a then end
if a && b then end
if a || b then end
if x = 1 then end
if x === 1 then end
if x <> 1 then end
if x =< 1 then end
if x => 1 then end
x = a @ b
@compile
x = 2 ** 3
x = c ? 1 : 2
y = a if c else b
if x is None then end
if x not in list then end
x = 1 # a comment
// a comment
x = 1 // a comment here
/* a comment */
"""doc"""
if x == 1 then y = 1 elif x == 2 then y = 2 end
if x: y = 1 end
def f(x): return x
import torch
class Net(nn.Module): pass
f = lambda x: x + 1
f = (x) => x + 1
let x = 1
raise ValueError("x")
while true do continue end
while true do goto continue end
for (i = 0; i < 3; i++) {
for i in 1..10 do end
function f(x) { return x }
x = [1, 2]
y = x[:, 0]
f(x, dim=1)
function f(x=1) end
function f(x: number) end
local x: number = 1
t = { "a": 1 }
x = t.end
t = { end = 1 }
x = "abc
x = 1_000
x = 3px
x = “abc”
x = a − b
local é = 1
print x
foo(1) = 3
x = { a = 1 b = 2 }
x = f(a b)
x = (1 + 2))
x = {1}}
local function(x) end
end
