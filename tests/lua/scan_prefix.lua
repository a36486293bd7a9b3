-- A scan over a prefix, then single steps from its states, equals the scan over the whole: of a step with states of every form (delta rule
-- with a decay for each key, mLSTM with its stabiliser, elements, none), that read one another, with masked positions and document starts.
local m, core = require "mlua", require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")
local WHOLE, PREFIX = 37, 34
local A = m.axes { batch = 2, seq = WHOLE, k = 4, v = 3, w = 3 }
local function wide(x) return x:broadcast { A.batch, A.k, A.v } end
local function step(s, t, W)
  local D = s.S * wide(t.a)
  local S = D + wide(t.k) * (t.b * (t.x - D:dot(t.k, "k")))
  local top = m.maximum(m.log(t.b) + s.top, t.i)
  local f, i = m.exp(m.log(t.b) + s.top - top), m.exp(t.i - top)
  local C = s.C * f + wide(t.k) * (t.x * i)
  local c = s.c * t.b + (1 - t.b) * t.x
  local h = m.tanh(s.h:rename("v", "w"):dot(W, "w") + S:dot(t.q, "k") + c)
  local next = { S = S, C = C, top = top, c = c, h = h }
  for name, x in pairs(next) do next[name] = m.where(t.mask, x, s[name]) end -- masked positions leave states as they are
  return next, next.h + C:dot(t.q, "k")
end
local keys, values, number = { A.batch, A.seq, A.k }, { A.batch, A.seq, A.v }, { A.batch, A.seq }
local function at(list, first, last)
  local part = {}
  for name, x in pairs(list) do part[name] = x:slice("seq", first, last) end
  return part
end
local shapes, feeds = { q = keys, k = keys, a = keys, x = values, b = number, i = number, W = { A.w, A.v } }, {}
for name, axes in pairs(shapes) do
  local dims, count = {}, 1
  for n, axis in ipairs(axes) do dims[n], count = axis.size, count * axis.size end
  feeds[name] = m.host("f32", table.unpack(dims))
  for n = 1, count do feeds[name]:set(n, math.sin(name:byte() + n * 78.233)) end
end
local out = m.compile(function(i)
  local t = { q = i.q, k = i.k * 0.5, a = m.sigmoid(i.a), x = i.x, b = m.sigmoid(i.b), i = i.i, mask = m.gt(i.i, -0.3) }
  local starts = m.logical_and(m.gt(i.b, 0.8), m.lt(m.iota(A.seq), PREFIX)) -- a scan begins anew with what it was given
  local function zeros(...) return m.zeros { A.batch, ... } end
  local function run(first, last, state)
    local resets = last > PREFIX and first > 0 and {} or { starts:slice("seq", first, last) }
    return m.scan(function(s, t) return step(s, t, i.W) end, { axis = "seq", state = state, inputs = at(t, first, last), resets = resets[1] })
  end
  local nothing = { S = zeros(A.k, A.v), C = zeros(A.k, A.v), top = zeros(), c = zeros(A.v), h = zeros(A.v) }
  local whole, last = run(0, WHOLE, nothing)
  local y, s = run(0, PREFIX, nothing)
  local ys = { y }
  for n = PREFIX, WHOLE - 1 do ys[#ys + 1], s = run(n, n + 1, s) end
  local o = { whole = whole, parts = m.concat(ys, "seq") }
  for name, x in pairs(last) do o["last " .. name], o["end " .. name] = x, s[name] end
  return o
end, shapes)(feeds)
check.all(out.parts, out.whole:table(), 1e-5, "outputs")
for _, name in ipairs { "S", "C", "top", "c", "h" } do check.all(out["end " .. name], out["last " .. name]:table(), 1e-5, "state " .. name) end
check.done()
