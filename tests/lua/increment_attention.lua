-- Increments of attention that is not cached as it is: keys that no position gives, axes beside heads, masks that a score function writes;
-- against the whole programs. A sample; LONG=1 runs all.
local core = require "mlua.core"
local m = require "mlua"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check, drawn = dofile(root .. "tests/lua/lib/check.lua"), dofile(root .. "tests/lua/lib/drawn.lua")
local increments = dofile(root .. "tests/lua/lib/increments.lua")
local A = m.axes { batch = 1, seq = 20, embed = 8, vocab = 19, heads = 2, kv_heads = 1, head_dim = 4, streams = 3, buckets = 8 }
local function param(name, ...) return m.param { name = name, init = 0.6, ... } end
local embedding, head, wo = param("t", A.vocab, A.embed), param("head", A.embed, A.vocab), param("wo", A.heads, A.head_dim, A.embed)
local wq, wk, wv = param("wq", A.embed, A.heads, A.head_dim), param("wk", A.embed, A.kv_heads, A.head_dim), param("wv", A.embed, A.kv_heads, A.head_dim)
local sq, sk, sv = param("sq", A.embed, A.streams, A.heads, A.head_dim), param("sk", A.embed, A.streams, A.kv_heads, A.head_dim), param("sv", A.embed, A.streams, A.kv_heads, A.head_dim)
local sinks, wide = m.axis("seq", 2), m.axis("kv_seq", A.seq.size + 2)
local sink_k, sink_v, bias = param("sink_k", sinks, A.kv_heads, A.head_dim), param("sink_v", sinks, A.kv_heads, A.head_dim), param("bias", A.buckets, A.heads)

local function qkv(h) return h:dot(wq, "embed"), h:dot(wk, "embed"), h:dot(wv, "embed") end
local function streams(h) return h:dot(sq, "embed"), h:dot(sk, "embed"), h:dot(sv, "embed") end
local function out(y) return y:dot(wo, "heads", "head_dim") end
local function behind(sink, x) -- after two learned ones that all see
  return m.concat({ sink:broadcast { A.batch, sinks, A.kv_heads, A.head_dim }, x }, "seq"):rename("seq", "kv_seq")
end

local kinds = {
  { "sinks, a soft cap, distances and a window", function(h)
    local q, k, v = qkv(h)
    local function score(s, i) return 2 * m.tanh(s / 2) - 0.1 * (i.q + 2 - i.k):cast(s:dtype()) * (i.head + 1):cast(s:dtype()) end
    return out(m.attention(q, behind(sink_k, k), behind(sink_v, v), { causal = true, window = 7, score = score })) end },
  { "sinks and what a score captures of queries and of keys", function(h)
    local q, k, v = qkv(h)
    local of_query, of_key = h:sum "embed", h:max "embed":pad("seq", 2, 0):rename("seq", "kv_seq")
    return out(m.attention(q, behind(sink_k, k), behind(sink_v, v), { causal = true, score = function(s) return s * m.sigmoid(of_query) + of_key end })) end },
  { "sinks behind", function(h)
    local q, k, v = qkv(h)
    local function before(x, sink) return m.concat({ x, sink:broadcast { A.batch, sinks, A.kv_heads, A.head_dim } }, "seq"):rename("seq", "kv_seq") end
    return out(m.attention(q, before(k, sink_k), before(v, sink_v), { causal = true })) end, "attention over 22 keys of 20 positions reads later ones" },
  { "axes beside heads, biases of distances", function(h)
    local q, k, v = streams(h)
    local table = bias:gather(m.relative_buckets(h, { buckets = 8, reach = 12, causal = true }), "buckets")
    return out(m.attention(q, k, v, { causal = true, window = 9, score = function(s) return s + table end }):sum "streams") end },
  { "a mask of the score function alone", function(h)
    local q, k, v = qkv(h)
    local function score(s, i) return m.where(m.logical_and(m.le(i.k, i.q), m.lt(i.q - i.k, 6)), s, -math.huge) end
    return out(m.attention(q, k, v, { score = score })) end },
  { "attention within chunks", function(h)
    local q, k, v = qkv(h)
    local chunks, within = m.axis("chunks", 5), m.axis("within", 4)
    local function cut(x) return x:split("seq", chunks, within) end
    return out(m.attention(cut(q), cut(k), cut(v), { causal = true, seq = "within" }):merge("chunks", "within", "seq")) end },
  { "a memory that no token changes", function(h)
    local q = qkv(h)
    return out(m.attention(q, sink_k:broadcast { A.batch, sinks, A.kv_heads, A.head_dim }:rename("seq", "kv_seq"), sink_v:broadcast { A.batch, sinks, A.kv_heads, A.head_dim }:rename("seq", "kv_seq"))) end },
  { "a mask that shows one later key", function(h)
    local q, k, v = qkv(h)
    return out(m.attention(q, k, v, { score = function(s, i) return m.where(m.le(i.k, i.q + 1), s, -math.huge) end })) end, "attention without causal = true reads later positions" },
}

local only, long = os.getenv "KIND", os.getenv "LONG" == "1"
local sample = { ["sinks, a soft cap, distances and a window"] = true, ["axes beside heads, biases of distances"] = true, ["attention within chunks"] = true }
for at, kind in ipairs(kinds) do
  local what, f, refused = kind[1], kind[2], kind[3]
  local model = { A = A }
  function model.forward(tokens)
    local h = embedding:gather(tokens, "vocab")
    return (h + f(h)):dot(head, "embed")
  end
  if only == what or not only and (long or refused or sample[what]) then
    local ok, result = pcall(increments, model, function() return drawn.whole(model, 1, "f32") end, drawn.numbers(at))
    if refused then
      check.equal(not ok and tostring(result):find(refused, 1, true) ~= nil, true, what .. ": " .. tostring(result))
    else
      check.equal(ok, true, what .. ": " .. tostring(result))
      if ok then check.near(result.worst, 0, 1e-5, what) end
    end
  end
end
check.done()
