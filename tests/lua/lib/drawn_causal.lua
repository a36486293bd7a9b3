-- Parts of drawn models whose value at a position follows from that position and earlier ones: `parts[name](d, o)` draws one by `d`
-- (drawn.lua), but for what o says, and gives a function of h {batch, seq, embed} and c, what is known while tracing: c.A (axes, of which batch is the
-- trace's), c.tokens, c.first (what the first attention of the model left for later ones).
return function(m, core)
  local parts = {}

  local function unary(d)
    return d.choose {
      m.tanh, m.gelu, m.silu, m.sigmoid, m.softplus, m.sin,
      function(x) return m.relu(x) ^ 2 end,
      function(x) return x / (1 + m.abs(x)) end,
      function(x) return m.exp(-(x * x)) end,
      function(x) return m.where(m.gt(x, 0), x, 0.1 * x) end,
      function(x) return m.clamp(x, -1, 1.5) end,
      function(x) return m.log1p(m.abs(x)) * m.sign(x) end,
    }
  end

  function parts.feed(d)
    local up, gate, down = d.w(d.A.embed, d.A.embed, d.A.ffn), d.w(d.A.embed, d.A.embed, d.A.ffn), d.w(d.A.ffn, d.A.ffn, d.A.embed)
    local f, g, gated = unary(d), unary(d), d.coin()
    return function(h)
      local y = g(f(h:dot(up, "embed")))
      if gated then y = y * h:dot(gate, "embed") end
      return y:dot(down, "ffn")
    end
  end

  -- Attention ---------------------------------------------------------------------------------------------

  -- What a score function adds or hides, with the tensors that it captures.
  local scores = {
    none = function() return nil end,
    cap = function() return function() return function(s) return 3 * m.tanh(s / 3) end end end,
    alibi = function() -- ALiBi (Press et al. 2022)
      return function() return function(s, i) return s + (i.k - i.q):cast(s:dtype()) * m.exp(-(i.head + 1):cast(s:dtype())) end end
    end,
    buckets = function(d, heads) -- relative positions in buckets (Raffel et al. 2020)
      local bias = d.w(1, m.axis("buckets", 8), heads)
      return function(c)
        local table = bias:gather(m.relative_buckets(c.h, { buckets = 8, reach = 12, causal = true }), "buckets")
        return function(s) return s + table end
      end
    end,
    first = function() -- the first tokens are always seen, besides the last few
      return function() return function(s, i) return m.where(m.logical_or(m.lt(i.k, 2), m.lt(i.q - i.k, 5)), s, -math.huge) end end
    end,
    strided = function(d) -- every third key, and the query's own
      local by = 2 + d.int(2)
      return function() return function(s, i) return m.where(m.eq((i.q - i.k) % by, 0), s, -math.huge) end end
    end,
    forget = function(d, heads) -- forget gates (Lin et al. 2025): what queries and keys capture
      local gate = d.w(d.A.embed, d.A.embed, heads)
      return function(c)
        local sum = (-m.softplus(-c.h:dot(gate, "embed") - 1)):cumsum "seq"
        local of_keys = sum:rename("seq", "kv_seq")
        return function(s) return s + sum - of_keys end
      end
    end,
    own = function(d) -- a key's own weight, and tokens that are never seen again
      local weight = d.w(d.A.embed, d.A.embed)
      return function(c)
        local of_keys = c.h:dot(weight, "embed"):rename("seq", "kv_seq")
        local hidden = m.eq(c.tokens % 5, 1):rename("seq", "kv_seq")
        return function(s, i) return m.where(m.logical_and(hidden, m.ne(i.k, i.q)), -math.huge, s + of_keys) end
      end
    end,
  }
  local score_names = {}
  for name in pairs(scores) do score_names[#score_names + 1] = name end
  table.sort(score_names)

  local function positions(d)
    return d.choose {
      function() return nil end, function() return nil end,
      function() return {} end,
      function() return { interleaved = true, base = 100 } end,
      function() return { scaling = "linear factor=2" } end,
      function() return { offset = 3 } end,
      function(c) return { positions = (m.ne(c.tokens, 0):cast "i32"):cumsum "seq" } end, -- some tokens count for none
    }
  end

  local function documents(c) return (m.eq(c.tokens, 0):cast "i32"):cumsum "seq" end

  local function heads_of(d)
    local heads = d.choose { 1, 2, 4, 4 }
    local kv = d.choose { heads, heads, 1, math.max(1, heads // 2) }
    local dim = m.axis("head_dim", d.choose { 4, 6, 8 })
    return m.axis("heads", heads), kv == heads and d.coin() and m.axis("heads", heads) or m.axis("kv_heads", kv), dim
  end

  -- `o`: what is not drawn: score, a name; residual.
  function parts.attention(d, o)
    local heads, kv, dim = heads_of(d)
    local wq, wk, wv = d.w(d.A.embed, d.A.embed, heads, dim), d.w(d.A.embed, d.A.embed, kv, dim), d.w(d.A.embed, d.A.embed, kv, dim)
    local wo, gate = d.w(heads.size * dim.size, heads, dim, d.A.embed), d.int(4) == 1 and d.w(d.A.embed, d.A.embed, heads, dim)
    local window, rope, score = d.coin() and d.int(d.A.seq.size // 2) or nil, positions(d), scores[o.score or d.choose(score_names)](d, heads)
    local normed, document, seq = d.int(4) == 1, d.int(4) == 1, d.int(5) == 1 and "time" or "seq"
    local residual = o.residual or d.int(4) == 1 -- of the first attention's values (Zhou et al. 2024)
    local again = d.int(5) == 1 -- the first attention's keys and values (Sun et al. 2024)
    local mix = d.w(1, kv)
    return function(h, c)
      local q, k, v = h:dot(wq, "embed"), h:dot(wk, "embed"), h:dot(wv, "embed")
      if normed then q, k = m.l2_norm(q, "head_dim") * 3, m.l2_norm(k, "head_dim") end
      local r = rope(c)
      if r then q, k = m.rope(q, r), m.rope(k, r) end
      local first = c.first
      if first and first.axis == kv.name and first.heads == kv.size and first.dim == dim.size then
        if residual then v = v + (first.v - v) * m.sigmoid(mix) elseif again then k, v = first.k, first.v end
      elseif not first then
        c.first = { axis = kv.name, heads = kv.size, dim = dim.size, k = k, v = v }
      end
      local with = { causal = true, window = window, document = document and documents(c) or nil }
      if score then
        with.score = score { h = h, tokens = c.tokens }
      end
      if seq ~= "seq" and not score and not document then -- the same of an axis that the script calls otherwise
        with.seq = seq
        local y = m.attention(q:rename("seq", seq), k:rename("seq", seq), v:rename("seq", seq), with):rename(seq, "seq")
        return y:dot(wo, "heads", "head_dim")
      end
      local y = m.attention(q, k, v, with)
      if gate then y = y * m.sigmoid(h:dot(gate, "embed")) end
      return y:dot(wo, "heads", "head_dim")
    end
  end

  function parts.one_head(d) -- without an axis of heads
    local wq, wk, wv = d.w(d.A.embed, d.A.embed, d.A.key), d.w(d.A.embed, d.A.embed, d.A.key), d.w(d.A.embed, d.A.embed, d.A.key)
    local wo, scale = d.w(d.A.key.size, d.A.key, d.A.embed), d.choose { 0.3, 1 }
    return function(h)
      local q, k, v = h:dot(wq, "embed"), h:dot(wk, "embed"), h:dot(wv, "embed")
      return m.attention(q, k, v, { causal = true, scale = scale, head_dim = "key" }):dot(wo, "key")
    end
  end

  function parts.latent(d) -- keys and values of a narrow latent beside one rotary key (DeepSeek-AI 2024)
    local heads, dim, nope = m.axis("heads", d.choose { 2, 4 }), 8, 4
    local wide, latent, joint = m.axis("head_dim", dim), m.axis("latent", d.choose { 4, 6 }), m.axis("kv_dim", 2 * nope)
    local wq, wa = d.w(d.A.embed, d.A.embed, heads, wide), d.w(d.A.embed, d.A.embed, m.axis("latent_key", latent.size + dim - nope))
    local wkv, wo = d.w(latent, latent, heads, joint), d.w(heads.size * nope, heads, m.axis("v_dim", nope), d.A.embed)
    local norm, rotary = d.coin() and d.hold(m.rms_norm { latent }), d.int(3) > 1
    return function(h, c)
      local q, both = h:dot(wq, "embed"), h:dot(wa, "embed")
      local key = both:slice("latent_key", latent.size, latent.size + dim - nope):rename("latent_key", "head_dim")
      local narrow = both:slice("latent_key", 0, latent.size):rename("latent_key", "latent")
      if norm then narrow = norm(narrow) end
      local kv = narrow:dot(wkv, "latent")
      local k, v = kv:slice("kv_dim", 0, nope):rename("kv_dim", "head_dim"), kv:slice("kv_dim", nope, 2 * nope):rename("kv_dim", "head_dim")
      if rotary then
        q, key = m.concat({ q:slice("head_dim", 0, nope), m.rope(q:slice("head_dim", nope, dim)) }, "head_dim"), m.rope(key)
      end
      key = key:broadcast { c.A.batch, c.A.seq, heads, m.axis("head_dim", dim - nope) }:permute(table.unpack(k:axes()))
      local y = m.attention(q, m.concat({ k, key }, "head_dim"), v:pad("head_dim", 0, dim - nope), { causal = true })
      return y:slice("head_dim", 0, nope):rename("head_dim", "v_dim"):dot(wo, "heads", "v_dim")
    end
  end

  -- Attention and other sums by hand: a coefficient is zero where a comparison of positions says so.
  function parts.by_hand(d, o)
    local key, queries = d.A.key, d.A.seq
    local wq, wk, wv = d.w(d.A.embed, d.A.embed, key), d.w(d.A.embed, d.A.embed, key), d.w(d.A.embed, d.A.embed, key)
    local wo, sink, kind, swapped = d.w(key, key, d.A.embed), d.w(1), o.kind or d.int(4), d.coin()
    local keys = m.axis("kv_seq", queries.size)
    local rate, back = 0.05 + 0.1 * d.int(5), d.int(3) - 1
    return function(h)
      local q, k, v = h:dot(wq, "embed"), h:dot(wk, "embed"):rename("seq", "kv_seq"), h:dot(wv, "embed"):rename("seq", "kv_seq")
      local s = q:dot(k, "key") * 0.5
      local order = m.axes_of(s)
      local at, of = m.iota(queries, "i32"):broadcast(order), m.iota(keys, "i32"):broadcast(order)
      local seen = m.le(of, at)
      if swapped then seen = m.ge(at, of) end
      if kind == 1 then
        s = m.softmax(m.where(seen, s, -1e30), "kv_seq")
      elseif kind == 2 then -- a sink takes part in the sum (Agarwal et al. 2025)
        local largest = m.maximum(m.where(seen, s, -1e30):max "kv_seq", sink:read())
        local e = m.where(seen, m.exp(s - largest), 0)
        s = e / (e:sum "kv_seq" + m.exp(sink:read() - largest))
      elseif kind == 3 then -- retention (Sun et al. 2023)
        s = s * m.where(seen, m.exp((of - at):cast "f32" * rate), 0)
      else -- a mask that is multiplied, back to some earlier position
        s = s * m.le(of + back, at):cast "f32" * 0.2
      end
      return s:dot(v, "kv_seq"):dot(wo, "key")
    end
  end

  function parts.triangle(d) -- positions are mixed by learned weights of which a triangle is used (Liu et al. 2021)
    local n = d.A.seq.size
    local keys, weight, out = m.axis("kv_seq", n), d.w(4, d.A.seq, m.axis("kv_seq", n)), d.w(d.A.embed, d.A.embed, d.A.ffn)
    local down = d.w(d.A.ffn, d.A.ffn, d.A.embed)
    return function(h)
      local y = h:dot(out, "embed")
      local all = { d.A.seq, keys }
      local seen = m.ge(m.iota(d.A.seq, "i32"):broadcast(all), m.iota(keys, "i32"):broadcast(all))
      return (y * y:rename("seq", "kv_seq"):dot(m.where(seen, weight, 0), "kv_seq")):dot(down, "ffn")
    end
  end

  -- Earlier positions by shifts and sums --------------------------------------------------------------------

  local function before(x, by)
    return x:pad("seq", by, 0):slice("seq", 0, x:size "seq")
  end

  function parts.shift(d)
    local by, mix, w, spelling = d.int(4), d.w(1, d.A.embed), d.w(d.A.embed, d.A.embed, m.axis("out", d.A.embed.size)), d.int(3)
    return function(h, c)
      local n, last = c.A.seq.size, nil
      if spelling == 1 then
        last = before(h, by)
      elseif spelling == 2 then
        last = h:slice("seq", 0, n - by):pad("seq", by, 0)
      else
        last = m.concat({ m.zeros({ c.A.batch, m.axis("seq", by), c.A.embed }, h:dtype()), h:slice("seq", 0, n - by) }, "seq")
      end
      return (h + (last - h) * m.sigmoid(mix)):dot(w, "embed"):rename("out", "embed")
    end
  end

  function parts.taps(d) -- a short convolution of shifts
    local width = 1 + d.int(3)
    local w = {}
    for i = 1, width do w[i] = d.w(1, d.A.embed) end
    return function(h)
      local y = h * w[1]
      for i = 2, width do y = y + before(h, i - 1) * w[i] end
      return m.silu(y)
    end
  end

  function parts.conv(d)
    local kind, width, dilation = d.int(3), m.axis("width", 1 + d.int(4)), d.int(2)
    if kind == 1 then
      local conv = d.hold(m.short_conv { d.A.embed, width = width.size, bias = d.coin() })
      return function(h) return conv(h) end
    elseif kind == 2 then
      local w = d.w(d.A.embed.size * width.size, width, d.A.embed, m.axis("out", d.A.embed.size))
      return function(h)
        return m.conv(h, w, { axis = "seq", taps = "width", over = "embed", causal = true, dilation = dilation }):rename("out", "embed")
      end
    end
    local w = d.w(width, width, d.A.embed)
    return function(h, c)
      local reach = dilation * (width.size - 1)
      local y = m.conv(h, w, { axis = "seq", taps = "width", padding = { reach + 1, 0 }, dilation = dilation })
      return y:slice("seq", 0, c.A.seq.size)
    end
  end

  function parts.sums(d)
    local w, kind = d.w(d.A.embed, d.A.embed, d.A.ffn), d.int(3)
    local down = d.w(d.A.ffn, d.A.ffn, d.A.embed)
    return function(h, c)
      local y, place = m.tanh(h:dot(w, "embed")), m.iota(c.A.seq, "f32")
      if kind == 1 then
        y = y:cumsum "seq" / (place + 1)
      elseif kind == 2 then -- a mean by weights, each at most e
        local weight = m.exp(y)
        y = (weight * m.sin(y)):cumsum "seq" / weight:cumsum "seq"
      else -- the mean of the positions before
        y = (y:cumsum "seq" - y) / m.maximum(place, 1)
      end
      return y:dot(down, "ffn")
    end
  end

  function parts.counts(d) -- how often the token was seen: integers
    local w = d.w(1, d.A.embed)
    return function(h, c)
      local seen = m.one_hot(c.tokens, c.A.vocab, "i32")
      local count = (seen:cumsum "seq" * seen):sum "vocab"
      return h * m.sigmoid((m.log(count:cast(h:dtype())):broadcast { c.A.batch, c.A.seq, c.A.embed } * w))
    end
  end

  function parts.ngrams(d) -- rows of a table by hashes of the last tokens
    local size = 13
    local rows, w = d.w(1, m.axis("hashes", size), d.A.embed), 1 + d.int(2)
    return function(h, c)
      local hash = c.tokens
      for i = 1, w do hash = (hash * 31 + before(c.tokens, i)) % size end
      return rows:gather(hash, "hashes") * m.sigmoid(h)
    end
  end

  -- Tables over positions -----------------------------------------------------------------------------------

  function parts.tables(d)
    local kind, n = d.int(5), d.A.seq.size
    local longer = d.w(1, m.axis("places", n + 7), d.A.embed)
    local own = d.w(1, d.A.seq, d.A.embed)
    return function(h, c)
      if kind == 1 then return h * own end
      if kind == 2 then return longer:slice("places", 3, 3 + n):rename("places", "seq") + h end
      if kind == 3 then return longer:gather(m.iota(c.A.seq, "i32") * 2 % (n + 7), "places") + m.tanh(h) end
      if kind == 4 then return longer:gather(m.positions(c.tokens), "places") + h end
      local place = m.iota(c.A.seq, "f32"):broadcast { c.A.seq, c.A.embed }
      return h + m.sin(place * m.exp(m.iota(c.A.embed, "f32") * -0.4))
    end
  end

  -- Position by position ------------------------------------------------------------------------------------

  function parts.merged(d) -- rows of all sequences as one axis, or positions as two
    local w, f, kind = d.w(d.A.embed, d.A.embed, m.axis("out", d.A.embed.size)), unary(d), d.int(3)
    local columns = d.A.seq.size % 4 == 0 and 4 or d.A.seq.size % 3 == 0 and 3 or 1
    return function(h, c)
      if kind == 1 then
        local rows = h:merge("batch", "seq", "rows")
        return f(rows:dot(w, "embed")):rename("out", "embed"):split("rows", c.A.batch, c.A.seq)
      elseif kind == 2 then
        local rows = h:permute("seq", "batch", "embed"):merge("seq", "batch", "rows")
        return f(rows:dot(w, "embed")):rename("out", "embed"):split("rows", c.A.seq, c.A.batch):permute("batch", "seq", "embed")
      end
      local y = h:split("seq", m.axis("outer", c.A.seq.size // columns), m.axis("inner", columns))
      y = f(y:dot(w, "embed")):rename("out", "embed")
      return (y / (1 + m.abs(y):max "embed")):merge("outer", "inner", "seq"):permute("batch", "seq", "embed")
    end
  end

  function parts.choices(d) -- argmax, sort and top_k over features
    local codes, w, kind = m.axis("codes", 7), nil, d.int(4)
    w = d.w(d.A.embed, d.A.embed, codes)
    local rows = d.w(1, codes, d.A.embed)
    return function(h)
      local s = h:dot(w, "embed")
      if kind == 1 then return rows:gather(s:argmax "codes", "codes") end
      if kind == 2 then return (s:sort("codes", { descending = true })):dot(rows, "codes") end
      if kind == 3 then
        local best, index = s:top_k("codes", 3, m.axis("picks", 3))
        return (rows:gather(index, "codes") * m.softmax(best, "picks")):sum "picks"
      end
      return m.softmax(m.where(m.ge(s, s:mean "codes"), s, -1e9), "codes"):dot(rows, "codes")
    end
  end

  function parts.moe(d)
    local spec = {
      d.A.embed, experts = m.axis("experts", d.choose { 3, 4 }), ffn = m.axis("inner", 8), top_k = d.int(2), router = d.choose { "softmax", "sigmoid" },
      shared = d.int(2) - 1, expert = d.choose { "swiglu", "gelu" }, init = d.A.embed.size ^ -0.5, bias = d.coin(),
    }
    local moe = d.hold(m.moe(spec))
    return function(h) return moe(h) end
  end

  function parts.moe_capacity(d)
    local spec = {
      d.A.embed, experts = m.axis("experts", d.choose { 3, 4 }), ffn = m.axis("inner", 8), top_k = d.int(2), init = d.A.embed.size ^ -0.5,
      capacity = d.choose { 0.5, 1.0, 1.25 },
    }
    local moe = d.hold(m.moe(spec))
    return function(h) return moe(h) end
  end

  -- Recurrences ---------------------------------------------------------------------------------------------

  function parts.chunks(d) -- linear attention in chunks, by hand
    local n, key = d.A.seq.size, d.A.key
    local size = n % 4 == 0 and 4 or n % 3 == 0 and 3 or n % 5 == 0 and 5 or 1
    local value = m.axis("value", 5)
    local wq, wk, wv = d.w(d.A.embed, d.A.embed, key), d.w(d.A.embed, d.A.embed, key), d.w(d.A.embed, d.A.embed, value)
    local wo = d.w(value, value, d.A.embed)
    return function(h, c)
      local chunks, within, keys = m.axis("chunks", n // size), m.axis("within", size), m.axis("keys", size)
      local q, k = m.sigmoid(h:dot(wq, "embed")), m.sigmoid(h:dot(wk, "embed")) * 0.3
      local v = h:dot(wv, "embed")
      q, k, v = q:split("seq", chunks, within), k:split("seq", chunks, within), v:split("seq", chunks, within)
      local whole = k:dot(v, "within") -- of each chunk: {batch, chunks, key, value}
      local state = whole:cumsum "chunks" - whole -- of the chunks before
      local s = q:dot(k:rename("within", "keys"), "key")
      local order = m.axes_of(s)
      s = m.where(m.le(m.iota(keys, "i32"):broadcast(order), m.iota(within, "i32"):broadcast(order)), s, 0)
      local y = q:dot(state, "key") + s:dot(v:rename("within", "keys"), "keys")
      return y:merge("chunks", "within", "seq"):dot(wo, "value") * 0.3
    end
  end

  local function unit(x) return m.l2_norm(x, "k") end

  -- step(s, t): t has q, k, u (of unit length), v, g and a in (0, 1), b in (0, 1).
  local steps = {
    linear = function(s, t)
      local S = s.S + m.outer(t.k * 0.1, t.v)
      return { S = S }, S:dot(t.q, "k")
    end,
    retnet = function(s, t)
      local S = s.S * 0.9 + m.outer(t.k, t.v)
      return { S = S }, S:dot(t.q, "k")
    end,
    mamba2 = function(s, t)
      local S = s.S * t.g + m.outer(t.k, t.v * t.b)
      return { S = S }, S:dot(t.q, "k")
    end,
    gla = function(s, t)
      local S = m.outer(t.a, m.ones({ t.value }, t.a:dtype())) * s.S + m.outer(t.k, t.v)
      return { S = S }, S:dot(t.q, "k")
    end,
    delta = function(s, t)
      local S = s.S + m.outer(t.k, t.b * (t.v - s.S:dot(t.k, "k")))
      return { S = S }, S:dot(t.q, "k")
    end,
    gated_delta = function(s, t)
      local S = s.S * t.g
      S = S + m.outer(t.k, t.b * (t.v - S:dot(t.k, "k")))
      return { S = S }, S:dot(t.q, "k")
    end,
    before = function(s, t) -- reads the state of the position before
      return { S = s.S * t.g + m.outer(t.k, t.v) }, s.S:dot(t.q, "k")
    end,
    bounded = function(s, t) -- of no class: the state is in a tanh
      local S = m.tanh(s.S * t.g + m.outer(t.k, t.v))
      return { S = S }, S:dot(t.q, "k")
    end,
    largest = function(s, t) -- a running maximum
      local S = m.maximum(s.S, m.outer(t.k, t.v))
      return { S = S }, S:dot(t.q, "k")
    end,
  }
  local names = {}
  for name in pairs(steps) do names[#names + 1] = name end
  table.sort(names)

  function parts.scan(d)
    local heads, key, value = m.axis("h", d.int(2)), m.axis("k", 4), m.axis("v", 3)
    local w = { q = d.w(d.A.embed, d.A.embed, heads, key), k = d.w(d.A.embed, d.A.embed, heads, key), v = d.w(d.A.embed, d.A.embed, heads, value),
      g = d.w(d.A.embed, d.A.embed, heads), b = d.w(d.A.embed, d.A.embed, heads), a = d.w(d.A.embed, d.A.embed, heads, key) }
    local wo, step, resets = d.w(heads.size * value.size, heads, value, d.A.embed), steps[d.choose(names)], d.int(4) == 1
    local initial = d.int(3) == 1 and d.w(2, heads, key, value)
    return function(h, c)
      local t = {
        q = unit(h:dot(w.q, "embed")), k = unit(h:dot(w.k, "embed")), v = h:dot(w.v, "embed"), b = m.sigmoid(h:dot(w.b, "embed")),
        g = m.sigmoid(h:dot(w.g, "embed") + 2), a = m.sigmoid(h:dot(w.a, "embed") + 2),
      }
      local S = m.zeros({ c.A.batch, heads, key, value }, h:dtype())
      if initial then S = S + initial end
      local begins
      if resets then begins = m.eq(c.tokens, 0) end
      local y = m.scan(function(s, x)
        x.value = value
        return step(s, x)
      end, { axis = "seq", state = { S = S }, inputs = t, resets = begins })
      return y:dot(wo, "h", "v")
    end
  end

  function parts.lstm(d)
    local hidden, from = m.axis("hidden", 6), m.axis("from", 6)
    local wx, wh, wo = {}, {}, d.w(hidden, hidden, d.A.embed)
    for i = 1, 3 do wx[i], wh[i] = d.w(d.A.embed, d.A.embed, hidden), d.w(from, from, hidden) end
    local kind = d.int(2)
    return function(h, c)
      local zeros = m.zeros({ c.A.batch, hidden }, h:dtype())
      local inputs = {}
      for i = 1, 3 do inputs[i] = h:dot(wx[i], "embed") end
      local y = m.scan(function(s, t)
        local last, z = s.h:rename("hidden", "from"), {}
        for i = 1, 3 do z[i] = t[i] + last:dot(wh[i], "from") end
        if kind == 1 then -- a minimal GRU
          local f = m.sigmoid(z[1])
          local new = s.h * f + (1 - f) * m.tanh(z[2])
          return { h = new, c = s.c }, new
        end
        local cell = s.c * m.sigmoid(z[1]) + m.sigmoid(z[2]) * m.tanh(z[3])
        return { h = m.tanh(cell), c = cell }, m.tanh(cell)
      end, { axis = "seq", state = { h = zeros, c = zeros }, inputs = inputs })
      return y:dot(wo, "hidden")
    end
  end

  function parts.linear_unit(d) -- an elementwise recurrence (HGRN, minGRU)
    local wz, wx = d.w(d.A.embed, d.A.embed, d.A.ffn), d.w(d.A.embed, d.A.embed, d.A.ffn)
    local down = d.w(d.A.ffn, d.A.ffn, d.A.embed)
    return function(h, c)
      local y = m.scan(function(s, t)
        local z = m.sigmoid(t.z)
        local new = s + z * (t.x - s)
        return new, new
      end, { axis = "seq", state = m.zeros({ c.A.batch, c.A.ffn }, h:dtype()), inputs = { z = h:dot(wz, "embed"), x = h:dot(wx, "embed") } })
      return y:dot(down, "ffn")
    end
  end

  return parts
end
