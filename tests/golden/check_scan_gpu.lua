-- args: check --device h200 SCRIPT </dev/null 2>&1 | grep -A2 -E "^scan over" | grep -v "planned\|^products in\|peak"
-- On a GPU, where products take bf16 operands: linear attention is products over chunks; one that multiplies its states by a matrix is one kernel; another step is a loop.
local m = require "mlua"
local A = m.axes { batch = 2, seq = 100, heads = 2, k = 8, v = 8 }
local inputs = { q = { A.batch, A.seq, A.heads, A.k }, k = { A.batch, A.seq, A.heads, A.k }, v = { A.batch, A.seq, A.heads, A.v }, g = { A.batch, A.seq, A.heads } }
local function program(read)
  return m.compile(function(i)
    local y = m.scan(function(s, t)
      local S = s * t.g + t.k:broadcast { A.batch, A.heads, A.k, A.v } * t.v
      return read(S, t)
    end, { axis = "seq", state = m.zeros { A.batch, A.heads, A.k, A.v }, inputs = i })
    local loss = (y * y):sum()
    return { loss = loss, gradient = m.grad(loss, { i.k })[1] }
  end, inputs)
end
program(function(S, t) return S, S:dot(t.q, "k") end)
program(function(S, t) return m.tanh(S), S:dot(t.q, "k") end)
local B = m.axes { h = 32, h2 = 32 }
m.compile(function(i)
  local y = m.scan(function(s, t)
    local h = m.tanh(t + s:dot(i.W, "h"):rename("h2", "h"))
    return h, h
  end, { axis = "seq", state = m.zeros { A.batch, B.h }, inputs = i.x })
  return { gradient = m.grad((y * y):sum(), { i.W })[1] }
end, { x = { A.batch, A.seq, B.h }, W = { B.h, B.h2 } })
-- Mamba-1 in bf16: a state for each channel and n, summed over n; its gradient sums over channels and n, and is one kernel.
local C = m.axes { c = 64, n = 16 }
m.compile(function(i)
  local inputs = {}
  for name, x in pairs(i) do inputs[name] = name == "A" and x or x:cast "bf16" end
  local y = m.scan(function(h, t)
    local dt, x = t.dt:cast "f32", t.x:cast "f32"
    local wide = dt:broadcast { A.batch, C.c, C.n }
    local h2 = h * m.exp(inputs.A * wide) + wide * x * t.b:cast "f32"
    return h2, (h2 * t.c:cast "f32"):sum("n"):cast "bf16"
  end, { axis = "seq", state = m.zeros { A.batch, C.c, C.n }, inputs = { dt = inputs.dt, x = inputs.x, b = inputs.b, c = inputs.c } })
  local f = y:cast "f32"
  return { gradients = m.grad((f * f):sum(), { i.dt })[1], b = m.grad((f * f):sum(), { i.b })[1] }
end, { dt = { A.batch, A.seq, C.c }, x = { A.batch, A.seq, C.c }, b = { A.batch, A.seq, C.n }, c = { A.batch, A.seq, C.n }, A = { C.c, C.n } })
