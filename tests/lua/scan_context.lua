-- args: run --device cpu -n 3
-- Steps by elements whose states are affine, where ranks share the scan's axis: each passes its states on. Against a step that the algebra
-- does not know, whose axis is whole on each rank: values, final states, gradients of inputs, of initial states and of what is captured.
local m, core = require "mlua", require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")
local A = m.axes { seq = 12, batch = 2, h = 3 }
local layout = m.layout { mesh = { { "cp", 3 } }, acts = { cp = { "seq" } } }
local inputs = { x = { A.batch, A.seq, A.h }, g = { A.seq, A.batch }, w = { A.h }, a = { A.batch, A.h }, b = { A.h, A.batch } }
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
      local before = unknown and { a = s.a + m.tanh(s.a) * 0, b = s.b + m.tanh(s.b) * 0 } or s
      local a = before.a * i.w + t.x
      local b = m.where(m.gt(t.g, 0.7), t.x, before.b * t.g) + t.x * i.w
      return { a = a, b = b }, { product = a * b, before = s.b }
    end, { axis = "seq", reverse = reverse, state = { a = i.a, b = i.b }, inputs = { x = i.x, g = i.g } })
    local loss, xs = (y.product * y.product):sum() + (y.before * i.w):sum() + m.sin(last.a):sum() + (last.b * last.b):sum(), {}
    for k, name in ipairs(names) do xs[k] = i[name] end
    local out = { loss = loss, y = y.product, a = last.a, b = last.b }
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
