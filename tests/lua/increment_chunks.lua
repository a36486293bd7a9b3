-- Increments of models that cut the positions into chunks by hand, in spellings beside that of drawn_causal.lua, or gather earlier ones,
-- against their whole programs. A sample; LONG=1 runs all.
local core = require "mlua.core"
local m = require "mlua"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check, drawn = dofile(root .. "tests/lua/lib/check.lua"), dofile(root .. "tests/lua/lib/drawn.lua")
local increments = dofile(root .. "tests/lua/lib/increments.lua")
local size = 4
local A = m.axes { batch = 1, seq = 20, embed = 8, vocab = 19, key = 3, value = 5 }
local chunks, within, keys = m.axis("chunks", A.seq.size // size), m.axis("within", size), m.axis("keys", size)
local function param(name, ...) return m.param { name = name, init = 0.6, ... } end
local embedding, head, wo = param("t", A.vocab, A.embed), param("head", A.embed, A.vocab), param("wo", A.value, A.embed)
local wq, wk, wv, wg = param("wq", A.embed, A.key), param("wk", A.embed, A.key), param("wv", A.embed, A.value), param("wg", A.embed)

local function cut(x) return x:split("seq", chunks, within) end
local function joined(x) return x:merge("chunks", "within", "seq") end
local function of_keys(x) return x:rename("within", "keys") end
local function before(x) return x:pad("chunks", 1, 0):slice("chunks", 0, chunks.size) end

local function masked(s, otherwise)
  local order = m.axes_of(s)
  return m.where(m.le(m.iota(keys, "i32"):broadcast(order), m.iota(within, "i32"):broadcast(order)), s, otherwise)
end

-- {what it is, f(h, q, k, v, tokens), why it is refused}; q, k, v {batch, chunks, within, ...} -> {batch, chunks, within, value}
local kinds = {
  { "the last of the chunk before", function(h, q, k, v)
    local g = cut(-m.softplus(h:dot(wg, "embed"))):cumsum "within"
    local all = g:slice("within", size - 1, size):sum "within"
    return v * before(all) end },
  { "running sums within a chunk", function(h, q, k, v)
    local g = cut(-m.softplus(h:dot(wg, "embed"))):cumsum "within"
    local s = q:dot(of_keys(k), "key")
    local order = m.axes_of(s)
    return masked(s * m.exp(m.minimum(g:broadcast(order) - of_keys(g):broadcast(order), 0)), 0):dot(of_keys(v), "keys") end },
  { "the sum of the chunks before, by a shift", function(_, q, k, v)
    return q:dot(before(k:dot(v, "within"):cumsum "chunks"), "key") end },
  { "the sum of the chunks before, shifted first", function(_, q, k, v)
    return q:dot(before(k:dot(v, "within")):cumsum "chunks", "key") end },
  { "a scan over chunks", function(h, q, k, v)
    local decay = m.sigmoid(cut(h:dot(wg, "embed")):sum "within")
    local function step(s, t)
      local S = s.S * t.g + t.x
      return { S = S }, S
    end
    local state = m.scan(step, { axis = "chunks", state = { S = m.zeros { A.batch, A.key, A.value } }, inputs = { g = decay, x = k:dot(v, "within") } })
    return q:dot(before(state), "key") end },
  { "a recurrence over chunks, which reads the state before", function(_, q, k, v)
    local function step(s, x)
      local S = m.tanh(s.S * 0.9 + x)
      return { S = S }, s.S
    end
    local state = m.scan(step, { axis = "chunks", state = { S = m.zeros { A.batch, A.key, A.value } }, inputs = k:dot(v, "within") })
    return q:dot(before(state), "key") end },
  { "the mean of the chunk before", function(_, _, _, v)
    return before(m.tanh(v:mean "within")):broadcast { A.batch, chunks, within, A.value } + v end },
  { "attention to the chunk so far", function(_, q, k, v)
    return m.softmax(masked(q:dot(of_keys(k), "key"), -math.huge), "keys"):dot(of_keys(v), "keys") end },
  { "attention to the chunk before", function(_, q, k, v)
    local s = q:dot(before(of_keys(k)), "key")
    return m.softmax(s, "keys"):dot(before(of_keys(v)), "keys") end, "may read later" },
  { "numbers of chunks and within them", function(_, _, _, v)
    return v * (m.iota(chunks, "f32") + 1) + m.sin(m.iota(within, "f32")):broadcast(m.axes_of(v)) end },
  { "positions shifted before they are cut", function(h, q, k, _)
    local late = cut(h:pad("seq", 3, 0):slice("seq", 0, A.seq.size):dot(wv, "embed"))
    local whole = k:dot(late, "within")
    return q:dot(whole:cumsum "chunks" - whole, "key") + late end },
  { "every position as the first of its chunk", function(_, _, _, v)
    return m.tanh(v:slice("within", 0, 1):sum "within"):broadcast { A.batch, chunks, within, A.value } + v * 0 end },
  { "the second of each chunk", function(_, _, _, v)
    return before(v:slice("within", 1, 2)):sum "within":broadcast { A.batch, chunks, within, A.value } end },
  { "the second of its own chunk", function(_, _, _, v)
    return v:slice("within", 1, 2):sum "within":broadcast { A.batch, chunks, within, A.value } end, "looks ahead" },
  { "as far back as the token says", function(h, _, _, v, tokens)
    local back = m.maximum(m.iota(A.seq, "i32") - (1 + tokens % 3), 0)
    return v + cut(m.tanh(h:gather(back, "seq"):dot(wv, "embed"))) end },
  { "later positions by their number", function(h, _, _, _, tokens)
    return cut(h:gather(m.minimum(m.iota(A.seq, "i32") + tokens % 3, A.seq.size - 1), "seq"):dot(wv, "embed")) end, "nothing bounds" },
  { "the chunk itself", function(_, q, k, v) return q:dot(k:dot(v, "within"):cumsum "chunks", "key") end, "looks ahead" },
  { "a sum from the end of the chunk", function(_, _, _, v) return v:cumsum("within", { reverse = true }) end, "no increment yet" },
}

local only, long = os.getenv "KIND", os.getenv "LONG" == "1"
local sample = { ["running sums within a chunk"] = true, ["a recurrence over chunks, which reads the state before"] = true, ["as far back as the token says"] = true }
for at, kind in ipairs(kinds) do
  local what, f, refused = kind[1], kind[2], kind[3]
  local model = { A = A }
  function model.forward(tokens, axes)
    local h = embedding:gather(tokens, "vocab")
    if axes.batch.size == 1 then axes = A end
    local y = f(h, cut(m.sigmoid(h:dot(wq, "embed"))), cut(m.sigmoid(h:dot(wk, "embed"))), cut(h:dot(wv, "embed")), tokens)
    return (h + joined(y):dot(wo, "value")):dot(head, "embed")
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
