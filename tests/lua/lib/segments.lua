-- A nonlinear scan long enough for segments, forward and gradient: run with SEGMENTS=write its values go to values.txt, else they are
-- compared with that file. tests/process/dist_recurrent.c runs it with little memory on several ranks that share the axis.
local m, core = require "mlua", require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")
local A = m.axes { batch = 4, seq = 96, k = 32, v = 32 }
local shapes = { k = { A.batch, A.seq, A.k }, v = { A.seq, A.batch, A.v }, S = { A.batch, A.k, A.v }, e = { A.k }, n = { A.batch, A.v } }
local function program(reverse)
  return m.compile(function(i)
    local y, last = m.scan(function(s, t)
      local missed = m.tanh(s.S:dot(t.k, "k")) - t.v
      local S = s.S - (t.k * i.e):broadcast { A.batch, A.k, A.v } * missed * 0.1
      local n = s.n * m.sigmoid(missed) + S:dot(t.k, "k")
      return { S = S, n = n }, n * missed
    end, { axis = "seq", reverse = reverse, state = { S = i.S, n = i.n }, inputs = { k = i.k, v = i.v } })
    local loss = (y * y):sum() + m.sin(last.S):sum() + (last.n * last.n):sum()
    local g = m.grad(loss, { i.k, i.v, i.S, i.e, i.n })
    return { loss = loss, y = y, last = last.S, k = g[1], v = g[2], S = g[3], e = g[4], n = g[5] }
  end, shapes, { layout = m.layout { mesh = { { "cp", 1 } }, acts = { cp = { "seq" } } } })
end
local values = {}
for name, axes in pairs(shapes) do
  local dims, count = {}, 1
  for i, axis in ipairs(axes) do dims[i], count = axis.size, count * axis.size end
  values[name] = m.host("f32", table.unpack(dims))
  for i = 1, count do values[name]:set(i, math.sin(name:byte() + i * 78.233) * 0.4) end
end
local write = os.getenv "SEGMENTS" == "write"
local file = assert(io.open("values.txt", write and "w" or "r"))
for _, reverse in ipairs { false, true } do
  local out, names = program(reverse)(values), {}
  for name in pairs(out) do names[#names + 1] = name end
  table.sort(names)
  for _, name in ipairs(names) do
    local list = type(out[name]) == "number" and { out[name] } or out[name]:table()
    if write then
      for i = 1, #list do file:write(("%.9g\n"):format(list[i])) end
    else
      local expected = {}
      for i = 1, #list do expected[i] = file:read "n" end
      check.all(list, expected, 1e-4, name)
    end
  end
end
file:close()
check.done()
