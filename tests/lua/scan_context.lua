-- args: run --device cpu -n 3
-- Steps by elements whose states are affine or max-plus, where ranks share the scan's axis: each passes its states on. Against a step that the algebra
-- does not know, whose axis is whole on each rank: values, final states, gradients of inputs, of initial states and of what is captured.
local m, core = require "mlua", require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")
local A = m.axes { seq = 12, batch = 2, h = 3 }
local layout = m.layout { mesh = { { "cp", 3 } }, acts = { cp = { "seq" } } }
local inputs = { x = { A.batch, A.seq, A.h }, g = { A.seq, A.batch }, w = { A.h }, a = { A.batch, A.h }, b = { A.h, A.batch }, c = { A.batch, A.h } }
local names, values = {}, {}
for name, axes in pairs(inputs) do
  local dims, n = {}, 1
  for k, axis in ipairs(axes) do dims[k], n = axis.size, n * axis.size end
  values[name] = m.host("f32", table.unpack(dims))
  for i = 1, n do values[name]:set(i, math.sin(name:byte() + i * 78.233) * 0.9) end
  names[#names + 1] = name
end
local function program(reverse, unknown)
  return m.compile(function(i)
    local y, last = m.scan(function(s, t)
      local before = s
      if unknown then
        before = {}
        for name, state in pairs(s) do before[name] = state + m.tanh(state) * 0 end
      end
      local a = before.a * i.w + t.x
      local b = m.where(m.gt(t.g, 0.7), t.x, before.b * t.g) + t.x * i.w
      local moved = m.where(m.gt(t.g, 0.8), -1 / 0, before.c + t.g * 0.3) -- a reset
      local c = m.maximum(moved - i.w * 0.1, t.x)
      return { a = a, b = b, c = c }, { product = a * b, before = s.b, c = c }
    end, { axis = "seq", reverse = reverse, state = { a = i.a, b = i.b, c = i.c }, inputs = { x = i.x, g = i.g } })
    local loss, xs = (y.product * y.product):sum() + (y.before * i.w):sum() + (m.sin(y.c) * i.a):sum() + (last.c * last.c):sum() + m.sin(last.a):sum() + (last.b * last.b):sum(), {}
    for k, name in ipairs(names) do xs[k] = i[name] end
    local out = { loss = loss, y = y.product, maximum = y.c, a = last.a, b = last.b, c = last.c }
    for k, g in ipairs(m.grad(loss, xs)) do out["gradient of " .. names[k]] = g end
    return out
  end, inputs, { layout = layout })
end
for _, reverse in ipairs { false, true } do
  local cut, whole = program(reverse)(values), program(reverse, true)(values)
  for name, expected in pairs(whole) do
    local what = name .. (reverse and ", reversed" or "")
    if type(expected) == "number" then
      check.near(cut[name], expected, 1e-6, what)
    else
      check.all(cut[name], expected:table(), 1e-5, what)
    end
  end
end
check.done()
