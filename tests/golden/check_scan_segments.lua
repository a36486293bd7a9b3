-- args: check --device h100 SCRIPT --memory 1.02113 </dev/null 2>&1 | grep -A1 "scan over"
-- Of a scan without a form in chunks, states at all positions are stored where they fit; with less memory those before segments are,
-- of the longest that fit.
local m = require "mlua"
local A = m.axes { batch = 4, seq = 128, k = 32, v = 32 }
m.compile(function(i)
  local y = m.scan(function(S, t)
    local missed = m.tanh(S:dot(t.k, "k")) - t.v
    S = S - t.k:broadcast { A.batch, A.k, A.v } * missed * 0.1
    return S, S:dot(t.k, "k")
  end, { axis = "seq", state = m.zeros { A.batch, A.k, A.v }, inputs = i })
  local loss = (y * y):sum()
  local g = m.grad(loss, { i.k, i.v })
  return { loss = loss, k = g[1], v = g[2] }
end, { k = { A.batch, A.seq, A.k }, v = { A.batch, A.seq, A.v } })
