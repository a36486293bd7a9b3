-- args: run --device cpu -n 3 --mesh cp=3
-- Scans whose axis ranks share, against the same program with the axis whole on each rank: values, final states, gradients of inputs, of
-- initial states and of what is captured. Steps by elements whose states are affine or max-plus: each rank passes its states on by maps.
-- Others (an LSTM, a memory trained by gradient steps) one rank after the other. long/scan_context runs it on 2 and 4 ranks.
local m, core = require "mlua", require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")
local A = m.axes { seq = 12, batch = 2, h = 3, h2 = 3 }
local layout = m.layout { mesh = { { "cp", 1 } }, acts = { cp = { "seq" } } }

-- step(s, t, i) gives the next states and what it stacks; loss_of(y, last, i).
local function compare(what, inputs, states, step, loss_of)
  local names, values = {}, {}
  for name, axes in pairs(inputs) do
    local dims, n = {}, 1
    for k, axis in ipairs(axes) do dims[k], n = axis.size, n * axis.size end
    values[name] = m.host("f32", table.unpack(dims))
    for i = 1, n do values[name]:set(i, math.sin(name:byte() + i * 78.233) * 0.9) end
    names[#names + 1] = name
  end
  local function program(reverse, cut)
    return m.compile(function(i)
      local first, scanned = {}, {}
      for _, name in ipairs(states) do first[name] = i[name] end
      for name, axes in pairs(inputs) do
        for _, axis in ipairs(axes) do
          if axis == A.seq then scanned[name] = i[name] end
        end
      end
      local y, last = m.scan(function(s, t) return step(s, t, i) end, { axis = "seq", reverse = reverse, state = first, inputs = scanned })
      local loss, xs = loss_of(y, last, i), {}
      for k, name in ipairs(names) do xs[k] = i[name] end
      local out = { loss = loss }
      for name, x in pairs(y) do out["y." .. name] = x end
      for name, x in pairs(last) do out["last " .. name] = x end
      for k, g in ipairs(m.grad(loss, xs)) do out["gradient of " .. names[k]] = g end
      return out
    end, inputs, { layout = cut and layout or nil })
  end
  for _, reverse in ipairs { false, true } do
    local cut, whole = program(reverse, true)(values), program(reverse, false)(values)
    for name, expected in pairs(whole) do
      local title = ("%s: %s%s"):format(what, name, reverse and ", reversed" or "")
      if type(expected) == "number" then
        check.near(cut[name], expected, 1e-6, title)
      else
        check.all(cut[name], expected:table(), 1e-5, title)
      end
    end
  end
end

compare("by maps", {
  x = { A.batch, A.seq, A.h }, g = { A.seq, A.batch }, w = { A.h }, a = { A.batch, A.h }, b = { A.h, A.batch }, c = { A.batch, A.h },
}, { "a", "b", "c" }, function(s, t, i)
  local a = s.a * i.w + t.x
  local b = m.where(m.gt(t.g, 0.7), t.x, s.b * t.g) + t.x * i.w
  local moved = m.where(m.gt(t.g, 0.8), -1 / 0, s.c + t.g * 0.3) -- a reset
  local c = m.maximum(moved - i.w * 0.1, t.x)
  return { a = a, b = b, c = c }, { product = a * b, before = s.b, c = c }
end, function(y, last, i)
  return (y.product * y.product):sum() + (y.before * i.w):sum() + (m.sin(y.c) * i.a):sum() + (last.c * last.c):sum() + m.sin(last.a):sum() + (last.b * last.b):sum()
end)

compare("LSTM", {
  x = { A.batch, A.seq, A.h }, h = { A.batch, A.h }, c = { A.h, A.batch }, W = { A.h, A.h2 }, b = { A.h },
}, { "h", "c" }, function(s, t, i)
  local z = m.sigmoid(t.x + s.h:dot(i.W, "h"):rename("h2", "h") + i.b)
  local c = s.c * z + m.tanh(t.x) * (1 - z)
  return { h = m.tanh(c) * z, c = c }, { h = s.h, product = c * z }
end, function(y, last, i) return (y.h * y.product):sum() + (last.c * i.b):sum() + m.sin(last.h):sum() end)

compare("test-time training", {
  k = { A.batch, A.seq, A.h }, v = { A.seq, A.batch, A.h2 }, S = { A.batch, A.h, A.h2 }, e = { A.h },
}, { "S" }, function(s, t, i)
  local missed = m.tanh(s.S:dot(t.k, "h")) - t.v
  local S = s.S - (t.k * i.e):broadcast { A.batch, A.h, A.h2 } * missed * 0.5
  return { S = S }, { read = S:dot(t.k, "h") }
end, function(y, last) return (y.read * y.read):sum() + m.sin(last.S):sum() end)
check.done()
