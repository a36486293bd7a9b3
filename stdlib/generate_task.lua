-- What `mlua generate` does with the model of a script: a prompt continued, a conversation, a file of prompts.
local Decoder = require "mlua.decode"
local core = require "mlua.core"
local given = require "mlua.given"
local kept = require "mlua.kept"
local m = require "mlua"
local text_files = require "mlua.text_files"
local tokenizer_files = require "mlua.tokenizer_files"

-- m.generate's options, as far as the command line gives them.
local function asked(options, seq, tokenizer)
  local o = {
    seq = seq, tokens = options.tokens, temperature = options.temperature, tokenizer = tokenizer, quiet = true, slide = false, seed = options.draw_seed,
    weights = options.weights, logprobs = options.logprobs > 0 and options.logprobs or nil, rows = options.rows > 0 and options.rows or nil, stop = table.move(options.stops, 1, #options.stops, 1, {}),
  }
  for _, name in ipairs { "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty" } do
    if options[name] > 0 then o[name] = options[name] end
  end
  return o
end

local function finite(x) return x > -math.huge and x or core.null end

-- An answer as a line of JSON; `extra` is what the prompt's own line has beside.
local function line_of(r, extra, options)
  local line = { text = r.text, ids = core.list(r.ids), finish_reason = r.finish_reason, logprob = finite(r.logprob), index = r.prompt - 1, sample = r.sample - 1, seed = r.seed }
  for key, value in pairs(extra) do
    if line[key] == nil then line[key] = value end
  end
  if options.logprobs > 0 then
    line.logprobs, line.top = {}, {}
    for i, logprob in ipairs(r.logprobs) do
      line.logprobs[i], line.top[i] = finite(logprob), {}
      for j, e in ipairs(r.top[i]) do line.top[i][j] = { id = e.id, logprob = finite(e.logprob) } end
    end
  end
  return (core.to_json(line):gsub("%s*$", "")) .. "\n"
end

-- Write answers in the order of their prompts, each as soon as those before it are written.
local function writer(extras, options, n)
  local done, next_one = {}, 1
  local put = options.json and core.write_json or core.write
  return function(r)
    done[(r.prompt - 1) * n + r.sample] = r
    while done[next_one] do
      put(line_of(done[next_one], extras[done[next_one].prompt], options))
      done[next_one], next_one = false, next_one + 1
    end
  end
end

-- The prompts of a file and what its lines have beside them: lines of text, or JSON objects with prompt, ids or messages.
local function read_prompts(path)
  local text = text_files.read(path)
  if not text then core.fail(("--prompts %s cannot be read"):format(path)) end
  local prompts, extras, number = {}, {}, 0
  for line in (text:gsub("\r\n", "\n") .. "\n"):gmatch "(.-)\n" do
    number = number + 1
    if path:find "%.jsonl$" then
      if line:find "%S" then
        local where = ("%s:%d"):format(path, number)
        local value = core.json(line, where)
        local prompt = type(value) == "string" and value or type(value) == "table" and (value.prompt or value.ids or value.messages)
        if type(prompt) ~= "string" and type(prompt) ~= "table" then core.fail(where .. ": a prompt is a text, or an object with prompt, ids or messages") end
        prompts[#prompts + 1], extras[#prompts + 1] = prompt, type(value) == "table" and value or { prompt = value }
        extras[#prompts].ids = nil
      end
    elseif line ~= "" then
      prompts[#prompts + 1], extras[#prompts + 1] = line, { prompt = line }
    end
  end
  if #prompts == 0 then core.fail(("--prompts %s has no prompts"):format(path)) end
  return prompts, extras
end

local function with_system(options, message)
  local list = {}
  if options.system then list[1] = { role = "system", content = options.system } end
  list[#list + 1] = message
  return list
end

-- Prompts, texts or ids, as inputs of a model that reads them beside what it continues.
local function as_inputs(o, how, prompts)
  local function of_text(text) return o.tokenizer and o.tokenizer:encode(text, { special = true }) or { text:byte(1, -1) } end
  o.prompts, o.prompt, o.inputs, o.names = nil, how.prompt, {}, how.names
  for i, prompt in ipairs(prompts) do
    if type(prompt) == "string" and how.encode then prompt = how.encode(prompt, of_text) end
    o.inputs[i] = { [how.input] = prompt }
  end
  return o
end

-- As many prompts as there are, as lines of JSON.
local function write_lines(model, o, options, prompts, extras)
  if options.chat then
    for i, prompt in ipairs(prompts) do
      if type(prompt) == "string" then prompts[i] = with_system(options, { role = "user", content = prompt }) end
    end
  end
  o.prompts, o.n = prompts, math.max(1, options.samples)
  if given.declared[model] then as_inputs(o, given.declared[model], prompts) end
  if options.rank == 0 then o.on_result = writer(extras, options, o.n) end
  local results, tokens = m.generate(model, o), 0
  if options.rank > 0 or options.quiet or #results < 2 or not results.seconds then return end
  for _, r in ipairs(results) do tokens = tokens + #r.ids end
  core.write_error(("%d answers, %d tokens in %.2f s: %.0f tokens/s\n"):format(#results, tokens, results.seconds, tokens / results.seconds))
end

local function show_event(tokenizer)
  return function(e) core.write((tokenizer or e.id < 256) and e.text or " " .. e.id) end
end

-- A conversation by lines of standard input.
local function converse(model, o, options)
  local messages, prompts = with_system(options, nil), core.terminal() and not options.quiet
  o.decoder = Decoder.new(model, { seq = o.seq, weights = o.weights })
  while not core.stopped() do
    if prompts and options.rank == 0 then core.write_error "> " end
    local line = options.rank == 0 and (io.read "L" or "") or ""
    line = core.share(line) or line
    if line == "" then break end
    messages[#messages + 1] = { role = "user", content = (line:gsub("\n$", "")) }
    o.prompts, o.on_token = { messages }, options.rank == 0 and not options.json and show_event(o.tokenizer) or nil
    local r = m.generate(model, o)[1]
    if r == nil then break end
    messages[#messages + 1] = { role = "assistant", content = r.text }
    if options.rank == 0 and options.json then core.write_json(line_of(r, { prompt = messages[#messages - 1].content }, options)) end
    if options.rank == 0 and not options.json then core.write "\n" end
  end
end

-- One prompt, whose text is shown as it is drawn.
local function continue(model, o, options, ids)
  local prompt = ids or options.prompt or "\n"
  local first = options.rank == 0
  if options.chat then prompt = with_system(options, { role = "user", content = prompt }) end
  local shows = first and not options.json and not ids
  if options.chat then
    o.prompts, o.on_token = { prompt }, shows and show_event(o.tokenizer) or nil
    m.generate(model, o)
    if shows then core.write "\n" end
    return
  end
  o.prompt, o.quiet = prompt, not shows
  if given.declared[model] then
    as_inputs(o, given.declared[model], { prompt })
    o.inputs = o.inputs[1]
  end
  local all = m.generate(model, o)
  if not first or shows then return end
  local list = "[" .. table.concat(all, ", ") .. "]\n"
  if options.json then core.write_json(list) else core.write(list) end
end

---@param model Module
---@param seq Axis
---@param ids? integer[] of --ids
return function(model, seq, ids)
  local options, tokenizer = core.options(), nil
  if not ids then
    local file = tokenizer_files.of_weights()
    tokenizer = file and m.tokenizer(file)
    local lines = options.json or options.prompts or options.samples > 1 or options.logprobs > 0
    if not tokenizer and (lines or options.chat) then tokenizer = m.tokenizer "bytes" end -- whole characters
  end
  local how = given.declared[model]
  kept.require_prompt(model, seq)
  if how and options.chat then core.fail "--chat is of models that continue their prompt, and this one reads it as an input" end
  local o = asked(options, how and how.axis or seq, tokenizer)
  for _, id in ipairs(how and how.stop or {}) do o.stop[#o.stop + 1] = id end
  for _, id in ipairs(not ids and tokenizer_files.stops_of_weights(tokenizer) or {}) do o.stop[#o.stop + 1] = id end
  if options.score then
    require "mlua.score_task"(model, seq, tokenizer)
  elseif options.prompts then
    write_lines(model, o, options, read_prompts(options.prompts))
  elseif options.chat and not options.prompt then
    converse(model, o, options)
  elseif options.samples > 1 or options.json and not ids or options.logprobs > 0 then
    local prompt = ids or options.prompt or "\n"
    write_lines(model, o, options, { prompt }, { { prompt = not ids and prompt or nil } })
  else
    continue(model, o, options, ids)
  end
end
