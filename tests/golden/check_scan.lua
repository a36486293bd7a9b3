-- args: check --device cpu SCRIPT </dev/null 2>&1 | grep "scan over"
-- The forms of scans: a step by elements is one kernel, forward and backward, of states whose positions compose or not; sums of
-- outer products that decay are products over chunks; another a loop.
local m = require "mlua"
local A = m.axes { batch = 4, seq = 32, embed = 8 }
local decay, w = m.param { A.embed, init = "ones", name = "decay" }, m.param { A.embed, m.axes { out = 8 }.out, name = "w" }
local start = m.param { A.embed, name = "start" }
local function states() return start:read():broadcast { A.batch, A.embed } end
local function loss(x, gate)
  local average = m.scan(function(s, t) local h = s * decay + t.x * t.gate; return h, h * h end,
    { axis = "seq", state = states(), inputs = { x = x, gate = gate } })
  local mixed = m.scan(function(s, t) local h = m.tanh(s:dot(w, "embed"):rename("out", "embed") + t); return h, h end,
    { axis = "seq", state = states(), inputs = x })
  local largest = m.scan(function(s, t) local h = m.maximum(s - t.x * t.x, t.x); return h, h end,
    { axis = "seq", state = states(), inputs = { x = x, gate = gate } })
  local bent = m.scan(function(s, t) local h = m.tanh(s + t); return h, h end, { axis = "seq", state = states(), inputs = x })
  local k = m.axes { k = 4 }.k
  local memory = m.scan(function(s, t)
    local S = s * t.gate + (t.x:slice("embed", 0, 4):rename("embed", "k")):broadcast { A.batch, k, A.embed } * t.x
    return S, S:dot(t.x:slice("embed", 4, 8):rename("embed", "k"), "k")
  end, { axis = "seq", state = m.zeros { A.batch, k, A.embed }, inputs = { x = x, gate = gate } })
  return (average * mixed * memory * largest * bent):sum()
end
m.compile(function(i)
  local l = loss(i.x, i.gate)
  local g = m.grad(l, { decay, w, start, i.x, i.gate })
  return { loss = l, a = g[1], b = g[2], c = g[3], d = g[4], e = g[5] }
end, { x = { A.batch, A.seq, A.embed }, gate = { A.batch, A.seq } })
