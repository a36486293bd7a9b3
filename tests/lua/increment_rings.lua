-- Windows keep rings: a decoder reads prompts in chunks across the ends of rings, in batches of unequal lengths, closes sequences and uses
-- their slots again, and forks copy what the rings hold. Texts are those of the whole program over the window.
local m = require "mlua"
local core = require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")
local Decoder = require "mlua.decode"

local A = m.axes { batch = 1, seq = 96, embed = 16, vocab = 23, heads = 2, kv_heads = 1, head_dim = 8 }
local function param(name, ...) return m.param { name = name, init = 0.4, ... } end
local embedding, head = param("embedding", A.vocab, A.embed), param("head", A.embed, A.vocab)
local layers = {}
for i, window in ipairs { 11, 0 } do -- a window, and all positions
  layers[i] = {
    window = window > 0 and window or nil, q = param("q" .. i, A.embed, A.heads, A.head_dim), k = param("k" .. i, A.embed, A.kv_heads, A.head_dim),
    v = param("v" .. i, A.embed, A.kv_heads, A.head_dim), o = param("o" .. i, A.heads, A.head_dim, A.embed),
  }
end
local function model(tokens)
  local x = embedding:gather(tokens, "vocab")
  for _, l in ipairs(layers) do
    local q, k, v = x:dot(l.q, "embed"), x:dot(l.k, "embed"), x:dot(l.v, "embed")
    local a = m.attention(m.rope(q), m.rope(k), v, { causal = true, window = l.window, score = function(s) return 20 * m.tanh(s / 20) end })
    x = x + a:dot(l.o, "heads", "head_dim")
    x = x * m.rsqrt((x * x):mean "embed" + 1e-5)
  end
  return 4 * x:dot(head, "embed")
end

local random, prompts = m.random_numbers(5, 0), {}
for i, length in ipairs { 3, 50, 33, 71, 17 } do
  prompts[i] = {}
  for j = 1, length do prompts[i][j] = random:integer(0, 22) end
end

-- The answers of all prompts, two at once (of the whole program one), each followed by a fork of its prompt once that is read.
local function answers(increment)
  local d = Decoder.new(model, { seq = A.seq, slots = increment and 3 or 2, chunk = 16, increment = increment })
  local texts, open, next_one = {}, {}, 1
  while next_one <= #prompts or #open > 0 do
    while next_one <= #prompts and #open < d.slots - 1 do
      open[#open + 1] = { index = next_one, s = d:open(prompts[next_one], { temperature = 1, seed = 20 + next_one }) }
      next_one = next_one + 1
    end
    local list = {}
    for i, one in ipairs(open) do list[i] = one.s end
    d:step(list)
    for i = #open, 1, -1 do
      local one = open[i]
      if #one.s.ids >= one.s.prompt + 25 or one.s:full() then
        texts[#texts + 1] = { one.index, table.concat(one.s.ids, " ", one.s.prompt + 1) }
        d:close(one.s)
        table.remove(open, i)
      elseif one.s.ready and not one.fork and #one.s.ids == one.s.prompt + 4 then -- the rings hold the prompt's end still
        local fork = d:fork(one.s, { temperature = 1, seed = one.index })
        local known, all = fork.cached, {}
        while #fork.ids < fork.prompt + 20 do d:step { fork } end
        texts[#texts + 1], one.fork = { 10 * one.index, table.concat(fork.ids, " ", fork.prompt + 1) }, true
        if increment and fork.prompt > 16 then check.equal(known >= fork.prompt - 17 and known > 0, true, "what a fork of prompt " .. one.index .. " knows") end
        d:close(fork)
      end
    end
  end
  table.sort(texts, function(a, b) return a[1] < b[1] end)
  for i, t in ipairs(texts) do texts[i] = t[1] .. ": " .. t[2] end
  return texts, d
end

local texts, d = answers(true)
local wanted = answers(false)
check.equal(#texts, 10, "answers and forks")
for i, text in ipairs(texts) do check.equal(text, wanted[i], "text " .. i) end
local sizes = {}
for _, kept in ipairs(d.cache.kept:list()) do sizes[#sizes + 1] = kept.kind .. (kept.ring and " " .. kept.ring or "") end
check.equal(table.concat(sizes, ", "), "ring 32, ring 32, pool, pool", "what is kept: a window and a chunk, in whole blocks")
-- A fork of a prompt whose end the rings no longer hold reads it again.
local s = d:open(prompts[2], { temperature = 1, seed = 1 })
while #s.ids < 90 do d:step { s } end
check.equal(d:fork(s, { temperature = 1, seed = 2 }).cached, 0, "what a late fork knows")
check.done()
