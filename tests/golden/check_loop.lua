-- args: check --device h200 SCRIPT </dev/null 2>&1 | grep -v planned
-- A loop that waits for a loss which zeros never reach; what it prints after the first call is not shown.
local m = require "mlua"
local A = m.axes { batch = 4, embed = 8 }
local w = m.param { A.embed, name = "w" }
print "before any program is called"
local step = m.compile(function(i)
  local loss = (i.x * w):sum()
  w:assign(w:read() - m.grad(loss, { w })[1] * 0.1)
  return { loss = loss }
end, { x = { A.batch, A.embed } }, { name = "step" })
local x, n, evaluate = m.host("f32", 4, 8), 0, nil
repeat
  local caught, out = pcall(step, { x = x }) -- which does not keep the script from its end
  n = n + 1
  print("loss", out.loss)
  if n == 300 then -- programs that are made late are counted
    evaluate = m.compile(function(i)
      print("traced: " .. tostring(i.x))
      return i.x:sum()
    end, { x = { A.batch } }, { name = "evaluation" })
  end
until caught and out.loss > 3
