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
