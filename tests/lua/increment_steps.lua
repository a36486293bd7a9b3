-- Increments of scans whose steps contain scans, attention and convolutions along axes of their own, against the whole program. A sample;
-- LONG=1 runs all.
local m = require "mlua"
local core = require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check, drawn = dofile(root .. "tests/lua/lib/check.lua"), dofile(root .. "tests/lua/lib/drawn.lua")
local increments = dofile(root .. "tests/lua/lib/increments.lua")
local A = m.axes { batch = 1, seq = 20, embed = 6, vocab = 17, place = 5, taps = 3, heads = 2, head_dim = 3 }
local function param(name, ...) return m.param { name = name, init = 0.6, ... } end
local embedding, head, bias = param("t", A.vocab, A.embed), param("head", A.embed, A.vocab), param("bias", A.place, m.axis("other", 5))
local taps, wq = param("taps", A.taps, A.embed), param("wq", A.embed, A.heads, A.head_dim)
local wk, wo = param("wk", A.embed, A.heads, A.head_dim), param("wo", A.heads, A.head_dim, A.embed)

-- A memory of five places; each step writes the input to it by what the test names, and gives its mean.
local writes = {
  scan = function(S, x) -- along the places, not linear
    local y = m.scan(function(s, t)
      local new = m.tanh(s + t.S)
      return new, new
    end, { axis = "place", state = x, inputs = { S = S } })
    return y
  end,
  reverse = function(S, x) -- two scans within one another, the inner one from the end, and the state after its last place
    local _, last = m.scan(function(s, t)
      local _, inner = m.scan(function(a, u)
        local new = m.sin(a + u.w)
        return new, new
      end, { axis = "other", state = s, inputs = { w = bias:slice("place", 0, 1):sum "place":broadcast { m.axis("other", 5), A.embed } } })
      local new = m.tanh(inner + t.S)
      return new, new
    end, { axis = "place", state = x, inputs = { S = S }, reverse = true })
    return 0.5 * S + last
  end,
  linear = function(S, x) -- a linear scan along the places
    local y = m.scan(function(s, t)
      local new = m.sigmoid(t.S) * s + t.S
      return new, new
    end, { axis = "place", state = x, inputs = { S = S } })
    return m.tanh(y)
  end,
  outer = function(S, x) -- sums of outer products: chunks
    local y = m.scan(function(s, t)
      local new = 0.9 * s + m.outer(t.k, t.v)
      return new, new:dot(t.q, "embed")
    end, { axis = "place", state = m.zeros({ A.batch, A.embed, m.axis("value", 6) }, S:dtype()), inputs = { k = S, q = S + x, v = S:rename("embed", "value") } })
    return m.tanh(S + y:rename("value", "embed"))
  end,
  attention = function(S, x)
    local q, k = (S + x):dot(wq, "embed"), S:dot(wk, "embed")
    local y = m.attention(q, k:rename("place", "kv_seq"), k:rename("place", "kv_seq"), {
      seq = "place", causal = true, score = function(s, i) return s + bias:rename { other = "kv_seq" } end,
    })
    return m.tanh(0.5 * S + y:dot(wo, "heads", "head_dim"))
  end,
  conv = function(S, x) return m.tanh(m.conv(S, taps, { axis = "place", causal = true }) + x) end,
}

local function model_of(write)
  local model = { A = A }
  function model.forward(tokens)
    local x = embedding:gather(tokens, "vocab")
    local y = m.scan(function(S, t)
      local new = write(S, t.x)
      return new, new:mean "place"
    end, { axis = "seq", state = m.zeros({ A.batch, A.place, A.embed }, x:dtype()), inputs = { x = x } })
    return (x + y):dot(head, "embed")
  end
  return model
end

-- States of a MiB at all positions: the whole program scans over segments, for a gradient that an increment has not.
local L = m.axes { batch = 1, seq = 64, embed = 6, wide = 690, other = 690, vocab = 17 }
local mix = param("mix", L.other, m.axis("part", 4))
local function large()
  local model = { A = L }
  function model.forward(tokens)
    local x = embedding:gather(tokens, "vocab")
    local y = m.scan(function(S, t)
      local read = S:rename("wide", "other"):dot(mix, "other"):sum "part"
      local new = m.tanh(0.5 * S + (t.x + 0.01 * read))
      return new, new:mean "wide"
    end, { axis = "seq", state = m.zeros({ L.batch, L.wide, L.embed }, x:dtype()), inputs = { x = x } })
    return (x + y):dot(head, "embed")
  end
  return model
end

local names = {}
local sample = { attention = true, conv = true, reverse = true }
for name in pairs(writes) do
  if sample[name] or os.getenv "LONG" == "1" then names[#names + 1] = name end
end
table.sort(names)
names[#names + 1] = "large"
for i, name in ipairs(names) do
  local model = name == "large" and large() or model_of(writes[name])
  local ok, result = pcall(increments, model, function() return drawn.whole(model, 1, "f32") end, drawn.numbers(i))
  if check.equal(ok, true, name .. ": " .. tostring(result)) or ok then
    check.near(result.worst, 0, 1e-5, name .. " at " .. result.where)
    check.equal(result.argmax, 0, name .. ": positions with another argmax")
    check.equal(result.positions > 20, true, name .. ": positions")
  end
end
check.done()
