-- args: check --device cpu SCRIPT </dev/null 2>&1 | grep -A1 "^scan over" | grep -v "^--"
-- Why a step that is linear in its state is no scan in chunks, why one by elements is not associative.
local m = require "mlua"
local A = m.axes { batch = 2, seq = 64, k = 4, v = 4 }
local inputs = { q = { A.batch, A.seq, A.k }, k = { A.batch, A.seq, A.k }, w = { A.batch, A.seq, A.k }, v = { A.batch, A.seq, A.v }, g = { A.batch, A.seq } }
local function W(x) return x:broadcast { A.batch, A.k, A.v } end
local matrix = { A.batch, A.k, A.v }
m.compile(function(i)
  local ys = {}
  local function keep(y) ys[#ys + 1] = y:sum() end
  keep(m.scan(function(S, t) local S2 = S * W(t.v) + W(t.k) * t.v; return S2, S2:dot(t.q, "k") end, { axis = "seq", state = m.zeros(matrix), inputs = i }))
  keep(m.scan(function(S, t) local S2 = S * t.g + W(t.k) * t.v; return S2, S2:dot(t.q, "k") * S2:dot(t.v, "v"):sum "k" end, { axis = "seq", state = m.zeros(matrix), inputs = i }))
  keep(m.scan(function(S, t) local S2 = S * t.g + m.exp(W(t.k) * t.v); return S2, S2:dot(t.q, "k") end, { axis = "seq", state = m.zeros(matrix), inputs = i }))
  keep(m.scan(function(S, t)
    local S2 = S * t.g + W(t.k) * t.v
    for p = 1, 5 do S2 = S2 + W(t.w ^ p) * S:dot(t.k ^ (6 - p), "k") end
    return S2, S2:dot(t.q, "k")
  end, { axis = "seq", state = m.zeros(matrix), inputs = i }))
  keep(m.scan(function(s, t)
    local a, b = s.a * t.g + s.b * W(t.k), s.b * t.g + s.a * W(t.w)
    return { a = a, b = b }, a:dot(t.q, "k") + b:dot(t.q, "k")
  end, { axis = "seq", state = { a = m.zeros(matrix), b = m.zeros(matrix) }, inputs = i }))
  keep(m.scan(function(S, t) local S2 = (S * t.g):cast "bf16":cast "f32" + W(t.k) * t.v; return S2, S2:dot(t.q, "k") end, { axis = "seq", state = m.zeros(matrix), inputs = i }))
  keep(m.scan(function(h, t) local h2 = m.relu(h * t.k + t.q); return h2, h2 end, { axis = "seq", state = m.zeros { A.batch, A.k }, inputs = i }))
  local loss = 0
  for _, y in ipairs(ys) do loss = loss + y end
  return { loss = loss }
end, inputs)
