-- Text from a trained model: m.generate and m.score, over the decoder (decode.lua).
local Answer = require "mlua.answer"
local Decoder = require "mlua.decode"
local Tokenizer = require "mlua.tokenizer"
local core = require "mlua.core"
local given = require "mlua.given"
local files = require "mlua.tokenizer_files"
local m = require "mlua"
local sampling = require "mlua.sampling"

local ROWS = 16 -- sequences that are decoded at once

-- Options ------------------------------------------------------------------------------------------------------------------

local KNOWN = { "prompt", "prompts", "tokens", "seq", "n", "seed", "stop", "tokenizer", "quiet", "on_token", "on_result", "logits", "rows", "slide", "chat", "increment", "decoder", "inputs", "axis", "names", "weights" }
for _, name in ipairs(sampling.names()) do
  if name ~= "seed" then KNOWN[#KNOWN + 1] = name end
end

-- Options that both functions have.
local function check_model(what, model, options)
  if not m.is_module(model) and type(model) ~= "function" then
    local within = type(model) == "table" and rawget(model, "model") ~= nil
    core.fail(("m.%s takes a module, got %s"):format(what, m.shown(model)), {
      help = within and ("the model comes first: m.%s(model, { prompt = \"a\", seq = A.seq })"):format(what) or "calling a class makes one: local model = GPT()",
    })
  end
  if core.options().mode == "check" or core.stopped() then return false end
  if type(options.seq) ~= "userdata" or core.is_tensor(options.seq) then
    core.fail(("m.%s needs seq, the axis of positions"):format(what), { help = "seq = A.seq" })
  end
  if options.tokenizer ~= nil and getmetatable(options.tokenizer) ~= Tokenizer then
    core.fail(("m.%s's tokenizer must be a tokenizer, got %s"):format(what, m.shown(options.tokenizer)), { help = "tokenizer = m.tokenizer(path)" })
  end
  return true
end

local function check_kind(name, value, kind)
  if value ~= nil and type(value) ~= kind then core.fail(("m.generate's %s must be a %s, got %s"):format(name, kind, m.shown(value))) end
end

local function check_integer(name, value, least)
  if type(value) ~= "number" or not math.tointeger(value) or value < least then
    core.fail(("m.generate's %s must be %s, got %s"):format(name, least == 0 and "an integer, 0 or more" or "a positive integer", m.shown(value)))
  end
  return math.tointeger(value)
end

-- The seed of each of n samples of a prompt.
local function seeds_of(seed, n)
  local list = {}
  if type(seed) == "table" and #seed ~= n then core.fail(("m.generate's seed is a list of %d, and n is %d"):format(#seed, n), { help = "a number is the seed of the first sample; the next have the next numbers" }) end
  for i = 1, n do
    local one = seed
    if type(seed) == "table" then one = seed[i] end
    if one ~= nil and (type(one) ~= "number" or not math.tointeger(one)) then core.fail("m.generate's seed must be an integer, got " .. m.shown(one)) end
    list[i] = type(seed) == "table" and one or (one or core.options().seed) + i - 1
  end
  return list
end

-- What the options ask for, checked.
local function read_options(options)
  for name, kind in pairs { quiet = "boolean", on_token = "function", on_result = "function", decoder = "table", logits = "function", slide = "boolean", increment = "boolean", chat = "table", inputs = "table", names = "table" } do
    check_kind(name, options[name], kind)
  end
  if options.prompts ~= nil and options.prompt ~= nil then core.fail "m.generate has both prompt and prompts" end
  if options.prompts ~= nil and (type(options.prompts) ~= "table" or #options.prompts == 0) then
    core.fail("m.generate's prompts must be a list of prompts, got " .. m.shown(options.prompts), { help = 'prompts = { "once", "twice" }; one: prompt = "once"' })
  end
  if options.inputs then
    if options.prompts ~= nil or type(options.prompt) ~= "table" then
      core.fail("m.generate with inputs needs prompt, the token ids that each answer begins with", { help = "prompt = { 0 }; inputs = { {source = a}, {source = b} } are several" })
    end
    if next(options.inputs) == nil then core.fail "m.generate's inputs are none" end
  end
  local n = check_integer("n", options.n == nil and 1 or options.n, 1)
  local seeds, plain = seeds_of(options.seed, n), {}
  for key, value in pairs(options) do
    if key ~= "seed" then plain[key] = value end
  end
  local asked, problem = sampling.parameters(plain, "m.generate's ")
  if not asked then core.fail(problem) end
  local stops, wrong = Answer.stops(options.stop, "m.generate's ")
  if not stops then core.fail(wrong) end
  return {
    n = n, seeds = seeds, names = options.names or {}, asked = asked, stops = stops, limit = check_integer("tokens", options.tokens == nil and 200 or options.tokens, 0),
    rows = check_integer("rows", options.rows == nil and ROWS or options.rows, 1), single = options.prompts == nil and options.n == nil and not (options.inputs and options.inputs[1]),
  }
end

-- Prompts ------------------------------------------------------------------------------------------------------------------

-- The tokenizer of texts: that of the options, else that of the model's training; nil where bytes are tokens.
local function tokenizer_for(model, options, texts)
  local file = files.of_model[model]
  if options.tokenizer == nil and texts and file and file ~= "bytes" then return m.tokenizer(file) end
  return options.tokenizer
end

-- Whether a list is a conversation, and not of ids.
local function is_chat(prompt) return type(prompt) == "table" and type(prompt[1]) == "table" end

-- The ids of a prompt, of a list of ids a copy.
local function encode(what, prompt, tokenizer, chat)
  if type(prompt) ~= "string" and type(prompt) ~= "table" then
    core.fail(("m.%s's prompt must be a text or a list of token ids, got %s"):format(what, m.shown(prompt)))
  end
  if is_chat(prompt) then
    if not tokenizer then core.fail(("m.%s needs a tokenizer for a conversation, whose chat template writes it"):format(what), { help = "tokenizer = m.tokenizer(path)" }) end
    return (select(2, tokenizer:chat(prompt, chat)))
  end
  if type(prompt) == "string" and tokenizer then return tokenizer:encode(prompt, { special = true }) end
  local ids = {}
  if type(prompt) == "string" then
    for i = 1, #prompt do ids[i] = prompt:byte(i) end
  else
    for i, id in ipairs(prompt) do ids[i] = id end
  end
  return ids
end

local function check_ids(what, ids, vocab)
  for _, id in ipairs(ids) do
    if not math.tointeger(id) or id < 0 or id >= vocab then
      core.fail(("m.%s's prompt has the token %s, and the model has 0 to %d"):format(what, m.shown(id), vocab - 1))
    end
  end
  if #ids == 0 then core.fail(("m.%s needs a prompt of at least one token"):format(what)) end
end

local function check_length(d, i, count)
  if count < d.context then return end
  core.fail(("prompt %d has %d tokens, and the context is %s=%d with the answer"):format(i, count, d.seq.name, d.context), {
    help = "a longer context: seq=N on the command line, or in the script",
  })
end

-- The text of a prompt as it is shown before its continuation; of ids without a tokenizer nothing is shown.
local function shown_prompt(prompt, ids, tokenizer)
  if not tokenizer then return type(prompt) == "string" and prompt or "" end
  local stream, parts = Answer.texts(tokenizer):stream(), {}
  for i, id in ipairs(ids) do parts[i] = stream(id) end
  return table.concat(parts)
end

-- What each answer continues: with inputs the same ids for each.
local function prompts_of(options)
  local prompts = options.prompts or { options.prompt == nil and "\n" or options.prompt }
  for i = 2, options.inputs and #options.inputs or 0 do prompts[i] = options.prompt end
  return prompts
end

-- The elements of the inputs of prompt i.
local function elements_of(specs, inputs, i, tokenizer)
  local one, elements = inputs[1] and inputs[i] or inputs, {}
  if type(one) ~= "table" then core.fail("m.generate's inputs are a table, or a list of tables, got " .. m.shown(one)) end
  for _, spec in ipairs(specs) do
    if one[spec.name] == nil then core.fail(("inputs %d of m.generate have no %q, which the first ones have"):format(i, spec.name)) end
    elements[spec.name] = given.elements(spec, one[spec.name], function(text) return encode("generate", text, tokenizer) end)
  end
  return elements
end

-- The options with `axis`, the axis that grows, as seq.
local function with_axis(model, options)
  if options.axis == nil or core.options().mode == "check" then return options end
  local copy = {}
  for key, value in pairs(options) do copy[key] = value end
  copy.seq, copy.axis = given.axis(model, options.axis), nil
  return copy
end

-- Jobs ---------------------------------------------------------------------------------------------------------------------

-- One sample of one prompt, not begun.
local function new_job(run, p, sample)
  local prompt = run.prompts[p]
  local asked = sampling.with_seed(run.o.asked, run.o.seeds[sample])
  local stops = run.o.stops
  if is_chat(prompt.given) and run.tokenizer.eos then
    stops = { ids = setmetatable({ [run.tokenizer.eos] = true }, { __index = stops.ids }), texts = stops.texts }
  end
  local answer = Answer.new { tokenizer = run.tokenizer, stops = stops, limit = run.o.limit, names = run.o.names, before = prompt.ids, skip_special = is_chat(prompt.given) }
  return { prompt = p, sample = sample, asked = asked, answer = answer, ids = prompt.ids, logprobs = {}, top = asked.logprobs > 0 and {} or nil }
end

-- The last ids of a job that fit where the window slides: a full one is begun again at its half.
local function tail(run, job, all)
  local keep = #job.answer.ids == 0 and run.d.context - 1 or run.d.context // 2
  return table.move(all, math.max(1, #all - math.max(1, keep) + 1), #all, 1, {})
end

-- Open a job's sequence; false where there is no room now.
local function open(run, job, all)
  local ids = all
  if #all >= run.d.context then ids = tail(run, job, all) end
  job.asked.given = run.prompts[job.prompt].given_elements
  job.asked.prompt = #ids - #job.answer.ids -- draws and penalties continue where the window slides
  local first = job.sample > 1 and run.first[job.prompt]
  if first and not first.closed and (run.d:shares() or run.d:gives()) and #job.answer.ids == 0 then
    if not first.ready and run.d:shares() then return false end -- its prompt is being read
    job.sequence = run.d:fork(first, job.asked)
  else
    job.sequence = run.d:open(ids, job.asked)
  end
  if job.sample == 1 then run.first[job.prompt] = job.sequence end
  return job.sequence ~= nil
end

local function result_of(job)
  local sum = 0
  for _, logprob in ipairs(job.logprobs) do sum = sum + logprob end
  return {
    prompt = job.prompt, sample = job.sample, seed = job.asked.seed, ids = job.answer.ids, text = job.answer:text(), finish_reason = job.reason,
    logprob = sum, logprobs = job.logprobs, top = job.top,
  }
end

-- Show the text of a job that is drawn alone, as it comes.
local function show_piece(run, id, text, reason)
  if not run.streams then return end
  core.write((run.tokenizer or id < 256 or run.o.names[id]) and text or " " .. id)
  if reason then core.write "\n" end
end

local function finish_job(run, job, reason)
  job.reason = reason
  if job.sequence then run.d:close(job.sequence) end
  local result = result_of(job)
  run.results[(job.prompt - 1) * run.o.n + job.sample] = result
  if run.on_result then run.on_result(result) end
end

-- A token of a job: false where that was its last.
local function take(run, job, r)
  local s, answer = job.sequence, job.answer
  job.logprobs[#job.logprobs + 1] = r.logprob
  if job.top then job.top[#job.top + 1] = r.top end
  local text, reason = answer:add(r.id, s:full() and not run.slide)
  if run.on_token then
    local event = { prompt = job.prompt, sample = job.sample, id = r.id, text = text, logprob = r.logprob, top = r.top, finish_reason = reason }
    if run.on_token(event) == false and not reason then
      reason = "cancelled"
      answer:finish()
    end
  end
  show_piece(run, r.id, text, reason)
  if reason then
    finish_job(run, job, reason)
    return false
  end
  if s:full() then -- the window slides
    run.d:close(s)
    local all = table.move(job.ids, 1, #job.ids, 1, {})
    open(run, job, table.move(answer.ids, 1, #answer.ids, #all + 1, all))
  end
  return true
end

-- Those of a list that a step serves: prompts are read first, so that steps have many rows.
local function reading(live)
  local list = {}
  for _, job in ipairs(live) do
    if not job.sequence.ready then list[#list + 1] = job end
  end
  return #list > 0 and list or live
end

-- Decode all jobs, as many at once as there are slots.
local function decode(run)
  local waiting, next_job, live, begin = {}, 1, {}, core.time()
  for p = 1, #run.prompts do
    for sample = 1, run.o.n do waiting[#waiting + 1] = new_job(run, p, sample) end
  end
  while next_job <= #waiting or #live > 0 do
    while next_job <= #waiting and open(run, waiting[next_job], waiting[next_job].ids) do
      live[#live + 1], next_job = waiting[next_job], next_job + 1
    end
    local stepped, sequences, left = reading(live), {}, {}
    for i, job in ipairs(stepped) do sequences[i] = job.sequence end
    local results = run.d:step(sequences)
    for i, job in ipairs(stepped) do job.over = results[i] and not take(run, job, results[i]) end
    for _, job in ipairs(live) do
      if not job.over then left[#left + 1] = job end
    end
    live = left
    if core.stopped() then break end
  end
  for i = next_job, #waiting do live[#live + 1] = waiting[i] end
  for _, job in ipairs(live) do
    job.answer:finish()
    finish_job(run, job, "interrupted")
  end
  run.results.seconds = core.time() - begin
end

-- Nothing is drawn: the results of tokens = 0.
local function decode_none(run)
  for p = 1, #run.prompts do
    for sample = 1, run.o.n do finish_job(run, new_job(run, p, sample), "length") end
  end
end

local function show_results(run)
  for _, r in ipairs(run.results) do
    local prompt = run.prompts[r.prompt]
    core.write(shown_prompt(prompt.given, prompt.ids, run.tokenizer) .. r.text .. "\n")
  end
end

-- What m.generate gives: of one prompt without n all its ids, its text and the result; else a list of results.
local function returned(run)
  if not run.o.single then return run.results end
  local all, r = table.move(run.prompts[1].ids, 1, #run.prompts[1].ids, 1, {}), run.results[1]
  return table.move(r.ids, 1, #r.ids, #all + 1, all), r.text, r
end

-- The positions that a sequence needs: a power of two, so that few kernels serve all lengths, or the whole context.
local function context_for(run, most)
  local needed, context = 0, 64
  for _, prompt in ipairs(run.prompts) do needed = math.max(needed, #prompt.ids + run.o.limit) end
  while context < needed and context < most do context = 2 * context end
  return math.min(context, most)
end

---Continue prompts by up to `tokens` tokens each. A prompt is a text (of the tokens of `tokenizer`, by default that of m.train, else of
---bytes), a list of token ids, or a conversation: a list of {role, content}, which the tokenizer's chat template writes (`chat`: variables for it).
---Tokens are drawn at `temperature` (0: always the likeliest) from the `top_k` likeliest, from the likeliest that together have the
---probability `top_p`, and from those with at least `min_p` times the probability of the likeliest; `repetition_penalty`, `presence_penalty` and
---`frequency_penalty` make tokens less likely that were there (sampling.lua says how). `logits` is a function that is traced: it gets
---logits over the batch and the vocabulary and returns others. `stop`: token ids and texts that end an answer; texts are left out of it. `n`: samples of
---each prompt; `seed`: of the first one, the next have the next numbers, or a list. What is drawn does not depend on the other prompts.
---`on_token(event)` gets each token: {prompt, sample, id, text = what may be shown, logprob, top, finish_reason}; false ends that answer; `on_result` gets each result once it is over. At most
---`rows` (16) are decoded at once. `inputs`: what the model reads beside the tokens that grow along `axis` (default `seq`), such as what an encoder reads:
---texts, ids or numbers by name, or a list of such tables, each for an answer of its own, which begins with the ids `prompt`. Each is computed once. `names`: texts of ids that the tokenizer has not.
---`weights` = "int8" or "fp8" (E4M3): products read their weights in 8 bits with a scale for each output. `decoder` is one of decode.lua, which is used again: programs are compiled once for many calls.
---With `prompt` alone it prints text as it is sampled unless `quiet`, and returns all token ids, the text of the answer, and the
---result; a window that is full is begun again at its half unless `slide` is false. With `prompts` or `n` it prints texts
---once all are over, and returns the results, sample after sample of prompt after prompt: {prompt, sample, seed, ids, text, finish_reason = "stop",
---"length" (`tokens` are drawn, or the context `seq` is full), "cancelled" or "interrupted", logprobs = each token's by the model alone, logprob = their
---sum, top = with `logprobs` the so many likeliest of each place: {{id, logprob}...}}; their field `seconds`: how long that took, compiling apart.
---@param model Module
---@param options {prompt: string|integer[]|table[], prompts: table[], tokens: integer, seq: Axis, axis: Axis|string, inputs: table, names: table, temperature: number, top_k: integer, top_p: number, min_p: number, repetition_penalty: number, presence_penalty: number, frequency_penalty: number, stop: any, n: integer, seed: integer|integer[], logprobs: integer, logits: function, on_token: function, on_result: function, decoder: table, tokenizer: Tokenizer, chat: table, rows: integer, slide: boolean, increment: boolean, weights: string, quiet: boolean}
---@return integer[]|table[] ids
---@return string? text
---@return table? result
function m.generate(model, options)
  m.check_options("generate", options or {}, KNOWN)
  options = with_axis(model, options or {})
  if not check_model("generate", model, options) then return {}, options.prompts == nil and options.n == nil and "" or nil end
  local o = read_options(options)
  local prompts, specs = prompts_of(options), options.inputs and given.specs(model, options.inputs[1] or options.inputs) or nil
  local texts = specs ~= nil
  for _, prompt in ipairs(prompts) do texts = texts or type(prompt) == "string" or is_chat(prompt) end
  local tokenizer = tokenizer_for(model, options, texts)
  local run = {
    o = o, tokenizer = tokenizer, on_token = options.on_token, on_result = options.on_result, prompts = {}, results = {}, first = {}, slide = o.single and options.slide ~= false and not specs,
    streams = o.single and not options.quiet,
  }
  for i, prompt in ipairs(prompts) do
    run.prompts[i] = { given = prompt, ids = encode("generate", prompt, tokenizer, options.chat), given_elements = specs and elements_of(specs, options.inputs, i, tokenizer) }
  end
  local invariant = core.options().batch_invariant -- programs do not depend on the prompts
  local slots = invariant and o.rows or math.min(o.rows, #prompts * o.n)
  run.d = options.decoder or Decoder.new(model, {
    seq = options.seq, slots = slots, logits = options.logits, increment = options.increment, weights = options.weights, given = specs, context = not invariant and context_for(run, options.seq.size) or nil,
    chunk = core.device().name == "cuda" and 8192 or nil, -- no text has begun, so none waits
  })
  local longest = 1
  for _, prompt in ipairs(run.prompts) do longest = math.max(longest, #prompt.ids) end
  run.d:prepare({ o.asked }, slots, longest > 1 and o.n == 1 and longest or nil) -- samples share what one read
  for i, prompt in ipairs(run.prompts) do
    check_ids("generate", prompt.ids, run.d.vocab)
    if not run.slide or run.d.context < 2 then check_length(run.d, i, #prompt.ids) end
  end
  if run.streams then core.write(shown_prompt(prompts[1], run.prompts[1].ids, tokenizer)) end
  if o.limit > 0 then decode(run) else decode_none(run) end
  if run.streams and #run.results[1].ids == 0 then core.write "\n" end
  if not run.streams and not options.quiet then show_results(run) end
  return returned(run)
end

-- Scores -------------------------------------------------------------------------------------------------------------------

-- The ids of a sequence to score, and how many of them are only read.
local function scored(sequence, tokenizer, vocab)
  local read, ids = 1, nil
  if type(sequence) == "table" and (sequence.prompt ~= nil or sequence.text ~= nil) then
    ids = encode("score", sequence.prompt, tokenizer)
    read = #ids
    local text = type(sequence.text) == "string" and tokenizer and tokenizer:encode(sequence.text) or encode("score", sequence.text, nil)
    table.move(text, 1, #text, read + 1, ids)
  else
    ids = encode("score", sequence, tokenizer)
  end
  check_ids("score", ids, vocab)
  return ids, read
end

---Log probabilities of texts by a model, without drawing: for evaluation. A sequence is a text, a list of token ids, or {prompt =, text =}, of
---which the text alone counts. Gives for each {logprob = the sum, logprobs = each token's given those before it (of a text or list from the second on),
---count, greedy = whether each was the likeliest, ids, top = with `top` the so many likeliest of each place}.
---@param model Module
---@param sequences (string|integer[]|{prompt: string|integer[], text: string|integer[]})[]
---With `weights` = "int8" or "fp8" products read their weights in 8 bits, as in m.generate.
---@param options {seq: Axis, tokenizer: Tokenizer, top: integer, rows: integer, increment: boolean, weights: string}
---@return {logprob: number, logprobs: number[], count: integer, greedy: boolean, ids: integer[], top: table[]?}[]
function m.score(model, sequences, options)
  m.check_options("score", options or {}, { "seq", "tokenizer", "top", "rows", "increment", "weights" })
  options = options or {}
  if not check_model("score", model, options) then return {} end
  if type(sequences) ~= "table" then core.fail("m.score takes a list of texts or of lists of ids, got " .. m.shown(sequences)) end
  local top, rows = options.top == nil and 0 or options.top, options.rows == nil and ROWS or options.rows
  for name, value in pairs { top = top, rows = rows } do
    if type(value) ~= "number" or not math.tointeger(value) or value < (name == "rows" and 1 or 0) or (name == "top" and value > 20) then
      core.fail(("m.score's %s must be %s, got %s"):format(name, name == "top" and "an integer from 0 to 20" or "a positive integer", m.shown(value)))
    end
  end
  if #sequences == 0 then return {} end
  local d = Decoder.new(model, { seq = options.seq, slots = math.min(rows, #sequences), increment = options.increment, weights = options.weights })
  local tokenizer = tokenizer_for(model, options, true)
  d:prepare_score(top)
  local lists, reads, results = {}, {}, {}
  for i, sequence in ipairs(sequences) do lists[i], reads[i] = scored(sequence, tokenizer, d.vocab) end
  for i, s in ipairs(d:score(lists, top)) do
    local r = { ids = lists[i], logprob = 0, logprobs = {}, count = #lists[i] - reads[i], greedy = true, top = s.top and {} }
    for j = reads[i], #s.logprobs do
      r.logprobs[#r.logprobs + 1], r.logprob = s.logprobs[j], r.logprob + s.logprobs[j]
      r.greedy = r.greedy and s.greedy[j]
      if r.top then r.top[#r.top + 1] = s.top[j] end
    end
    results[i] = r
  end
  return results
end
