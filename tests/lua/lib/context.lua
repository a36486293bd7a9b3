-- Context parallelism on ranks: attention with every kind of mask, values and gradients, against its
-- definition by products and a softmax under the same layout. `acts`: the axes that cp splits; `names`:
-- the cases (all of them where DIST_ALL is set), in an order that is the same on every rank; `length`: of sequences, 96 where not named.
return function(ranks, acts, names, length)
  local m, core = require "mlua", require "mlua.core"
  local root = core.options().script:match "^(.*)tests/lua/" or ""
  local check = dofile(root .. "tests/lua/lib/check.lua")
  length = length or 96
  local A = m.axes { batch = 2, seq = length, kv_seq = length, heads = 4, kv_heads = 2, head_dim = 8 }
  local all = { A.batch, A.heads, A.seq, A.kv_seq }

  local function definition(q, k, v, o)
    local group = m.axis("group", A.heads.size // A.kv_heads.size)
    local function keys(t)
      t = t:rename("seq", "kv_seq"):broadcast { A.batch, A.kv_seq, A.kv_heads, group, A.head_dim }
      return t:merge("kv_heads", "group", "heads")
    end
    local s = q:dot(keys(k), "head_dim") / math.sqrt(A.head_dim.size)
    s = s:permute("batch", "heads", "seq", "kv_seq")
    local i = { q = core.iota(A.seq):broadcast(all), k = core.iota(A.kv_seq):broadcast(all),
      head = core.iota(A.heads):broadcast(all) }
    if o.score then s = o.score(s, i) end
    if o.causal then s = m.where(m.le(i.k, i.q), s, -1e30) end
    if o.window then s = m.where(m.lt(i.q - i.k, o.window), s, -1e30) end
    if o.document ~= nil then
      s = m.where(m.eq(o.document:broadcast(all), o.document:rename("seq", "kv_seq"):broadcast(all)), s, -1e30)
    end
    return m.softmax(s, "kv_seq"):dot(keys(v), "kv_seq"):permute("batch", "seq", "heads", "head_dim")
  end

  local cases = {
    causal = { causal = true },
    documents = { causal = true, document = true },
    narrow = { causal = true, window = 9 },
    wide = { causal = true, window = 3 * length // 4 - 2, score = function(s, i) return s + 0.02 * (i.k - i.q):cast "f32" * (i.head + 1):cast "f32" end },
    whole = { score = function(s, i) return m.where(m.eq((i.q + i.k) % 3, 0), s, 0.5 * s) end },
  }
  if os.getenv "DIST_ALL" then names = { "causal", "documents", "narrow", "wide", "whole" } end
  local program = m.compile(function(feeds)
    local out = {}
    for _, name in ipairs(names) do
      local options, o = cases[name], {}
      for key, value in pairs(options) do o[key] = value end
      if options.document then o.document = feeds.document end
      local ours, theirs = m.attention(feeds.q, feeds.k, feeds.v, o), definition(feeds.q, feeds.k, feeds.v, o)
      local wrt = { feeds.q, feeds.k, feeds.v }
      local a, b = m.grad((ours * feeds.w):sum(), wrt), m.grad((theirs * feeds.w):sum(), wrt)
      out[name] = m.abs(ours - theirs):max() / m.abs(theirs):max()
      for j, what in ipairs { "dq", "dk", "dv" } do
        out[name .. " " .. what] = m.abs(a[j] - b[j]):max() / m.abs(b[j]):max()
      end
      out[name .. " size"] = m.abs(b[2]):max()
    end
    return out
  end, {
    q = { A.batch, A.seq, A.heads, A.head_dim }, w = { A.batch, A.seq, A.heads, A.head_dim },
    k = { A.batch, A.seq, A.kv_heads, A.head_dim }, v = { A.batch, A.seq, A.kv_heads, A.head_dim },
    document = { A.batch, A.seq, dtype = "i32" },
  }, { layout = m.layout { mesh = { { "cp", ranks } }, acts = { cp = acts } } })

  local function numbers(heads, scale)
    local list = {}
    for i = 1, A.batch.size * length * heads * A.head_dim.size do list[i] = math.sin(scale * i * i) end
    return list
  end
  local ids = {}
  for i = 1, A.batch.size * length do ids[i] = (i - 1) % length * 5 // (length - 10) end
  local out = program {
    q = numbers(4, 1), k = numbers(2, 0.37), v = numbers(2, 0.11), w = numbers(4, 0.53), document = ids,
  }
  for _, name in ipairs(names) do
    check.equal(out[name .. " size"] > 0.01, true, name)
    for _, what in ipairs { "", " dq", " dk", " dv" } do check.near(out[name .. what], 0, 2e-5, name .. what) end
  end
  check.done()
end
