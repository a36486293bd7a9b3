-- m.attention with every option against its definition written out in Lua, values and gradients, for
-- short sequences (where the score matrix is kept) and long ones (where it never exists).
local m = require "mlua"
local core = require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")

local slopes = core.full({ m.axis("heads", 4) }, 0.25) * (core.iota(m.axis("heads", 4), "f32") + 1)

-- The scores after masking, by broadcasting all to {batch, heads, seq, kv_seq}.
local function definition(q, k, v, o)
  local B, H, T = m.axis("batch", q:size "batch"), m.axis("heads", q:size "heads"), m.axis("seq", q:size "seq")
  local S, D = m.axis("kv_seq", k:size "seq"), m.axis("head_dim", q:size "head_dim")
  local all = { B, H, T, S }
  k, v = k:rename("seq", "kv_seq"), v:rename("seq", "kv_seq")
  if k:has "kv_heads" then
    local group = m.axis("group", H.size // k:size "kv_heads")
    local K = m.axis("kv_heads", k:size "kv_heads")
    k = k:broadcast { B, S, K, group, D }:merge("kv_heads", "group", "heads")
    v = v:broadcast { B, S, K, group, D }:merge("kv_heads", "group", "heads")
  end
  local s = q:dot(k, "head_dim") * (o.scale or 1 / math.sqrt(D.size))
  s = s:permute("batch", "heads", "seq", "kv_seq")
  local i = { q = core.iota(T):broadcast(all), k = core.iota(S):broadcast(all), head = core.iota(H):broadcast(all),
    batch = core.iota(B):broadcast(all) }
  if o.score then s = o.score(s, i) end
  local function mask(test) s = m.where(test, s, -1e30) end
  if o.causal then mask(m.le(i.k, i.q)) end
  if o.window then mask(m.lt(i.q - i.k, o.window)) end
  if o.document ~= nil then
    mask(m.eq(o.document:broadcast(all), o.document:rename("seq", "kv_seq"):broadcast(all)))
  end
  return m.softmax(s, "kv_seq"):dot(v, "kv_seq")
end

-- `order`, where given: that of the axes of q, k and v.
local function compare(name, length, kv_heads, options, order)
  local A = m.axes { batch = 2, seq = length, heads = 4, kv_heads = kv_heads or 4, head_dim = 8 }
  local heads = kv_heads and A.kv_heads or A.heads
  local q = m.normal({ A.batch, A.seq, A.heads, A.head_dim }, 1)
  local k = m.normal({ A.batch, A.seq, heads, A.head_dim }, 2)
  local v = m.normal({ A.batch, A.seq, heads, A.head_dim }, 3)
  local weight = m.normal({ A.batch, A.seq, A.heads, A.head_dim }, 4)
  local result = m.compile(function()
    local o = {}
    for key, value in pairs(options) do o[key] = value end
    if o.document then o.document = (core.iota(A.seq) * 3 // length):broadcast { A.batch, A.seq } end
    local function ordered(t) return order and t:permute(table.unpack(order)) or t end
    local ours = m.attention(ordered(q), ordered(k), ordered(v), o)
    check.equal(tostring(ours), tostring(ordered(q)))
    local theirs = definition(q, k, v, o):permute("batch", "seq", "heads", "head_dim")
    local a, b = m.grad((ours * weight):sum(), { q, k, v }), m.grad((theirs * weight):sum(), { q, k, v })
    local outputs = { size = m.abs(theirs):max(), value = m.abs(ours - theirs):max() }
    for j, what in ipairs { "dq", "dk", "dv" } do outputs[what] = m.abs(a[j] - b[j]):max() / m.abs(b[j]):max() end
    return outputs
  end) {}
  check.equal(result.size > 0.1, true, name)
  for _, what in ipairs { "value", "dq", "dk", "dv" } do
    check.near(result[what], 0, 2e-5, ("%s, %d long: %s"):format(name, length, what))
  end
end

-- Each case compiles attention kernels of its own, three tenths of a second each: the longer sequences take every second one, all with
-- DIST_ALL=1.
local all = os.getenv "DIST_ALL"
local thirds = function(s, i) return m.where(m.eq((i.q + i.k + i.head + i.batch) % 3, 0), s, s * 0.5) end
local cases = { -- name, key heads, options, order of the axes
  { "plain", nil, {} },
  { "causal", nil, { causal = true } },
  { "scale", nil, { scale = 0.5 } },
  { "grouped", 2, { causal = true } },
  { "softcap", nil, { causal = true, score = function(s) return 3 * m.tanh(s / 3) end } },
  { "window", 1, { causal = true, window = 17 } },
  { "index", nil, { score = thirds } },
  { "alibi", 2, { causal = true, score = function(s, i) return s + slopes * (i.k - i.q):cast "f32" end } },
  { "document", nil, { causal = true, document = true } },
  { "document and score", 2, { document = true, score = function(s, i) return s - 0.01 * (i.q - i.k):abs():cast "f32" end } },
  { "rows of heads", nil, { causal = true }, { "batch", "seq", "head_dim", "heads" } },
  { "rows of positions", nil, { document = true, score = thirds }, { "head_dim", "heads", "batch", "seq" } },
}
for i, case in ipairs(cases) do
  compare(case[1], 40, case[2], case[3], case[4])
  if all or i % 2 == 0 then compare(case[1], 600, case[2], case[3], case[4]) end
end

-- Refusals.
local A = m.axes { batch = 2, seq = 8, heads = 4, head_dim = 8 }
local q = m.input("q", { A.batch, A.seq, A.heads, A.head_dim })
for text, options in pairs {
  ["cannot use sum on scores"] = { score = function(s) return s - s:sum "kv_seq" end },
  ["must return a tensor, got nil"] = { score = function() end },
  ["must be a function, got number"] = { score = 1 },
  ["must hold integers"] = { document = q:sum("heads", "head_dim") },
  ["must have the axis \"seq\""] = { document = core.iota(A.batch) },
  ["a number other than 0"] = { scale = 0 },
  ["the left lacks \"head_dim\""] = { score = function(s) return s + q:sum("heads") end },
} do check.raises(text, core.attention, q, q, q, options) end
check.raises("boom", m.attention, q, q, q, { score = function() error "boom" end })
check.equal(tostring(m.attention(q, q, q, { score = function(s) return s end })), tostring(q))
check.done()
