-- m.generate and m.score: draws against their definition, penalties and filters against another implementation, text that does not depend on the
-- batch, stops, samples, log probabilities, callbacks, mistakes.
local m = require "mlua"
local core = require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")
local Answer = require "mlua.answer"

local A = m.axes { vocab = 12, seq = 24, batch = 1, embed = 16, heads = 2, head_dim = 8 }
local base = {} -- logits that depend on nothing
for i = 1, A.vocab.size do base[i] = 2.5 * math.sin(1.7 * i) end
local Fixed = m.module("Fixed", function(self) self.logits = m.param { A.vocab, init = "zeros" } end)
function Fixed:forward(tokens) return self.logits:broadcast { core.axis("batch", tokens:size "batch"), A.seq, A.vocab } + tokens:cast "f32" * 0 end
local fixed = Fixed()
fixed.logits:set(base, { "vocab" })

-- Another implementation: the probabilities of the definition, of logits (from 1) by id (from 0).
local function probabilities(logits, o, prompt, answer)
  local x, counts, seen = {}, {}, {}
  for _, id in ipairs(prompt or {}) do seen[id] = true end
  for _, id in ipairs(answer or {}) do seen[id], counts[id] = true, (counts[id] or 0) + 1 end
  for i = 1, #logits do
    local v, id = logits[i], i - 1
    if seen[id] and o.repetition_penalty then v = v > 0 and v / o.repetition_penalty or v * o.repetition_penalty end
    if counts[id] then v = v - (o.presence_penalty or 0) - counts[id] * (o.frequency_penalty or 0) end
    x[i] = { id = id, p = v / o.temperature }
  end
  table.sort(x, function(a, b) return a.p > b.p end)
  local function normalise()
    local sum, most = 0, x[1].p
    for _, e in ipairs(x) do e.q = math.exp(e.p - most); sum = sum + e.q end
    for _, e in ipairs(x) do e.q = e.q / sum end
  end
  normalise()
  for i = #x, (o.top_k or #x) + 1, -1 do x[i] = nil end
  normalise()
  if o.top_p then
    local before, keep = 0, 0
    for _, e in ipairs(x) do
      if before < o.top_p then keep = keep + 1 end
      before = before + e.q
    end
    for i = #x, keep + 1, -1 do x[i] = nil end
    normalise()
  end
  if o.min_p then
    for i = #x, 1, -1 do
      if x[i].q < o.min_p * x[1].q then x[i] = nil end
    end
    normalise()
  end
  local result = {}
  for _, e in ipairs(x) do result[e.id] = e.q end
  return result
end

-- The draws of a setting are distributed as the definition says: chi-square below the quantile of 1e-6 or so, and nothing else is drawn.
local function distribution(o)
  local counts, total = {}, 0
  local n, tokens = 16, 20
  local list = {}
  for repetition = 1, 4 do
    local asked = { prompt = { 1 }, n = n, tokens = tokens, seq = A.seq, quiet = true, seed = 1000 * repetition }
    for key, value in pairs(o) do asked[key] = value end
    for _, r in ipairs(m.generate(fixed, asked)) do list[#list + 1] = r end
  end
  for _, r in ipairs(list) do
    for _, id in ipairs(r.ids) do counts[id], total = (counts[id] or 0) + 1, total + 1 end
  end
  check.equal(total, 4 * n * tokens, "draws")
  local p, chi, freedom = probabilities(base, o), 0, -1
  for id, count in pairs(counts) do
    if not p[id] then check.equal(id, "one that the filters leave", "a drawn token") end
    p[id] = p[id] or 1e-9
  end
  for id, q in pairs(p) do
    chi, freedom = chi + ((counts[id] or 0) - q * total) ^ 2 / (q * total), freedom + 1
  end
  local bound = freedom + 5 * math.sqrt(2 * math.max(freedom, 1)) + 8
  if chi > bound then check.equal(chi, "below " .. bound, ("chi-square of temperature %g top_k %s top_p %s min_p %s"):format(o.temperature, o.top_k, o.top_p, o.min_p)) end
  return list
end
distribution { temperature = 1 }
distribution { temperature = 0.6 }
distribution { temperature = 1.3, top_k = 3 }
distribution { temperature = 1, top_p = 0.7 }
distribution { temperature = 1.5, top_k = 6, top_p = 0.8 }
distribution { temperature = 1, min_p = 0.2 }
distribution { temperature = 1, top_p = 0.9, min_p = 0.1 }
-- The program that sorts all logits draws what the one for few likeliest draws.
local few = m.generate(fixed, { prompts = { { 1 } }, tokens = 20, seq = A.seq, quiet = true, temperature = 1, top_k = 4 })[1]
local sorted = m.generate(fixed, { prompts = { { 1 }, { 2 } }, tokens = 20, seq = A.seq, quiet = true, temperature = 1, top_k = 4, top_p = 1 - 1e-9 })[1]
check.equal(table.concat(sorted.ids, " "), table.concat(few.ids, " "), "draws of the sorted and of the few likeliest")

-- Penalties: the likeliest token each time, by both implementations.
for _, o in ipairs {
  { repetition_penalty = 1.8 }, { presence_penalty = 1.1 }, { frequency_penalty = 0.7 },
  { repetition_penalty = 1.3, presence_penalty = 0.4, frequency_penalty = 0.35 }, { presence_penalty = -0.5 }, { repetition_penalty = 0.7 },
} do
  local prompt = { 3, 1, 3, 7 }
  local asked = { prompts = { prompt, { 0 } }, tokens = 12, seq = A.seq, quiet = true, temperature = 0 }
  for key, value in pairs(o) do asked[key] = value end
  local got, answer = m.generate(fixed, asked)[1].ids, {}
  o.temperature = 1
  for _ = 1, 12 do
    local best, most = nil, -1
    for id, q in pairs(probabilities(base, o, prompt, answer)) do
      if q > most then best, most = id, q end
    end
    answer[#answer + 1] = best
  end
  check.equal(table.concat(got, " "), table.concat(answer, " "), "the likeliest with penalties")
end

-- A model that reads its context: what is drawn depends neither on the other prompts nor on how many are decoded at once.
local Small = m.module("Small", function(self)
  self.embedding = m.param { A.vocab, A.embed, init = 0.8 }
  self.wq, self.wk = m.param { A.embed, A.heads, A.head_dim, init = 0.3 }, m.param { A.embed, A.heads, A.head_dim, init = 0.3 }
  self.wv, self.wo = m.param { A.embed, A.heads, A.head_dim, init = 0.3 }, m.param { A.heads, A.head_dim, A.embed, init = 0.3 }
end)
function Small:forward(tokens)
  local x = self.embedding:gather(tokens, "vocab")
  local q, k, v = x:dot(self.wq, "embed"), x:dot(self.wk, "embed"), x:dot(self.wv, "embed")
  x = x + m.attention(m.rope(q), m.rope(k), v, { causal = true }):dot(self.wo, "heads", "head_dim")
  return x:dot(self.embedding, "embed") * 0.5
end
local model = Small()
local prompts = { { 1 }, { 2, 3, 4, 5, 6, 7 }, { 8, 9 }, { 1, 1, 1, 1, 1, 1, 1, 1 }, { 10 } }
local function ids_of(r) return table.concat(r.ids, " ") end
for _, o in ipairs { { temperature = 0 }, { temperature = 1.2 }, { temperature = 1, top_k = 5, repetition_penalty = 1.2 }, { temperature = 1, top_p = 0.8 } } do
  o.tokens, o.seq, o.quiet, o.seed, o.prompts = 10, A.seq, true, 5, prompts
  local together = m.generate(model, o)
  check.equal(#together, #prompts, "results")
  o.rows = 2
  local by_two = m.generate(model, o)
  o.n, o.rows = 2, nil
  local twice = m.generate(model, o)
  check.equal(#twice, 2 * #prompts, "results of two samples")
  for i, prompt in ipairs(prompts) do
    o.prompts, o.n = { prompt }, nil
    local alone = m.generate(model, o)[1]
    o.increment = false
    local whole = m.generate(model, o)[1]
    check.equal(ids_of(alone), ids_of(whole), "by increments and by the whole program")
    check.all(alone.logprobs, whole.logprobs, 1e-5, "log probabilities by increments and by the whole program")
    o.increment = nil
    check.equal(ids_of(together[i]), ids_of(alone), "in a batch and alone")
    check.equal(ids_of(by_two[i]), ids_of(alone), "two at once and alone")
    check.equal(ids_of(twice[2 * i - 1]), ids_of(alone), "the first of two samples")
    o.seed = 6
    check.equal(ids_of(twice[2 * i]), ids_of(m.generate(model, o)[1]), "the second of two samples")
    o.seed = 5
    check.equal(together[i].finish_reason, "length", "why it ended")
    check.equal(#together[i].ids, 10, "how many tokens")
    -- Log probabilities: those of m.score, given prompt and answer.
    local score = m.score(model, { { prompt = prompt, text = alone.ids } }, { seq = A.seq, top = 3 })[1]
    check.all(alone.logprobs, score.logprobs, 1e-5, "log probabilities")
    check.near(alone.logprob, score.logprob, 1e-5, "their sum")
    check.equal(score.count, 10, "tokens of the score")
    if o.temperature == 0 then check.equal(score.greedy, true, "the likeliest each time") end
    check.equal(#score.top[1], 3, "the likeliest of a place")
    if o.temperature == 0 then check.equal(score.top[4][1].id, alone.ids[4], "the likeliest token of a place") end
  end
end
-- A decoder: prompts are read in chunks, sequences come and leave at any time, and share the blocks of a prompt; few blocks are a reason to wait.
local function decoder_run(increment)
  local wide = m.axis("seq", 160)
  local Decoder = require "mlua.decode"
  local d = Decoder.new(model, { seq = wide, slots = 3, chunk = 16, positions = 320, increment = increment })
  local random, prompt, said, texts = m.random_numbers(3, 0), {}, {}, {}
  for i = 1, 70 do prompt[i] = random:integer(0, 11) end
  local asked = { temperature = 1, top_k = 6, seed = 4, logprobs = 2, presence_penalty = 0.5 }
  local first, second = d:open(prompt, asked), d:open({ 5 }, { temperature = 0 })
  local steps = 0
  while not first.ready do
    steps = steps + 1
    local r = d:step { first, second }
    check.equal(r[2] and r[2].id, second.ids[#second.ids], "a result while another prompt is read")
    if not first.ready then check.equal(r[1], false, "no result while the prompt is read") end
  end
  check.equal(steps, increment and 5 or 0, "steps that read 70 tokens by 16")
  local used = d:use().blocks
  local third = d:fork(first, { temperature = 1, seed = 9 })
  check.equal(d:use().blocks - used, increment and 1 or 0, "blocks of a fork")
  check.equal(select(2, d:open({ 1 })), "slots", "why there is no room")
  d:start { first, second, third }
  d:close(second)
  local r = d:finish()
  check.equal(r[2], false, "the result of a sequence that was closed")
  if increment then
    local long = {}
    for i = 1, 159 do long[i] = i % 12 end
    local fourth = d:open(long, {})
    check.equal(fourth ~= nil, true, "room for a long prompt")
    d:close(third)
    check.equal(select(2, d:open(long, {})), "blocks", "why there is no room for a second one")
    d:close(fourth)
    third = d:fork(first, { temperature = 1, seed = 9 })
  end
  while #first.ids < 100 do
    for i, one in ipairs(d:step { third, first }) do
      if i == 2 and one then said[#said + 1] = one.logprob end
    end
  end
  texts[1], texts[2] = table.concat(first.ids, " ", 71, 100), table.concat(third.ids, " ", 71, 90)
  d:close(first)
  d:close(third)
  check.equal(d:use().blocks, 0, "blocks when all are closed")
  return texts, said
end
local texts, said = decoder_run(true)
local wanted_texts, wanted_said = decoder_run(false)
check.equal(texts[1], wanted_texts[1], "a sequence of a decoder by increments")
check.equal(texts[2], wanted_texts[2], "a fork by increments")
check.all({ table.unpack(said, #said - 20) }, { table.unpack(wanted_said, #wanted_said - 20) }, 1e-5, "its log probabilities")
-- Probabilities of all tokens, that of a place by m.score, sum to one.
local lists = {}
for id = 0, A.vocab.size - 1 do lists[id + 1] = { 4, 2, id } end
local sum = 0
for _, r in ipairs(m.score(model, lists, { seq = A.seq, rows = 5 })) do
  check.equal(r.count, 2, "tokens of a list")
  sum = sum + math.exp(r.logprobs[2])
end
check.near(sum, 1, 1e-5, "the sum of all probabilities")
local top = m.generate(model, { prompts = { { 4, 2 } }, tokens = 3, seq = A.seq, quiet = true, temperature = 0, logprobs = 12 })[1]
check.equal(#top.top, 3, "places with the likeliest tokens")
sum = 0
for j, e in ipairs(top.top[2]) do
  sum = sum + math.exp(e.logprob)
  if j > 1 and e.logprob > top.top[2][j - 1].logprob then check.equal(e.logprob, "falling", "the likeliest tokens") end
end
check.near(sum, 1, 1e-5, "the sum of all tokens of a place")
check.near(top.top[2][1].logprob, top.logprobs[2], 1e-6, "the drawn token among the likeliest")

-- Seeds: one for each sample; the context is full; a single prompt slides.
local listed = m.generate(model, { prompt = { 3 }, n = 3, seed = { 9, 4, 9 }, tokens = 8, seq = A.seq, quiet = true, temperature = 1.2 })
check.equal(ids_of(listed[1]), ids_of(listed[3]), "equal seeds")
check.equal(ids_of(listed[1]) ~= ids_of(listed[2]), true, "other seeds")
local full = m.generate(model, { prompts = { { 3, 1 } }, tokens = 100, seq = A.seq, quiet = true })[1]
check.equal(#full.ids, A.seq.size - 2, "tokens that fit")
check.equal(full.finish_reason, "length", "why a full context ended")
check.equal(#m.generate(model, { prompt = { 3, 1 }, tokens = 100, seq = A.seq, quiet = true }), 102, "tokens of a window that slides")
local stopped_ids, _, stopped = m.generate(model, { prompt = { 3, 1 }, tokens = 100, seq = A.seq, quiet = true, slide = false })
check.equal(#stopped_ids, A.seq.size, "tokens of a window that does not slide")
check.equal(stopped.finish_reason, "length")

-- A function over the logits; a callback; an id that stops.
local banned = m.generate(model, {
  prompt = { 3 }, n = 4, tokens = 15, seq = A.seq, quiet = true, temperature = 2,
  logits = function(x) return core.where(core.ge(core.iota(A.vocab, "i32"):broadcast(m.axes_of(x)), 4), x, -math.huge) end,
})
for _, r in ipairs(banned) do
  for _, id in ipairs(r.ids) do check.equal(id >= 4, true, "a token that the function allows") end
end
local events = {}
local cancelled = m.generate(model, {
  prompts = { { 3 }, { 4 } }, tokens = 6, seq = A.seq, quiet = true, temperature = 1,
  on_token = function(e)
    events[#events + 1] = e
    return not (e.prompt == 2 and #events > 5)
  end,
})
check.equal(cancelled[1].finish_reason, "length", "the other answer")
check.equal(cancelled[2].finish_reason, "cancelled", "the answer that the callback ended")
check.equal(#cancelled[1].ids, 6)
check.equal(#cancelled[2].ids, 3, "tokens until the callback ended it")
check.equal(#events, 9, "calls")
check.equal(events[1].logprob, cancelled[1].logprobs[1])
local free = m.generate(model, { prompts = { { 3 } }, tokens = 8, seq = A.seq, quiet = true, temperature = 1.5 })[1].ids
local stopping = m.generate(model, { prompts = { { 3 } }, tokens = 8, seq = A.seq, quiet = true, temperature = 1.5, stop = { "zzz", free[4] } })[1]
check.equal(stopping.finish_reason, "stop")
check.equal(stopping.ids[#stopping.ids], free[4], "the id that stops")
check.equal(#stopping.ids <= 4, true, "tokens until the id that stops")
check.equal(#m.generate(model, { prompts = { { 3 } }, tokens = 0, seq = A.seq, quiet = true })[1].ids, 0, "no tokens")

-- Texts: a model of which each byte has one successor.
local B = m.axes { bytes = 256, seq = 32 }
local Chain = m.module("Chain", function(self) self.next = m.param { m.axis("from", 256), B.bytes, init = "zeros" } end)
function Chain:forward(tokens) return self.next:gather(tokens, "from") end
local chain, line = Chain(), "ab\xc3\xa9cd\xf0\x9f\x98\x80 ef.gh"
local successors = m.host("f32", 256, 256)
for i = 1, #line - 1 do successors[line:byte(i) * 256 + line:byte(i + 1) + 1] = 30 end
chain.next:set(successors)
local bytes = m.tokenizer "bytes"
local function say(options)
  local pieces = {}
  options.prompts, options.tokens, options.seq, options.quiet, options.temperature = { "a" }, options.tokens or 15, B.seq, true, 0
  options.on_token = function(e) pieces[#pieces + 1] = e.text end
  local r = m.generate(chain, options)[1]
  check.equal(table.concat(pieces), r.text, "the pieces of a text")
  return r.text, r.finish_reason, pieces, #r.ids
end
check.equal(say { tokenizer = bytes }, line:sub(2), "the whole text")
check.equal(say {}, line:sub(2), "the whole text without a tokenizer")
local text, why, pieces = say { tokenizer = bytes, stop = "d\xf0\x9f\x98\x80 e" }
check.equal(text, "b\xc3\xa9c", "what is before a stop text of several tokens")
check.equal(why, "stop")
check.equal(pieces[1] .. "|" .. pieces[2] .. "|" .. pieces[3], "b||\xc3\xa9", "whole characters")
text, why = say { tokenizer = bytes, stop = { "gX", "ef!", "\xf0\x9f\x98\x81" } } -- begun, and never whole
check.equal(text, line:sub(2))
check.equal(why, "length")
text, why = say { tokenizer = bytes, stop = { "f.g", "ef.", "zz" } } -- which ends first, and begins first
check.equal(text, "b\xc3\xa9cd\xf0\x9f\x98\x80 ", "the earlier of two stop texts")
text = say { tokenizer = bytes, tokens = 2 }
check.equal(text, "b\xef\xbf\xbd", "a character that is not whole when the answer ends")
text = say { tokenizer = bytes, tokens = 4, stop = "cd" }
check.equal(text, "b\xc3\xa9c", "what was held back when the answer ends")
check.equal(select(4, say { tokenizer = bytes, stop = "cd" }), 5, "tokens, with those of the stop text")

-- Answers against the definition: any cut of a text into tokens gives the same.
local random = m.random_numbers(7, 0)
local letters = { "a", "b", "ab", "\xc3\xa9", "c" }
for round = 1, 300 do
  local whole, stops = {}, {}
  for i = 1, 12 do whole[i] = letters[random:integer(1, #letters)] end
  for i = 1, random:integer(1, 3) do stops[i] = letters[random:integer(1, 5)] .. letters[random:integer(1, 5)] .. letters[random:integer(1, 3)] end
  local all = table.concat(whole)
  local first, answer, shown, reason = #all + 1, Answer.new { tokenizer = bytes, stops = Answer.stops(stops), limit = #all }, "", nil
  local ends = #all + 1 -- the stop text that is whole first decides; of those whole at the same byte the longest
  for _, stop in ipairs(stops) do
    local _, last = all:find(stop, 1, true)
    if last and last < ends then ends = last end
  end
  for _, stop in ipairs(stops) do
    local at, last = all:find(stop, 1, true)
    if last and last == ends and at < first then first = at end
  end
  for i = 1, #all do
    local piece
    piece, reason = answer:add(all:byte(i))
    shown = shown .. piece
    if reason then break end
  end
  check.equal(shown, all:sub(1, first - 1), "a text with stops in round " .. round)
  check.equal(reason, first <= #all and "stop" or "length", "the reason in round " .. round)
  check.equal(answer:text(), shown)
end

-- Conversations: the chat template writes the prompt.
local template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
local said = m.generate(chain, {
  prompts = { { { role = "user", content = "xa" } } }, chat = { template = template }, tokens = 3, seq = B.seq, quiet = true, temperature = 0, tokenizer = bytes,
})[1]
check.equal(said.text, "b\xc3\xa9", "a conversation")

-- Mistakes.
local function generate(key, value)
  local o = { prompts = { { 1 } }, seq = A.seq, quiet = true, tokens = 2 }
  o[key] = value
  if key == "prompt" then o.prompts = nil end
  return m.generate(model, o)
end
for _, case in ipairs {
  { "tokens", -1, "m.generate's tokens must be an integer, 0 or more, got -1" }, { "tokens", 1.5, "tokens must be an integer, 0 or more, got 1.5" },
  { "n", 0, "m.generate's n must be a positive integer, got 0" }, { "n", "2", "n must be a positive integer, got \"2\"" },
  { "rows", 0, "m.generate's rows must be a positive integer, got 0" }, { "temperature", "hot", "temperature must be a number, 0 or more, got \"hot\"" },
  { "temperature", 0 / 0, "temperature must be a number, 0 or more" }, { "top_k", 0, "top_k must be a positive integer, got 0" },
  { "top_k", 2.5, "top_k must be a positive integer, got 2.5" }, { "top_p", 0, "top_p must be a number above 0 and at most 1, got 0" },
  { "top_p", 1.1, "top_p must be a number above 0 and at most 1, got 1.1" }, { "min_p", -0.1, "min_p must be a number from 0 to 1, got -0.1" },
  { "min_p", true, "min_p must be a number from 0 to 1, got true" }, { "repetition_penalty", 0, "repetition_penalty must be a number above 0, got 0" },
  { "presence_penalty", "x", "presence_penalty must be a number, got \"x\"" }, { "frequency_penalty", math.huge, "frequency_penalty must be a number, got inf" },
  { "logprobs", 21, "logprobs must be an integer from 0 to 20, got 21" }, { "seed", 1.5, "m.generate's seed must be an integer, got 1.5" },
  { "seed", { 1, 2 }, "seed is a list of 2, and n is 1" }, { "stop", "", "stop must be token ids and texts that are not empty, got \"\"" },
  { "stop", { -1 }, "stop must be token ids and texts that are not empty, got -1" }, { "stop", { text = "a" }, "stop must be a list" },
  { "on_token", 1, "m.generate's on_token must be a function, got 1" }, { "logits", "x", "m.generate's logits must be a function" },
  { "slide", 1, "m.generate's slide must be a boolean, got 1" }, { "quiet", 1, "m.generate's quiet must be a boolean" },
  { "prompts", "text", "m.generate's prompts must be a list of prompts, got \"text\"" }, { "prompts", {}, "prompts must be a list of prompts" },
  { "prompts", { { 12 } }, "m.generate's prompt has the token 12, and the model has 0 to 11" }, { "prompts", { {} }, "needs a prompt of at least one token" },
  { "prompts", { 5 }, "m.generate's prompt must be a text or a list of token ids, got 5" }, { "tokenizer", "bytes", "tokenizer must be a tokenizer" },
  { "prompts", { { { role = "user", content = "x" } } }, "m.generate needs a tokenizer for a conversation" }, { "nucleus", 1, "m.generate has no option \"nucleus\"" },
  { "prompts", { { 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 1, 2 } }, "prompt 1 has 24 tokens, and the context is seq=24" },
  { "logits", function() return 1 end, "the function over the logits returns logits of the same axes" },
} do
  check.raises(case[3], generate, case[1], case[2])
end
check.raises("m.generate has both prompt and prompts", m.generate, model, { prompt = "a", prompts = { "b" }, seq = A.seq })
check.raises("m.score takes a list of texts", m.score, model, "a", { seq = A.seq })
check.raises("m.score needs seq", m.score, model, { "a" })
check.raises("m.score's top must be an integer from 0 to 20, got 21", m.score, model, { { 1, 2 } }, { seq = A.seq, top = 21 })
check.raises("m.score's prompt has the token 99", m.score, model, { { 1, 99 } }, { seq = A.seq })
check.raises("a text that is scored has 2 to 24 tokens, got 1", m.score, model, { { 1 } }, { seq = A.seq })
local Bad = m.module("Bad", function(self) self.w = m.param { A.vocab, init = "zeros" } end)
function Bad:forward(tokens) return self.w:gather(tokens, "vocab") end
check.raises("the logits of a model that generates have batch, seq and one more axis, not batch, seq", m.generate, Bad(), { seq = A.seq, prompt = { 1 } })
local Ahead = m.module("Ahead", function(self) self.e, self.w = m.param { A.vocab, A.embed }, m.param { A.embed, A.heads, A.head_dim } end)
function Ahead:forward(tokens)
  local x = self.e:gather(tokens, "vocab")
  local q = x:dot(self.w, "embed")
  return (x + m.attention(q, q, q):dot(self.w, "heads", "head_dim")):dot(self.e, "embed")
end
check.raises("attention without causal = true reads later positions", m.generate, Ahead(), { seq = A.seq, prompt = { 1 } })
fixed.logits:set(table.move({ 0 / 0 }, 1, 1, 12, { table.unpack(base) }), { "vocab" })
check.raises("the model's logits are not finite", m.generate, fixed, { seq = A.seq, prompt = { 1 }, quiet = true })
check.done()
