-- args: run --device cpu -n 4
-- A causal convolution along a sequence that two ranks share, of channels that two others share: the neighbour's last elements come
-- first. Value, and gradients of the tensor and the filter, against plain loops.
local m, core = require "mlua", require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")
local T, C, K = 12, 4, 4
local A = m.axes { batch = 2, seq = T, embed = C, width = K }
local layout = m.layout { mesh = { { "cp", 2 }, { "tp", 2 } }, acts = { cp = { "seq" }, tp = { "embed" } }, params = { tp = { "embed" } } }
local w = core.state { name = "w", axes = { A.width, A.embed }, kind = "parameter", init = (m.iota(A.width) * C):cast "f32":broadcast { A.embed } * 0.1 + m.iota(A.embed):cast "f32" }
local step = m.compile(function(i)
  local y = m.conv(i.x, w, { axis = "seq", causal = true })
  local gradients = m.grad((y * i.g):sum(), { w, i.x })
  return { y = y, w = gradients[1], x = gradients[2] }
end, { x = { A.batch, A.seq, A.embed }, g = { A.batch, A.seq, A.embed } }, { layout = layout })

local x, g, y, gx, gw, filter = {}, {}, {}, {}, {}, {}
for i = 1, 2 * T * C do x[i], g[i], y[i], gx[i] = i * 5 % 7 - 3, i * 3 % 11 - 5, 0, 0 end
for k = 0, K - 1 do
  for c = 0, C - 1 do filter[k * C + c + 1], gw[k * C + c + 1] = 0.1 * k * C + c, 0 end
end
for b = 0, 1 do
  for t = 0, T - 1 do
    for k = math.max(0, K - 1 - t), K - 1 do
      for c = 1, C do
        local to, from, tap = (b * T + t) * C + c, (b * T + t + k - K + 1) * C + c, k * C + c
        y[to] = y[to] + x[from] * filter[tap]
        gx[from] = gx[from] + g[to] * filter[tap]
        gw[tap] = gw[tap] + g[to] * x[from]
      end
    end
  end
end
local out = step { x = x, g = g }
check.all(out.y, y, 1e-5, "the convolution")
check.all(out.x, gx, 1e-5, "the gradient of the tensor")
check.all(out.w, gw, 1e-5, "the gradient of the filter")
check.done()
