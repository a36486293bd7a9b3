-- m.scan's linear forms of odd shapes against the loop: several key axes, transposed states, queries and keys that heads share,
-- captured operands, vectors, nothing written, several outer products written, only the last state. A sample; LONG=1 runs all.
local m = require "mlua"
local core = require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")
local long = os.getenv "LONG" == "1"
local sample = { ["two key axes, rank 1"] = true, ["shared queries"] = true, ["several inputs"] = true }
local A = m.axes { batch = 2, seq = 40, h = 2, k = 3, k2 = 2, v = 5, gq = 2 }

local function host(axes, seed)
  local dims, n = {}, 1
  for i, a in ipairs(axes) do dims[i], n = a.size, n * a.size end
  local values = m.host("f32", table.unpack(dims))
  for i = 1, n do
    local x = math.sin(seed * 12.9898 + i * 78.233) * 43758.5453
    values:set(i, (x - math.floor(x)) * 1.6 - 0.8)
  end
  return values
end

local function run(name, shapes, step, bound)
  if not long and not sample[name] then return end
  local names = {}
  for key in pairs(shapes) do names[#names + 1] = key end
  table.sort(names)
  local function program(loop)
    return m.compile(function(i)
      local xs, t = {}, {}
      for at, key in ipairs(names) do
        xs[at] = i[key]
        if i[key]:has "seq" then t[key] = i[key] end
      end
      local y, last = m.scan(function(S, t)
        if loop then S = S + m.tanh(S) * 0 end -- what is affine no longer is
        return step(S, t, i)
      end, { axis = "seq", state = i.S, inputs = t })
      local loss = (y:cast "f32" * m.uniform(m.axes_of(y), 5)):sum() + (last * m.uniform(m.axes_of(last), 6)):sum()
      local out = { y = y:cast "f32", last = last }
      for at, g in ipairs(m.grad(loss, xs)) do out["gradient of " .. names[at]] = g end
      return out
    end, shapes)
  end
  local values = {}
  for at, key in ipairs(names) do values[key] = host(shapes[key], at) end
  local got = program(false)(values)
  for key, wanted in pairs(program(true)(values)) do
    local difference, size = 0, 0
    for i = 1, #wanted do difference, size = difference + (got[key][i] - wanted[i]) ^ 2, size + wanted[i] ^ 2 end
    local error = math.sqrt(difference / size)
    if not (error <= (bound or 1e-5)) then check.equal(error, bound or 1e-5, name .. ": " .. key) end
  end
end

local b, s, h, k, k2, v, gq = A.batch, A.seq, A.h, A.k, A.k2, A.v, A.gq
run("two key axes", { q = { b, s, k, k2 }, k = { b, s, k2, k }, v = { s, b, v }, S = { b, v, k2, k }, g = { b, s } }, function(S, t)
  local S2 = S * t.g + t.k:broadcast { b, k, k2, v } * t.v
  return S2, S2:dot(t.q, "k", "k2") end)
run("two key axes, rank 1", { q = { b, s, k, k2 }, k = { b, s, k2, k }, v = { s, b, v }, S = { b, v, k2, k } }, function(S, t)
  local S2 = S + t.k:broadcast { b, k, k2, v } * 0.3 * (t.v - S:dot(t.k, "k", "k2"))
  return S2, S2:dot(t.q, "k", "k2") end)
run("transposed rank 1", { q = { b, s, k }, k = { b, s, k }, v = { s, b, v }, S = { v, b, k }, g = { b, s, k } }, function(S, t)
  local S2 = S * t.g:broadcast { v, b, k } + t.v:broadcast { v, b, k } * t.k - S:dot(t.k, "k"):broadcast { v, b, k } * (t.k * 0.4)
  return S2, S2:dot(t.q, "k") end)
run("shared queries", { q = { b, s, h, gq, k }, k = { b, s, h, k }, v = { s, h, b, v }, S = { b, h, k, v }, g = { b, s, h } }, function(S, t)
  local S2 = S * t.g + t.k:broadcast { b, h, k, v } * t.v
  return S2, S2:dot(t.q, "k") end)
run("shared keys, decays of heads", { q = { b, s, k }, k = { b, s, k }, v = { s, h, b, v }, S = { b, h, k, v }, g = { h } }, function(S, t, x)
  local S2 = S * x.g + t.k:broadcast { b, h, k, v } * t.v
  return S2, S2:dot(t.q, "k") end)
run("captured erase", { q = { b, s, k }, v = { s, b, v }, S = { b, k, v }, w = { k } }, function(S, t, x)
  local S2 = S * 0.9 - x.w:broadcast { b, k, v } * 0.5 * S:dot(x.w, "k") + t.q:broadcast { b, k, v } * t.v
  return S2, S2:dot(t.q, "k") end)
run("bf16", { q = { b, s, k }, k = { b, s, k }, v = { s, b, v }, S = { b, k, v } }, function(S, t, x)
  local S2 = S * 0.9 + (t.k:cast "bf16":broadcast { b, k, v }):cast "f32" * t.v:cast "bf16":cast "f32"
  return S2, S2:cast "bf16":dot(t.q:cast "bf16", "k") end, 2e-2)
run("vector", { q = { b, s, k }, k = { b, s, k }, S = { b, k }, g = { b, s } }, function(S, t, x)
  local S2 = S * t.g + t.k
  return S2, S2:dot(t.q, "k") end)
run("vector rank 1", { q = { b, s, k }, k = { b, s, k }, S = { b, k }, g = { b, s } }, function(S, t, x)
  local S2 = S * t.g + t.k - t.k * (0.5 * S:dot(t.k, "k"):broadcast { b, k })
  return S2, S2:dot(t.q, "k") end)
run("no write", { q = { b, s, k }, k = { b, s, k }, S = { b, k, v }, g = { b, s } }, function(S, t, x)
  local S2 = S * t.g - t.k:broadcast { b, k, v } * (0.5 * S:dot(t.k, "k"))
  return S2, S2:dot(t.q, "k") end)
run("final alone", { k = { b, s, k }, v = { b, s, v }, S = { b, k, v }, g = { b, s } }, function(S, t, x)
  local S2 = S * t.g + t.k:broadcast { b, k, v } * (t.v - S:dot(t.k, "k"))
  return S2, t.v end)
run("householder pair", { q = { b, s, k }, k = { b, s, k }, w = { b, s, k }, v = { b, s, v }, S = { b, k, v } }, function(S, t, x)
  local S1 = S + t.k:broadcast { b, k, v } * 0.3 * (t.v - S:dot(t.k, "k"))
  local S2 = S1 - t.w:broadcast { b, k, v } * 0.3 * S1:dot(t.w, "k")
  return S2, S2:dot(t.q, "k") end)
run("delta product", { q = { b, s, k }, k = { b, s, k }, w = { b, s, k }, v = { b, s, v }, x = { b, s, v }, g = { b, s }, S = { b, k, v } }, function(S, t)
  local S1 = S * t.g + t.k:broadcast { b, k, v } * 0.3 * (t.v - (S * t.g):dot(t.k, "k"))
  local S2 = S1 + t.w:broadcast { b, k, v } * 0.3 * (t.x - S1:dot(t.w, "k"))
  return S2, S2:dot(t.q, "k") end)
run("several inputs", { q = { b, s, gq, k }, k = { b, s, gq, k }, v = { b, s, gq, v }, w = { b, s, k }, g = { b, s }, S = { b, k, v } }, function(S, t)
  local S2 = S * t.g + t.k:dot(t.v, "gq") - t.w:broadcast { b, k, v } * t.v:sum "gq"
  return S2, S2:dot(t.q, "k") + S:dot(t.w, "k"):broadcast { b, gq, v } end)
check.done()
