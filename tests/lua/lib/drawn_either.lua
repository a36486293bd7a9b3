-- Parts of drawn models of which small numbers decide whether they look ahead, drawn as those of drawn_causal.lua are: shifts there and
-- back, comparisons of positions with offsets, paddings on both sides. Which do, the oracle says.
return function(m, core)
  local parts = {}

  local function shifted(h, by) -- element p is h's p - by, or 0
    local n = h:size "seq"
    if by >= 0 then return h:pad("seq", by, 0):slice("seq", 0, n) end
    return h:slice("seq", -by, n):pad("seq", 0, -by)
  end

  function parts.shifts(d)
    local a, b, between = d.int(7) - 4, d.int(7) - 4, d.coin()
    local w = d.w(d.A.embed, d.A.embed, m.axis("out", d.A.embed.size))
    return function(h)
      local y = shifted(h, a)
      if between then y = m.tanh(y:dot(w, "embed")):rename("out", "embed") end
      return shifted(y, b) + h
    end
  end

  local comparisons = { m.le, m.lt, m.ge, m.gt, m.eq, m.ne }

  -- A test of the positions of keys against those of queries.
  local function test_of(d)
    local compare, offset, side, turned, window = comparisons[d.int(d.int(2) == 1 and 2 or 6)], d.int(5) - 3, d.coin(), d.int(5) == 1, d.int(4) == 1
    return function(at, of)
      local seen
      if side then seen = compare(of + offset, at) else seen = compare(of, at - offset) end
      if turned then seen = m.logical_not(compare(at + offset, of)) end
      if window then seen = m.logical_and(seen, m.lt(at - of, 6)) end
      return seen
    end
  end

  function parts.masks(d)
    local key, n, kind = d.A.key, d.A.seq.size, d.int(5)
    local wq, wk, wv = d.w(d.A.embed, d.A.embed, key), d.w(d.A.embed, d.A.embed, key), d.w(d.A.embed, d.A.embed, key)
    local wo, test, keys = d.w(key, key, d.A.embed), test_of(d), m.axis("kv_seq", n)
    return function(h, c)
      local q, k, v = h:dot(wq, "embed"), h:dot(wk, "embed"):rename("seq", "kv_seq"), h:dot(wv, "embed"):rename("seq", "kv_seq")
      local s = q:dot(k, "key") * 0.5
      local order = m.axes_of(s)
      local seen = test(m.iota(c.A.seq, "i32"):broadcast(order), m.iota(keys, "i32"):broadcast(order))
      local y
      if kind == 1 then
        y = m.softmax(m.where(seen, s, -1e9), "kv_seq"):dot(v, "kv_seq")
      elseif kind == 2 then
        y = (s * seen:cast(s:dtype())):dot(v, "kv_seq") * 0.2
      elseif kind == 3 then
        y = m.where(m.logical_not(seen), 0, m.sigmoid(s)):dot(v, "kv_seq") * 0.2
      elseif kind == 4 then
        y = m.softmax(s + (seen:cast(s:dtype()) - 1) * 1e9, "kv_seq"):dot(v, "kv_seq")
      else
        local wide = { c.A.batch, c.A.seq, keys, key }
        y = m.where(seen:broadcast(wide), v:broadcast(wide), 0):sum "kv_seq" * 0.2
      end
      return y:dot(wo, "key")
    end
  end

  function parts.scores(d)
    local heads, dim = m.axis("heads", 2), m.axis("head_dim", 4)
    local wq, wk, wv = d.w(d.A.embed, d.A.embed, heads, dim), d.w(d.A.embed, d.A.embed, heads, dim), d.w(d.A.embed, d.A.embed, heads, dim)
    local wo, test, causal, window = d.w(8, heads, dim, d.A.embed), test_of(d), d.int(3) == 1, d.coin() and d.int(8) or nil
    return function(h)
      local function score(s, i) return m.where(test(i.q, i.k), s, -math.huge) end
      return m.attention(h:dot(wq, "embed"), h:dot(wk, "embed"), h:dot(wv, "embed"), { causal = causal, window = window, score = score }):dot(wo, "heads", "head_dim")
    end
  end

  function parts.lengths(d) -- keys of another length: causal counts from the end
    local heads, dim = m.axis("heads", 2), m.axis("head_dim", 4)
    local wq, wk, wv = d.w(d.A.embed, d.A.embed, heads, dim), d.w(d.A.embed, d.A.embed, heads, dim), d.w(d.A.embed, d.A.embed, heads, dim)
    local wo, front, back, sink = d.w(8, heads, dim, d.A.embed), d.int(4) - 2, d.int(4) - 2, d.w(1, heads, dim)
    local window = d.int(3) == 1 and d.int(8) or nil
    return function(h, c)
      local function keys(x)
        local n = x:size "seq"
        if front < 0 then x = x:slice("seq", -front, n) end
        if back < 0 then x = x:slice("seq", 0, x:size "seq" + back) end
        local list = { x }
        if front > 0 then table.insert(list, 1, sink:read():broadcast { c.A.batch, m.axis("seq", front), heads, dim }:cast(x:dtype())) end
        if back > 0 then list[#list + 1] = sink:read():broadcast { c.A.batch, m.axis("seq", back), heads, dim }:cast(x:dtype()) end
        return (#list > 1 and m.concat(list, "seq") or x):rename("seq", "kv_seq")
      end
      return m.attention(h:dot(wq, "embed"), keys(h:dot(wk, "embed")), keys(h:dot(wv, "embed")), { causal = true, window = window }):dot(wo, "heads", "head_dim")
    end
  end

  function parts.conv(d)
    local width, before, dilation = m.axis("width", 1 + d.int(3)), d.int(5) - 1, d.int(2)
    local w, mixes = nil, d.coin()
    local reach = dilation * (width.size - 1)
    if mixes then w = d.w(width.size * d.A.embed.size, width, d.A.embed, m.axis("out", d.A.embed.size)) else w = d.w(width, width, d.A.embed) end
    local first = d.int(3) - 1
    return function(h)
      local n = h:size "seq"
      local o = { axis = "seq", taps = "width", padding = { before, reach + 3 }, dilation = dilation }
      if mixes then o.over = "embed" end
      local y = m.conv(h, w, o):slice("seq", first, n + first)
      if mixes then y = y:rename("out", "embed") end
      return m.tanh(y)
    end
  end

  function parts.gathered(d)
    local by, add, kind = d.int(2), d.int(5) - 3, d.int(4)
    return function(h, c)
      local n, place = c.A.seq.size, m.iota(c.A.seq, "i32")
      local at
      if kind == 1 then at = m.clamp(place + add, 0, n - 1) end
      if kind == 2 then at = place // (1 + by) * (1 + by) + (add > 1 and 1 or 0) end
      if kind == 3 then at = (place * by) // 2 end
      if kind == 4 then at = m.maximum(place - (c.tokens % 3), 0) end -- as far back as the token says
      if kind == 2 then at = m.minimum(at, n - 1) end
      return m.tanh(h:gather(at, "seq")) * h
    end
  end

  function parts.first(d) -- one position, seen by all
    local which = d.int(3) - 1
    local hidden = d.coin()
    return function(h, c)
      local one = h:slice("seq", which, which + 1):sum "seq":broadcast { c.A.batch, c.A.seq, c.A.embed }
      if hidden then one = m.where(m.ge(m.iota(c.A.seq, "i32"), 1):broadcast(m.axes_of(one)), one, 0) end
      return m.tanh(one) * h
    end
  end

  function parts.pairs(d) -- of two positions one is used for both
    local which, later = d.int(2) - 1, d.int(2) - 1
    local size = d.A.seq.size % 2 == 0 and 2 or 3
    return function(h, c)
      local inner = m.axis("inner", size)
      local y = shifted(h, later):split("seq", m.axis("outer", c.A.seq.size // size), inner)
      local one = y:slice("inner", which, which + 1):sum "inner"
      return m.tanh(one:broadcast(m.axes_of(y)) * y):merge("outer", "inner", "seq"):permute("batch", "seq", "embed")
    end
  end

  function parts.chunks(d)
    local n, key = d.A.seq.size, d.A.key
    local size = n % 4 == 0 and 4 or 3
    local value, test, before = m.axis("value", 5), test_of(d), d.int(3)
    local wq, wk, wv = d.w(d.A.embed, d.A.embed, key), d.w(d.A.embed, d.A.embed, key), d.w(d.A.embed, d.A.embed, value)
    local wo = d.w(value, value, d.A.embed)
    return function(h)
      local chunks, within, keys = m.axis("chunks", n // size), m.axis("within", size), m.axis("keys", size)
      local q, k, v = m.sigmoid(h:dot(wq, "embed")), m.sigmoid(h:dot(wk, "embed")) * 0.3, h:dot(wv, "embed")
      q, k, v = q:split("seq", chunks, within), k:split("seq", chunks, within), v:split("seq", chunks, within)
      local whole = k:dot(v, "within")
      local state = before > 1 and whole:cumsum "chunks" - whole or whole:cumsum "chunks"
      local s = q:dot(k:rename("within", "keys"), "key")
      local order = m.axes_of(s)
      s = m.where(test(m.iota(within, "i32"):broadcast(order), m.iota(keys, "i32"):broadcast(order)), s, 0)
      local y = q:dot(state, "key") + s:dot(v:rename("within", "keys"), "keys")
      return y:merge("chunks", "within", "seq"):dot(wo, "value") * 0.3
    end
  end

  function parts.turned(d) -- flips there and back
    local twice, reverse = d.coin(), d.coin()
    return function(h, c)
      local n = c.A.seq.size
      local back = n - 1 - m.iota(c.A.seq, "i32")
      local y = m.tanh(h):gather(back, "seq"):cumsum("seq", { reverse = reverse })
      if twice then y = y:gather(back, "seq") end
      return y * (1 / n)
    end
  end

  function parts.scans(d)
    local w, reverse, kind = d.w(d.A.embed, d.A.embed, d.A.ffn), d.int(3) == 1, d.int(3)
    local down = d.w(d.A.ffn, d.A.ffn, d.A.embed)
    return function(h, c)
      local x = h:dot(w, "embed")
      local y, last = m.scan(function(s, t)
        local new = s * 0.9 + m.tanh(t)
        return new, kind == 1 and s or new
      end, { axis = "seq", state = m.zeros({ c.A.batch, c.A.ffn }, h:dtype()), inputs = x, reverse = reverse })
      if kind == 2 then y = y * (1 / c.A.seq.size) + last end
      return m.tanh(y):dot(down, "ffn")
    end
  end

  return parts
end
