-- m.scan against the same loop written out: values, first and second gradients, both directions, lengths, final states, nested scans,
-- resets, random numbers, what is refused. scan_ranks.lua runs the comparisons on several ranks.
local layout = ...
local m = require "mlua"
local core = require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")

local function fill(axes, seed)
  local dims, n = {}, 1
  for k, a in ipairs(axes) do dims[k], n = a.size, n * a.size end
  local host = m.host("f32", table.unpack(dims))
  for i = 1, n do host:set(i, math.sin(seed * 12.9898 + i * 78.233) * 0.7) end
  return host
end

local function at(x, axis, k) return x:slice(axis, k, k + 1):sum(axis) end

-- Values and gradients of the results of two programs, from the same inputs.
local function compare(what, scanned, written, inputs, loss_of, second)
  local names = {}
  for name in pairs(inputs) do names[#names + 1] = name end
  local function program(build)
    return m.compile(function(i)
      local y, last = build(i)
      local loss, xs, sum = loss_of(y, last, i), {}, 0
      for k, name in ipairs(names) do xs[k] = i[name] end
      local g = m.grad(loss, xs)
      local out = { loss = loss }
      for k, name in ipairs(names) do
        out["gradient of " .. name] = g[k]
        sum = sum + (g[k] * g[k]):sum()
      end
      if second then
        for k, x in ipairs(m.grad(sum, xs)) do out["second gradient of " .. names[k]] = x end
      end
      return out
    end, inputs, { layout = layout })
  end
  local values = {}
  for k, name in ipairs(names) do values[name] = fill(inputs[name], k) end
  local a, b = program(scanned)(values), program(written)(values)
  for name, x in pairs(a) do
    local y = b[name]
    if type(x) == "number" then
      check.near(x, y, 1e-5, what .. ": " .. name)
    else
      local size, list = 1, {}
      for k = 1, #y do list[k], size = y[k], math.max(size, math.abs(y[k])) end
      check.all(x, list, 1e-5 * size, what .. ": " .. name)
    end
  end
end

-- Two states, weights from outside, an output that is none of them.
local function cell(s, t, i)
  local z = t.x:dot(i.U, "e") + s.h:dot(i.W, "h"):rename("h2", "h") + i.b
  local g = m.sigmoid(z)
  local c = s.c * g + m.tanh(z) * t.g
  return { h = m.tanh(c) * g, c = c }, c * s.h
end

local function lstm(length, reverse)
  local A = m.axes { seq = length, batch = 4, h = 5, e = 2, h2 = 5 }
  local inputs = {
    x = { A.batch, A.seq, A.e }, g = { A.seq, A.batch, A.h }, W = { A.h, A.h2 }, U = { A.e, A.h }, b = { A.h },
    h0 = { A.batch, A.h }, c0 = { A.batch, A.h }, wy = { A.h }, v = { A.batch },
  }
  compare(("lstm over %d%s"):format(length, reverse and ", reversed" or ""), function(i)
    return m.scan(function(s, t) return cell(s, t, i) end, {
      axis = "seq", reverse = reverse, state = { h = i.h0, c = i.c0 }, inputs = { x = i.x, g = i.g },
    })
  end, function(i)
    local s, ys = { h = i.h0, c = i.c0 }, {}
    for k = 0, length - 1 do
      local p, y = reverse and length - 1 - k or k, nil
      s, y = cell(s, { x = at(i.x, "seq", p), g = at(i.g, "seq", p) }, i)
      ys[p + 1] = y:broadcast { core.axis("seq", 1), A.batch, A.h }
    end
    return m.concat(ys, "seq"), s
  end, inputs, function(y, last, i)
    return (y * y * i.wy):sum() + (last.h * i.wy):sum() * 2 + (m.sin(last.c) * i.v):sum()
  end, false)
end
lstm(3, true)

-- Sums of outer products that decay, by products over chunks: keys that heads share, decays of 0, a normaliser. On several ranks;
-- scan_classes.lua draws steps of all classes on one.
local function memory(what, length, reverse, update)
  local A = m.axes { seq = length, batch = 2, h = 4, k = 3, v = 2 }
  local inputs = {
    q = { A.batch, A.seq, A.h, A.k }, k = { A.seq, A.batch, A.k }, v = { A.batch, A.seq, A.h, A.v }, g = { A.batch, A.seq, A.h },
    S0 = { A.batch, A.h, A.k, A.v }, n0 = { A.batch, A.h, A.k }, w = { A.h, A.v },
  }
  local function step(s, t)
    t.g = m.where(m.gt(t.g, 0.6), 0, t.g)
    return update(s, t, function(x) return x:broadcast { A.batch, A.h, A.k, A.v } end, function(x) return x:broadcast { A.batch, A.h, A.k } end)
  end
  compare(what, function(i)
    return m.scan(step, { axis = "seq", reverse = reverse, state = { S = i.S0, n = i.n0 }, inputs = { q = i.q, k = i.k, v = i.v, g = i.g } })
  end, function(i) -- a loop: for what the algebra knows, the step is not affine
    return m.scan(function(s, t) return step({ S = s.S + m.tanh(s.S) * 0, n = s.n + m.tanh(s.n) * 0 }, t) end,
      { axis = "seq", reverse = reverse, state = { S = i.S0, n = i.n0 }, inputs = { q = i.q, k = i.k, v = i.v, g = i.g } })
  end, inputs, function(y, last, i) return (y * y * i.w):sum() + m.sin(last.S):sum() + (last.n * last.n):sum() end, false)
end
if layout then
  memory("memory with a normaliser", 20, false, function(s, t, wide, keys)
    local S, n = s.S * t.g + wide(t.k) * t.v, s.n * t.g + keys(t.k)
    return { S = S, n = n }, S:dot(t.q, "k") / (1 + m.abs(n:dot(t.q, "k")))
  end)
  return check.done()
end
lstm(1, false)

do -- a scan in each step of another
  local A = m.axes { seq = 3, batch = 2, h = 3, inner = 4 }
  compare("nested", function(i)
    local y, last = m.scan(function(s, t)
      local z, deep = m.scan(function(s2, t2)
        local v = m.tanh(s2 * t2 + s.h + i.b)
        return v, v * t2
      end, { axis = "inner", state = t.x, inputs = t.w })
      return { h = s.h * 0.5 + deep }, z:sum "inner" * s.h
    end, { axis = "seq", state = { h = m.zeros { A.batch, A.h } }, inputs = { x = i.x, w = i.w } })
    return (y * y):sum(), last.h
  end, function(i)
    local h, loss = m.zeros { A.batch, A.h }, 0
    for k = 0, 2 do
      local v, w, z = at(i.x, "seq", k), at(i.w, "seq", k), 0
      for q = 0, 3 do
        v = m.tanh(v * at(w, "inner", q) + h + i.b)
        z = z + v * at(w, "inner", q)
      end
      local y = z * h
      h = h * 0.5 + v
      loss = loss + (y * y):sum()
    end
    return loss, h
  end, { x = { A.batch, A.seq, A.h }, w = { A.seq, A.inner, A.batch }, b = { A.h } }, function(y, last) return y + last:sum() end, true)
end

local A = m.axes { seq = 6, batch = 2, h = 3 }
do -- resets; tables of outputs; no inputs, and numbers drawn at each position
  local f = m.compile(function(i)
    local x = i.x * 0 + 1
    local y, last = m.scan(function(s, t) return { c = s.c + t.x }, { before = s.c, twice = s.c + s.c } end, {
      axis = "seq", state = { c = m.zeros { A.batch, A.h } }, inputs = { x = x }, resets = m.eq(m.iota(A.seq) % 3, 0),
    })
    local drawn = m.scan(function(s) return s, m.uniform { A.h } end, { axis = A.seq, state = { c = m.zeros {} } })
    return { before = y.before:sum("batch", "h"), twice = y.twice:sum("batch", "h"), last = last.c:sum(), drawn = drawn }
  end, { x = { A.batch, A.seq, A.h } })
  local out = f { x = fill({ A.batch, A.seq, A.h }, 1) }
  check.all(out.before, { 0, 6, 12, 0, 6, 12 }, 0, "before each step, with resets")
  check.all(out.twice, { 0, 12, 24, 0, 12, 24 }, 0, "another output")
  check.equal(out.last, 18, "the last state")
  local seen = {}
  for k = 1, #out.drawn do
    check.equal(seen[out.drawn[k]], nil, "a number that was drawn before")
    seen[out.drawn[k]] = true
  end
end

do -- the plan does not grow with the length
  local bytes, steps = {}, {}
  for k, length in ipairs { 10, 100000 } do
    local L = m.axes { ["long" .. k] = length }
    local axis = L["long" .. k]
    local f = m.compile(function(i)
      local y, last = m.scan(function(s, t) local h = s * 0.5 + t; return h, h end, { axis = axis, state = m.zeros {}, inputs = i.x })
      return { last = last, gradient = m.grad(y:sum(), { i.x })[1]:sum() }
    end, { x = { axis } })
    local out = f { x = m.host("f32", length):fill(1) }
    check.near(out.last, length > 50 and 2 or 2 - 2 ^ -9, 1e-5, "a moving average")
    if length == 100000 then check.near(out.gradient, 2 * length - 2, 1e-4, "its gradient") end
  end
end

-- Gradients with respect to inputs that the step computes itself, of what they are computed of.
do
  local C = m.axes { seq = 9, e = 3 }
  local inputs = { x = { C.seq, C.e }, z = { C.seq, C.e } }
  local f = m.compile(function(i)
    local moved, product = i.x - 0.5, i.x * i.z
    local y = m.scan(function(s, t) local h = s * 0.5 + t.moved * t.product; return h, h end,
      { axis = "seq", state = m.zeros { C.e }, inputs = { moved = moved, product = product } })
    local loss = (y * y):sum()
    local g = m.grad(loss, { i.x, i.z, moved, product })
    return { x = g[1], z = g[2], x_by_parts = g[3] + g[4] * i.z, z_by_parts = g[4] * i.x, size = (g[3] * g[3]):sum() }
  end, inputs)
  local out = f { x = fill(inputs.x, 1), z = fill(inputs.z, 2) }
  check.equal(out.size > 0.01, true, "a gradient")
  check.all(out.x_by_parts, out.x, 1e-5, "by parts: x")
  check.all(out.z_by_parts, out.z, 1e-5, "by parts: z")
end

-- What a script gets wrong.
local state = m.state { name = "w", axes = { A.h }, dtype = "f32", init = 0 }
local function refused(text, step, options)
  check.raises(text, m.compile, function(i)
    local o = { axis = "seq", state = { h = m.zeros { A.batch, A.h } }, inputs = { x = i.x } }
    for key, value in pairs(options or {}) do o[key] = value(i) end
    return { y = (m.scan(function(s, t) return step(s, t, i) end, o)):sum() }
  end, { x = { A.batch, A.seq, A.h } })
end
local here = debug.traceback():match "scan.lua:(%d+)" -- at the line of what changes
refused(("scan.lua:%d: scan: state \"h\" changes from f32[batch=2, h=3] to f32[batch=2]"):format(here + 1), function(s, t) return { h = s.h:sum "h" }, t.x end)
refused("state \"h\" changes from f32[batch=2, h=3] to bf16[batch=2, h=3]", function(s, t) return { h = s.h:cast "bf16" }, t.x end)
refused("the step uses a tensor that has the axis \"seq\"", function(s, t, i) return { h = s.h }, (m.tanh(i.x) + s.h):sum() end)
refused("an input has no axis \"seq\"", function(s) return s, s.h end, { inputs = function() return { x = m.zeros { A.h } } end })
refused("w is assigned in the step of a scan", function(s) state:assign(0); return s, s.h end)
refused("add_loss in the step of a scan", function(s) m.add_loss(s.h:sum(), 1); return s, s.h end)
refused("must return state h, a tensor, got nil", function(s) return {}, s.h end)
refused("returns a state c that scan was not given", function(s) return { h = s.h, c = s.h }, s.h end)
refused("scan's state.h has the axis \"seq\" of the scan: f32[batch=2, seq=6, h=3]", function(s) return s, s.h:sum() end,
  { state = function(i) return { h = i.x } end })
refused("scan's output has the axis \"seq\"", function(s) return s, m.zeros { A.seq } end)
refused("resets must be bool, got f32", function(s) return s, s.h end, { resets = function(i) return i.x:sum("batch", "h") end })
local leak
refused("a tensor of a scan's step is used outside of it", function(s, t) leak = leak or s.h; return s, t.x end,
  { inputs = function(i) local y = m.scan(function(s) leak = s; return s, s end, { axis = A.seq, state = m.zeros { A.batch, A.h } }); return { x = y + leak } end })
check.done()
