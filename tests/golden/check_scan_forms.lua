-- args: check --device cpu SCRIPT </dev/null 2>&1 | grep -E "^scan over|FAIL"
-- Ten equal spellings of a step of each class have one form, which the class alone decides: each line of a class counts ten.
local m = require "mlua"
local A = m.axes { batch = 2, seq = 64, h = 2, k = 4, v = 3 }
local keys, values, number = { A.batch, A.seq, A.h, A.k }, { A.batch, A.seq, A.h, A.v }, { A.batch, A.seq, A.h }
local inputs = { q = keys, k = keys, w = keys, a = keys, v = values, b = number, g = number }
local function K(x) return x:broadcast { A.batch, A.h, A.k } end
local function W(x) return x:broadcast { A.batch, A.h, A.k, A.v } end
local function two(x, y)
  local axes = m.axes_of(x)
  table.insert(axes, m.axis("two", 1))
  return m.concat({ x:broadcast(axes), y:broadcast(axes) }, "two")
end
local function forms(scan, spellings)
  if #spellings ~= 10 then print("FAIL", #spellings) end
  for _, step in ipairs(spellings) do
    m.compile(function(i) return { loss = scan(function(S, t)
      local S2, y = step(S, t)
      return S2, y or S2:has "k" and S2:dot(t.q, "k") or S2
    end, i) } end, inputs)
  end
end
local function initial() return m.zeros { A.batch, A.h, A.k, A.v } end
-- linear attention with a decay
forms(function(step, i) return (m.scan(step, { axis = "seq", state = initial(), inputs = i })):sum() end, {
  function(S, t) return S * t.g + W(t.k) * t.v end,
  function(S, t) return W(t.v) * t.k + W(t.g) * S end,
  function(S, t) return (S + W(t.k) * t.v) - (1 - W(t.g)) * S end,
  function(S, t) return -((-S) * t.g - W(t.k) * t.v) end,
  function(S, t) return (S * t.g + W(t.k) * t.v):cast "f32" end,
  function(S, t) return S * t.g + W(t.v * 2) * (0.5 * t.k) end,
  function(S, t) return S / (1 / W(t.g)) + W(t.k * 2) * (t.v * 0.5) end,
  function(S, t) return (S * t.g + W(t.k) * (t.v * 0.5)) + W(t.k * 0.5) * t.v end,
  function(S, t) local S2 = S * t.g + W(t.k) * t.v; return S2, (S2 * W(t.q)):sum "k" end,
  function(S, t) local S2 = S * t.g + W(t.k) * t.v; return S2, t.q:dot(S2, "k") end,
})
-- a decay for each key
forms(function(step, i) return (m.scan(step, { axis = "seq", state = initial(), inputs = i })):sum() end, {
  function(S, t) return S * W(t.a) + W(t.k) * t.v end,
  function(S, t) return W(t.v) * t.k + W(t.a) * S end,
  function(S, t) return (S + W(t.k) * t.v) - (1 - W(t.a)) * S end,
  function(S, t) return -((-S) * W(t.a) - W(t.k) * t.v) end,
  function(S, t) return S * W(t.a) * t.g + W(t.k) * t.v end,
  function(S, t) return S * W(t.a) + W(t.v * 2) * (0.5 * t.k) end,
  function(S, t) return m.where(m.gt(W(t.g), 0.5), 0, S) * W(t.a) + W(t.k) * t.v end,
  function(S, t) return W(t.a) * (S + W(t.k / t.a) * t.v) end,
  function(S, t) local S2 = S * W(t.a) + W(t.k) * t.v; return S2, (W(t.q) * S2):sum "k" end,
  function(S, t) local S2 = S * W(t.a) + W(t.k) * t.v; return S2, (S * W(t.a)):dot(t.q, "k") end,
})
-- rank 1: the gated delta rule
forms(function(step, i) return (m.scan(step, { axis = "seq", state = initial(), inputs = i })):sum() end, {
  function(S, t) local D = S * t.g; return D + W(t.k) * (t.b * (t.v - D:dot(t.k, "k"))) end,
  function(S, t) local D = W(t.g) * S; return D - W(t.k) * (t.b * D:dot(t.k, "k")) + W(t.k) * (t.v * t.b) end,
  function(S, t) return t.g * (S - W(t.k * K(t.b)) * S:dot(t.k, "k")) + W(t.k) * (t.b * t.v) end,
  function(S, t) return S * t.g + W(t.k) * (t.b * t.v - t.b * t.g * S:dot(t.k, "k")) end,
  function(S, t) local z = (S * W(t.k)):sum "k" * t.g; return S * t.g + (t.v - z) * W(t.k * K(t.b)) end,
  function(S, t) local D = S * t.g; return D + W((t.v - t.k:dot(D, "k")) * t.b) * t.k end,
  function(S, t) local D = S * t.g; return -(W(t.k) * (t.b * (D:dot(t.k, "k") - t.v)) - D) end,
  function(S, t) local D = S * t.g; local e = D:dot(t.k, "k") - t.v; return D - W(t.k * 0.5) * (t.b * e) - W(t.k * 0.5) * (t.b * e) end,
  function(S, t) local D = S * t.g; local S2 = D + W(t.k) * (t.b * (t.v - D:dot(t.k, "k"))); return S2, (S2 * W(t.q)):sum "k" end,
  function(S, t) local D = S * t.g; local S2 = D + W(t.k) * (t.b * (t.v - D:dot(t.k, "k"))); return S2, S:dot(t.q, "k") + S2:dot(t.w, "k") - S:dot(t.q, "k") end,
})
-- rank 1, u and w independent, a decay for each key: RWKV-7
forms(function(step, i) return (m.scan(step, { axis = "seq", state = initial(), inputs = i })):sum() end, {
  function(S, t) return S * W(t.a) + W(-t.w) * S:dot(t.w * K(t.b), "k") + W(t.k) * t.v end,
  function(S, t) return S * W(t.a) - W(t.w) * S:dot(t.w * K(t.b), "k") + W(t.k) * t.v end,
  function(S, t) return W(t.k) * t.v + (W(t.a) * S - W(t.w) * (t.b * S:dot(t.w, "k"))) end,
  function(S, t) return S * W(t.a) - W(t.w * K(t.b)) * (S * W(t.w)):sum "k" + W(t.v * 2) * (0.5 * t.k) end,
  function(S, t) return S - (1 - W(t.a)) * S - W(t.w) * (t.w * K(t.b)):dot(S, "k") + W(t.k) * t.v end,
  function(S, t) local z = S:dot(t.w, "k"); return S * W(t.a) + W(t.k) * t.v - W(t.w) * (z * t.b) end,
  function(S, t) local z = (-S):dot(t.w, "k"); return S * W(t.a) + W(t.k) * t.v + W(t.w) * (z * t.b) end,
  function(S, t) return W(t.a) * (S - W(t.w / t.a) * (t.b * S:dot(t.w, "k"))) + W(t.k) * t.v end,
  function(S, t) return S * W(t.a) - W(t.b * S:dot(t.w, "k")) * t.w + W(t.k) * t.v end,
  function(S, t) local S2 = S * W(t.a) - W(t.w) * (t.b * S:dot(t.w, "k")) + W(t.k) * t.v; return S2, (W(t.q) * S2):sum "k" end,
})
-- rank 2
forms(function(step, i) return (m.scan(step, { axis = "seq", state = initial(), inputs = i })):sum() end, {
  function(S, t) return S * t.g + W(t.k) * S:dot(t.w, "k") + W(t.w) * S:dot(t.a, "k") + W(t.k) * t.v end,
  function(S, t) return W(t.w) * S:dot(t.a, "k") + S * t.g + W(t.k) * (S:dot(t.w, "k") + t.v) end,
  function(S, t) return S * t.g - W(-t.k) * S:dot(t.w, "k") - W(t.w) * (-S):dot(t.a, "k") + W(t.k) * t.v end,
  function(S, t) return S * t.g + W(t.k) * (S * W(t.w)):sum "k" + W(t.w) * t.a:dot(S, "k") + W(t.k) * t.v end,
  function(S, t) return S * t.g + W(t.v + S:dot(t.w, "k")) * t.k + W(S:dot(t.a, "k")) * t.w end,
  function(S, t) return S * t.g + W(t.k) * S:dot(t.w * 2, "k") * 0.5 + W(t.w) * S:dot(t.a, "k") + W(t.k) * t.v end,
  function(S, t) local D = S * t.g; return D + W(t.k) * (D:dot(t.w, "k") / t.g) + W(t.w) * (D:dot(t.a, "k") / t.g) + W(t.k) * t.v end,
  function(S, t) return (S * t.g + W(t.k) * t.v) + (W(t.k) * S:dot(t.w, "k") + W(t.w) * S:dot(t.a, "k")) end,
  function(S, t) return S * t.g + W(t.k) * t.v - (W(-t.w) * S:dot(t.a, "k") - W(t.k) * S:dot(t.w, "k")) end,
  function(S, t) local S2 = S * t.g + W(t.k) * S:dot(t.w, "k") + W(t.w) * S:dot(t.a, "k") + W(t.k) * t.v; return S2, (S2 * W(t.q)):sum "k" end,
})
-- several outer products: a scan for each
forms(function(step, i)
  local t = { z = m.tanh(i.v) }
  for name, x in pairs(i) do t[name] = x end
  t.both, t.zs = two(i.k, i.w), two(i.v, t.z)
  return (m.scan(step, { axis = "seq", state = initial(), inputs = t })):sum()
end, {
  function(S, t) return S * t.g + W(t.k) * t.v + W(t.w) * t.z end,
  function(S, t) return W(t.k) * t.v + S * t.g + W(t.z) * t.w end,
  function(S, t) return (S * t.g + W(t.k) * t.v) - W(-t.w) * t.z end,
  function(S, t) return -((-S) * t.g - W(t.k) * t.v - W(t.w) * t.z) end,
  function(S, t) return S * t.g + (W(t.k) * t.v + W(t.w * 2) * (t.z * 0.5)) end,
  function(S, t) return S - (1 - W(t.g)) * S + W(t.k) * t.v + W(t.w) * t.z end,
  function(S, t) return t.g * (S + W(t.k) * (t.v / t.g)) + W(t.w) * t.z end,
  function(S, t) return S * t.g + W(t.k) * t.v + W(t.w) * (t.z * 0.5) + W(t.w) * (t.z * 0.5) end,
  function(S, t) return S * t.g + t.both:dot(t.zs, "two") end,
  function(S, t) return (S + t.zs:dot(t.both / t.g, "two")) * t.g end,
})
-- elements: minGRU
forms(function(step, i)
  local t = { z = m.sigmoid(i.b), x = i.g, q = i.b }
  return (m.scan(step, { axis = "seq", state = m.zeros { A.batch, A.h }, inputs = t })):sum()
end, {
  function(h, t) return h + t.z * (t.x - h) end,
  function(h, t) return h * (1 - t.z) + t.z * t.x end,
  function(h, t) return (1 - t.z) * h - t.z * -t.x end,
  function(h, t) return h - t.z * h + t.x * t.z end,
  function(h, t) return -(-h - t.z * (t.x - h)) end,
  function(h, t) return h / (1 / (1 - t.z)) + t.z * t.x end,
  function(h, t) return h * m.exp(m.log1p(-t.z)) + t.z * t.x end,
  function(h, t) return (h - t.x) * (1 - t.z) + t.x end,
  function(h, t) return m.where(m.gt(t.z, 1), 0, h + t.z * (t.x - h)) end,
  function(h, t) return 0.5 * (h + h) + t.z * (t.x - h) end,
})
