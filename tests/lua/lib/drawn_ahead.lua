-- Parts of drawn models that look ahead, drawn as those of drawn_causal.lua are. The line that a refusal has to name is the one of the
-- part whose comment begins with "ahead".
return function(m, core)
  local parts = {}

  local function wide(x, c) return x:broadcast { c.A.batch, c.A.seq, c.A.embed } end
  local function last_of(c) return c.A.seq.size - 1 end

  local function qkv(d)
    local heads, dim = m.axis("heads", d.choose { 1, 2 }), m.axis("head_dim", 4)
    local wq, wk, wv = d.w(d.A.embed, d.A.embed, heads, dim), d.w(d.A.embed, d.A.embed, heads, dim), d.w(d.A.embed, d.A.embed, heads, dim)
    local wo = d.w(heads.size * dim.size, heads, dim, d.A.embed)
    return function(h) return h:dot(wq, "embed"), h:dot(wk, "embed"), h:dot(wv, "embed") end,
      function(y) return y:dot(wo, "heads", "head_dim") end
  end

  function parts.attention(d)
    local of, out = qkv(d)
    local rotary = d.coin()
    return function(h)
      local q, k, v = of(h)
      if rotary then q, k = m.rope(q), m.rope(k) end
      local y = m.attention(q, k, v) -- ahead: not causal
      return out(y)
    end
  end

  function parts.documents(d)
    local of, out = qkv(d)
    return function(h, c)
      local q, k, v = of(h)
      local document = (m.eq(c.tokens, 0):cast "i32"):cumsum "seq"
      local y = m.attention(q, k, v, { document = document }) -- ahead: documents alone
      return out(y)
    end
  end

  function parts.wrong_score(d)
    local of, out = qkv(d)
    local later = d.coin()
    return function(h)
      local q, k, v = of(h)
      local function score(s, i)
        local seen = m.le(i.k, i.q + 1)
        if later then seen = m.ge(i.k, i.q) end
        return m.where(seen, s, -math.huge)
      end
      local y = m.attention(q, k, v, { score = score }) -- ahead: the score hides earlier keys, or shows one later
      return out(y)
    end
  end

  function parts.by_hand(d)
    local n, key, kind = d.A.seq.size, d.A.key, d.int(4)
    local wq, wk = d.w(d.A.embed, d.A.embed, key), d.w(d.A.embed, d.A.embed, key)
    local keys = m.axis("kv_seq", n)
    return function(h, c)
      local s = h:dot(wq, "embed"):dot(h:dot(wk, "embed"):rename("seq", "kv_seq"), "key")
      local order = m.axes_of(s)
      local at, of = m.iota(c.A.seq, "i32"):broadcast(order), m.iota(keys, "i32"):broadcast(order)
      local seen = m.gt(of, at)
      if kind == 1 then seen = m.le(of, at + 1) elseif kind == 2 then seen = m.lt(of, n - at) end
      local p = kind == 3 and m.sigmoid(s) or m.where(seen, m.sigmoid(s), 0)
      return p:dot(h:rename("seq", "kv_seq"), "kv_seq") * 0.3 -- ahead: no comparison hides later keys
    end
  end

  function parts.softmax_by_hand(d) -- a causal sum of coefficients whose divisor is of all positions
    local n, key = d.A.seq.size, d.A.key
    local wq, wk = d.w(d.A.embed, d.A.embed, key), d.w(d.A.embed, d.A.embed, key)
    local keys = m.axis("kv_seq", n)
    return function(h, c)
      local s = h:dot(wq, "embed"):dot(h:dot(wk, "embed"):rename("seq", "kv_seq"), "key")
      local order = m.axes_of(s)
      local seen = m.le(m.iota(keys, "i32"):broadcast(order), m.iota(c.A.seq, "i32"):broadcast(order))
      local e = m.exp(m.tanh(s))
      local all = e:sum "kv_seq" -- ahead: the divisor
      return (m.where(seen, e, 0) / all):dot(h:rename("seq", "kv_seq"), "kv_seq")
    end
  end

  function parts.mixing(d) -- weights over positions without a mask (Tolstikhin et al. 2021)
    local weight = d.w(d.A.seq, d.A.seq, m.axis("kv_seq", d.A.seq.size))
    return function(h)
      return h:rename("seq", "kv_seq"):dot(weight, "kv_seq") -- ahead: learned weights
    end
  end

  local function reduction(reduce)
    return function(d)
      local f = d.choose { m.tanh, m.sin, m.sigmoid }
      return function(h, c) return f(h) * wide(reduce(h), c) end
    end
  end
  parts.sum = reduction(function(h)
    return h:sum "seq" -- ahead: a sum
  end)
  parts.mean = reduction(function(h)
    return h:mean "seq" -- ahead: a mean
  end)
  parts.max = reduction(function(h)
    return h:max "seq" -- ahead: a maximum
  end)
  parts.min = reduction(function(h)
    return h:min "seq" -- ahead: a minimum
  end)
  parts.logsumexp = reduction(function(h)
    return h:logsumexp "seq" -- ahead: logsumexp
  end)
  parts.last = reduction(function(h)
    return h:slice("seq", -1, h:size "seq"):sum "seq" -- ahead: the last position
  end)

  function parts.softmax()
    return function(h)
      return m.softmax(h, "seq") * h -- ahead: a softmax over positions
    end
  end

  function parts.normed()
    return function(h)
      local y = h - h:mean "seq" -- ahead: the mean of a norm over positions
      return y * m.rsqrt((y * y):mean "embed" + 1e-5)
    end
  end

  function parts.reversed_sum(d)
    local w = d.w(d.A.embed, d.A.embed)
    return function(h, c)
      local y = m.tanh(h * w):cumsum("seq", { reverse = true }) -- ahead: a sum from the end
      return y / (c.A.seq.size - m.iota(c.A.seq, "f32"))
    end
  end

  function parts.rest(d) -- what comes later: the whole less what was
    local w = d.w(d.A.embed, d.A.embed)
    return function(h, c)
      local y = m.tanh(h * w)
      local all = y:sum "seq" -- ahead: the whole
      return (wide(all, c) - y:cumsum "seq") * (1 / c.A.seq.size)
    end
  end

  function parts.scan(d)
    local wz, wx = d.w(d.A.embed, d.A.embed, d.A.ffn), d.w(d.A.embed, d.A.embed, d.A.ffn)
    local down, squashed = d.w(d.A.ffn, d.A.ffn, d.A.embed), d.coin()
    return function(h, c)
      local function step(s, t)
        local new = s + t.z * (t.x - s)
        return squashed and m.tanh(new) or new, new
      end
      local inputs = { z = m.sigmoid(h:dot(wz, "embed")), x = h:dot(wx, "embed") }
      local y = m.scan(step, { axis = "seq", state = m.zeros({ c.A.batch, c.A.ffn }, h:dtype()), inputs = inputs, reverse = true }) -- ahead: from the end
      return y:dot(down, "ffn")
    end
  end

  function parts.matrix_scan(d)
    local key, value = m.axis("k", 4), m.axis("v", 3)
    local wq, wk, wv = d.w(d.A.embed, d.A.embed, key), d.w(d.A.embed, d.A.embed, key), d.w(d.A.embed, d.A.embed, value)
    local wo = d.w(value, value, d.A.embed)
    return function(h, c)
      local function step(s, t)
        local S = s.S * 0.9 + m.outer(t.k, t.v)
        return { S = S }, S:dot(t.q, "k")
      end
      local inputs = { q = h:dot(wq, "embed"), k = h:dot(wk, "embed"), v = h:dot(wv, "embed") }
      local y = m.scan(step, { axis = "seq", state = { S = m.zeros({ c.A.batch, key, value }, h:dtype()) }, inputs = inputs, reverse = true }) -- ahead: from the end
      return y:dot(wo, "v")
    end
  end

  function parts.final_state(d) -- of a scan, the state after the last position
    local wx, down = d.w(d.A.embed, d.A.embed, d.A.ffn), d.w(d.A.ffn, d.A.ffn, d.A.embed)
    return function(h, c)
      local function step(s, t)
        local new = m.tanh(s * 0.8 + t)
        return new, new
      end
      local y, state = m.scan(step, { axis = "seq", state = m.zeros({ c.A.batch, c.A.ffn }, h:dtype()), inputs = h:dot(wx, "embed") }) -- ahead: its last state
      return (y * state):dot(down, "ffn")
    end
  end

  function parts.shift(d)
    local by, w = d.int(3), d.w(1, d.A.embed)
    return function(h)
      local later = h:slice("seq", by, h:size "seq"):pad("seq", 0, by) -- ahead: a shift the other way
      return h + (later - h) * m.sigmoid(w)
    end
  end

  function parts.rolled(d)
    local by = d.int(3)
    return function(h)
      local n = h:size "seq"
      local y = m.concat({ h:slice("seq", n - by, n), h:slice("seq", 0, n - by) }, "seq") -- ahead: the last come first
      return m.tanh(y) * h
    end
  end

  function parts.flipped()
    return function(h, c)
      local y = h:gather(last_of(c) - m.iota(c.A.seq, "i32"), "seq") -- ahead: a flip
      return m.tanh(y)
    end
  end

  function parts.next_token(d)
    local rows = d.w(1, d.A.vocab, d.A.embed)
    return function(h, c)
      local later = c.tokens:gather(m.minimum(m.iota(c.A.seq, "i32") + 1, last_of(c)), "seq") -- ahead: the next token
      return rows:gather(later, "vocab") + h
    end
  end

  function parts.conv(d)
    local width, kind = m.axis("width", 2 + d.int(3)), d.int(2)
    local w = d.w(width, width, d.A.embed)
    return function(h)
      local padding = kind == 1 and "same" or { 0, width.size - 1 }
      return m.conv(h, w, { axis = "seq", taps = "width", padding = padding }) -- ahead: padded behind
    end
  end

  function parts.sort(d)
    local descending = d.coin()
    return function(h)
      local y = h:sort("seq", { descending = descending }) -- ahead: sorted over positions
      return m.tanh(y)
    end
  end

  function parts.top_k(d)
    local k = 1 + d.int(3)
    return function(h, c)
      local best = h:top_k("seq", k, m.axis("best", k)) -- ahead: the largest of all positions
      return h * wide(best:mean "best", c)
    end
  end

  function parts.argmax()
    return function(h, c)
      local at = h:argmax "seq" -- ahead: where the largest is
      return h * wide(at:cast "f32" * (1 / c.A.seq.size), c)
    end
  end

  function parts.expert_choice(d) -- experts choose positions (Zhou et al. 2022)
    local experts, k = m.axis("experts", 3), math.max(2, d.A.seq.size // 4)
    local router, up = d.w(d.A.embed, d.A.embed, experts), d.w(d.A.embed, experts, d.A.embed, m.axis("out", d.A.embed.size))
    return function(h, c)
      local s = m.sigmoid(h:dot(router, "embed"))
      local best = s:top_k("seq", k, m.axis("best", k)) -- ahead: each expert's choice
      local least = best:min "best":broadcast { c.A.batch, c.A.seq, experts }
      local kept = m.where(m.ge(s, least), s, 0)
      return (h:dot(up, "embed") * kept):sum "experts":rename("out", "embed")
    end
  end

  function parts.chunk(d) -- linear attention in chunks whose states have the chunk itself
    local n = d.A.seq.size
    local size = n % 4 == 0 and 4 or n % 3 == 0 and 3 or 5
    local key, value = d.A.key, m.axis("value", 5)
    local wq, wk, wv = d.w(d.A.embed, d.A.embed, key), d.w(d.A.embed, d.A.embed, key), d.w(d.A.embed, d.A.embed, value)
    local wo = d.w(value, value, d.A.embed)
    return function(h)
      local chunks, within = m.axis("chunks", n // size), m.axis("within", size)
      local q, k, v = m.sigmoid(h:dot(wq, "embed")), m.sigmoid(h:dot(wk, "embed")) * 0.3, h:dot(wv, "embed")
      q, k, v = q:split("seq", chunks, within), k:split("seq", chunks, within), v:split("seq", chunks, within)
      local whole = k:dot(v, "within") -- ahead: with what comes later in the chunk
      return q:dot(whole:cumsum "chunks", "key"):merge("chunks", "within", "seq"):dot(wo, "value") * 0.3
    end
  end

  function parts.block(d) -- each block of positions has one mean
    local n = d.A.seq.size
    local size = n % 4 == 0 and 4 or n % 3 == 0 and 3 or 5
    return function(h, c)
      local y = h:split("seq", m.axis("outer", n // size), m.axis("inner", size))
      local mean = y:mean "inner" -- ahead: a mean of a block
      return (y - mean):merge("outer", "inner", "seq"):permute("batch", "seq", "embed")
    end
  end

  function parts.rows(d) -- positions among the rows of the batch
    return function(h, c)
      local rows = h:merge("batch", "seq", "rows")
      local y = m.softmax(rows, "rows") -- ahead: over all rows
      return y:split("rows", c.A.batch, c.A.seq) * h
    end
  end

  function parts.positions(d) -- rotations by how far the end is
    local of, out = qkv(d)
    return function(h, c)
      local q, k, v = of(h)
      local left = (m.ne(c.tokens, 0):cast "i32"):cumsum("seq", { reverse = true }) -- ahead: tokens until the end
      return out(m.attention(m.rope(q, { positions = left }), k, v, { causal = true }))
    end
  end

  function parts.capture(d) -- a causal attention whose score knows later tokens
    local of, out = qkv(d)
    local w = d.w(d.A.embed, d.A.embed)
    return function(h)
      local q, k, v = of(h)
      local most = h:dot(w, "embed"):max "seq" -- ahead: the largest of all positions
      return out(m.attention(q, k, v, { causal = true, score = function(s) return s * m.tanh(most) end }))
    end
  end

  return parts
end
