-- args: check --device h100 SCRIPT --mesh cp=4 </dev/null 2>&1 | grep -e "scan over" -e "take turns"
-- Where ranks share the scan's axis: where states are affine their maps are gathered; else ranks take turns, and all follow their part in
-- each: the report says how long that is predicted to take.
local m = require "mlua"
local A = m.axes { batch = 2, seq = 32, embed = 4 }
m.compile(function(i)
  local z = m.zeros { A.batch, A.embed }
  local y = m.scan(function(s, t) local h = s + t.z * (t.x - s); return h, h end, { axis = "seq", state = z, inputs = i })
  local b = m.scan(function(s, t) local h = m.tanh(s + t.z * t.x); return h, h end, { axis = "seq", state = z, inputs = i })
  local loss = (y * b):sum()
  local g = m.grad(loss, { i.x, i.z })
  return { loss = loss, x = g[1], z = g[2] }
end, { x = { A.batch, A.seq, A.embed }, z = { A.batch, A.seq, A.embed } }, { layout = m.layout { mesh = { { "cp", 1 } }, acts = { cp = { "seq" } } } })
