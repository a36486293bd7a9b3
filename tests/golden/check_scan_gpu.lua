-- args: check --device h200 SCRIPT </dev/null 2>&1 | grep -E "^scan over|no form|help"
-- On a GPU, where products take bf16 operands: linear attention is products over chunks; a step with a product of states is refused.
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
print(select(2, pcall(program, function(S, t) return m.tanh(S), S:dot(t.q, "k") end)))
