-- mlua serve: requests to texts. The HTTP server (vm/serve) gives events; the scheduler below puts the texts that they ask for into the slots of
-- one decoder, where each step adds a token to all of them: a text joins at any step and leaves when it is over (continuous batching), and
-- prompts are read in chunks beside the others. All ranks run the same scheduler on the events of rank 0, which alone has the HTTP server.
local core = require "mlua.core"
local m = require "mlua"
local Answer = require "mlua.answer"
local Metrics = require "mlua.serve_metrics"
local api = require "mlua.serve_api"
local from = require "mlua.from"
local given = require "mlua.given"
local prepared = require "mlua.serve_decoder"
local text_files = require "mlua.text_files"
local tokenizer_files = require "mlua.tokenizer_files"

local BODY, WAITING_BYTES, CONNECTIONS, IDLE = 8 << 20, 256 << 20, 512, 75 -- bytes of one request, of all that wait; open connections; seconds
local POLL, LAST_BYTES = 0.2, 5 -- seconds: between looks at signals while nothing runs, for clients to take what was answered at the end
local INTERNAL = "the server failed on this request, and its log says why"
local FAILURES = 3 -- steps in a row that fail before the server ends
local PATHS = { "/v1/completions", "/v1/chat/completions" }

local Server = {}
Server.__index = Server

-- The model as requests see it ---------------------------------------------------------------------------------------------

-- The ids that end a text, by the folder's files and the tokenizer.
local function ends_of(tokenizer, how)
  local ids, source = {}, from.source()
  local function add(value)
    for _, id in ipairs(type(value) == "table" and value or { value }) do
      if type(id) == "number" and math.tointeger(id) then ids[#ids + 1] = math.tointeger(id) end
    end
  end
  add(tokenizer.eos)
  add(how and how.stop)
  if source and source.kind == "hf" then
    add(source.config.eos_token_id)
    local text = text_files.read(source.path .. "/generation_config.json")
    local generation = text and core.json(text)
    add(type(generation) == "table" and generation.eos_token_id or nil)
  end
  return ids
end

-- What a model that reads its prompt as an input (m.train's `generate`) is given: {begin = the ids that answers begin with, size = the most
-- tokens of a prompt, elements = fn(ids): what the decoder is given}.
local function input_of(decoder, how)
  local spec, size = decoder.given[1], 1
  for _, axis in ipairs(spec.axes) do size = size * axis.size end
  return { begin = how.prompt, size = size, elements = function(ids) return { [spec.name] = given.elements(spec, ids) } end }
end

local function describe(decoder, how)
  local options = core.options()
  local file = tokenizer_files.of_weights()
  local tokenizer = m.tokenizer(file or "bytes")
  local names = how and how.names
  local function encode(text) return tokenizer:encode(text, { special = true }) end
  return {
    name = (options.from:gsub("/+$", ""):match "[^/]+$") or options.from, context = decoder.context, vocab = decoder.vocab, eos = ends_of(tokenizer, how),
    tokenizer = tokenizer, names = names, texts = Answer.texts(tokenizer, names), input = how and input_of(decoder, how),
    encode = how and how.encode and function(text) return how.encode(text, encode) end or encode,
    chat = function(messages, variables)
      variables.prompt, variables.template = nil, nil
      local ok, text, ids = pcall(tokenizer.chat, tokenizer, messages, variables)
      if ok then return ids end
      return nil, (tostring(text):match "[^\n]*":gsub("^mlua: ", ""))
    end,
  }
end

-- Requests -----------------------------------------------------------------------------------------------------------------

function Server:send(method, ...)
  if self.http then self.http[method](self.http, ...) end
end

function Server:count(status) self.metrics:add("mlua_requests_total", 1, ('status="%d"'):format(status)) end

function Server:refuse(id, status, message, param, code)
  self:count(status)
  self:send("refuse", id, status, message, param, code)
end

local function without(list, job)
  local rest = {}
  for _, one in ipairs(list) do
    if one.job ~= job then rest[#rest + 1] = one end
  end
  return rest
end

-- A request is over: its sequences and places are free.
function Server:forget(job)
  self.jobs[job.id] = nil
  for _, choice in ipairs(job.choices) do
    if choice.sequence then self.decoder:close(choice.sequence) end
  end
  self.running, self.waiting, self.scoring = without(self.running, job), without(self.waiting, job), without(self.scoring, job)
end

-- End a request that cannot be answered.
function Server:fail(job, status, message, code)
  self:forget(job)
  if not job.begun then return self:refuse(job.id, status, message, nil, code) end
  self:count(status)
  self:send("chunk", job.id, api.failure(message, code))
  self:send("finish", job.id)
end

-- Call a method for a request; where that raises, this request alone is refused. A signal ends the server.
function Server:guarded(job, method, ...)
  local ok, problem = pcall(self[method], self, ...)
  if ok then return end
  if core.stopped() then error(problem, 0) end
  core.write_error("mlua serve: " .. tostring(problem) .. "\n")
  local known = self.jobs[job.id]
  if known then
    self:fail(known, 500, INTERNAL, "internal_error")
  elseif not job.choices then -- an event, which became no request
    self:refuse(job.id, 500, INTERNAL, nil, "internal_error")
  end
end

-- A token as log probabilities show it, at the place `offset` (characters) of the text.
function Server:entry(choice, id, logprob, top)
  local text = self.model.texts.decode { id }
  local entry = { text = text, logprob = logprob, offset = choice.offset }
  choice.offset = choice.offset + (utf8.len(text) or #text)
  if top then
    entry.top = {}
    for i, other in ipairs(top) do entry.top[i] = { text = self.model.texts.decode { other.id }, logprob = other.logprob } end
  end
  return entry
end

local function new_choice(self, job, prompt, sample)
  local asked = {}
  for name, value in pairs(job.asked) do asked[name] = value end
  asked.given = prompt.given
  asked.seed = (job.seeded and job.asked.seed or job.seed) + sample
  local answer = Answer.new { tokenizer = self.model.tokenizer, names = self.model.names, skip_special = true, stops = job.stops, limit = job.max_tokens, before = prompt.ids }
  return { job = job, prompt = prompt, asked = asked, answer = answer, offset = 0, entries = {}, held = {}, index = #job.choices, first = true }
end

function Server:accept(event)
  local job, problem = api.read(event.path, event.body, self.model)
  if not job then return self:refuse(event.id, problem.status, problem.message, problem.param, problem.code) end
  if #self.waiting + #self.scoring >= self.queue then
    return self:refuse(event.id, 429, ("%d texts wait already: try again later"):format(#self.waiting + #self.scoring), nil, "queue_full")
  end
  self.serial = self.serial + 1
  local hash = core.hash(("%.9f request %d"):format(self.now, self.serial))
  job.id, job.choices, job.left, job.arrived = event.id, {}, 0, self.now
  job.seed, job.name = hash & 0x3fffffff, ("%s-%016x"):format(job.chat and "chatcmpl" or "cmpl", hash)
  job.model, job.created, job.counts = self.model.name, self.epoch, { prompt = 0, answer = 0 }
  self.jobs[job.id] = job
  for _, prompt in ipairs(job.prompts) do
    job.counts.prompt = job.counts.prompt + prompt.count
    prompt.job = job
    prompt.choices = {}
    for sample = 0, job.n - 1 do
      local choice = new_choice(self, job, prompt, sample)
      job.choices[#job.choices + 1], prompt.choices[sample + 1] = choice, choice
    end
  end
  job.left = #job.choices
  self.metrics:add("mlua_prompt_tokens_total", job.counts.prompt)
  for _, prompt in ipairs(job.prompts) do
    if job.echo and job.logprobs and #prompt.ids > 1 then self.scoring[#self.scoring + 1] = prompt else self:begin(prompt) end
  end
end

-- Its prompt is scored where that was asked for: the texts of a prompt begin with its echo, and wait for slots.
function Server:begin(prompt)
  local job = prompt.job
  for _, choice in ipairs(prompt.choices) do
    if job.echo then self:echo(choice) end
    if job.max_tokens == 0 or #prompt.ids >= self.model.context then
      self:deliver(choice, "", "length")
    else
      self.waiting[#self.waiting + 1] = choice
    end
  end
end

function Server:echo(choice)
  local job, prompt = choice.job, choice.prompt
  choice.echo = prompt.text or self.model.texts.decode(prompt.ids)
  if job.logprobs then
    local scores = prompt.scores
    for i, id in ipairs(prompt.ids) do
      local logprob, top = scores and scores.logprobs[i - 1], scores and scores.top and scores.top[i - 1]
      choice.entries[i] = self:entry(choice, id, logprob or nil, top or nil)
    end
    table.move(choice.entries, 1, #choice.entries, 1, choice.held)
  end
  if job.stream then self:deliver(choice, choice.echo) end
end

-- A piece of a choice's text, and why it ends (nil: it does not).
function Server:deliver(choice, text, reason)
  local job = choice.job
  if job.stream and (text ~= "" or reason) then
    self:send("chunk", job.id, api.piece(job, choice.index, { text = text, entries = choice.held, first = choice.first, reason = reason }))
    job.begun, choice.first, choice.held = true, false, {}
  end
  if not reason then return end
  choice.reason = reason
  choice.text = (choice.echo or "") .. choice.answer:text()
  job.counts.answer = job.counts.answer + #choice.answer.ids
  job.left = job.left - 1
  if job.left == 0 then self:complete(job) end
end

function Server:complete(job)
  self:forget(job)
  self:count(200)
  self.metrics:observe("mlua_request_seconds", self.now - job.arrived)
  if job.stream then
    self:send("chunk", job.id, api.last(job, job.counts))
    self:send("finish", job.id)
  else
    self:send("reply", job.id, 200, "application/json", api.answer(job, job.choices, job.counts))
  end
end

-- Events -------------------------------------------------------------------------------------------------------------------

-- The events of rank 0 and its time, on every rank.
function Server:poll(seconds)
  local events = self.http and self.http:poll(seconds) or {}
  self.now, self.epoch = core.time(), os.time()
  if core.options().ranks == 1 then return events end
  local shared
  if self.http then
    local list = core.list {}
    for _, event in ipairs(events) do
      local ok = pcall(core.to_json, event)
      if ok then list[#list + 1] = event else self:refuse(event.id, 400, "the body is nested too deeply", nil, "invalid_json") end
    end
    shared = core.to_json { events = list, now = self.now, epoch = self.epoch }
  end
  local all = core.json(core.share(shared), "what rank 0 sends")
  self.now, self.epoch = all.now, all.epoch
  return all.events
end

function Server:receive(seconds)
  for _, event in ipairs(self:poll(seconds)) do
    local job = self.jobs[event.id]
    if event.left then
      if job then
        self:forget(job)
        self:count(499)
      end
    elseif event.path == "/metrics" then
      self:send("reply", event.id, 200, "text/plain; version=0.0.4", self:metrics_text())
    elseif self.ending then
      self:refuse(event.id, 503, "the server is shutting down", nil, "shutting_down")
    else
      self:guarded(event, "accept", event)
    end
  end
end

function Server:metrics_text()
  local use, metrics = self.decoder:use(), self.metrics
  metrics:set("mlua_texts_running", #self.running)
  metrics:set("mlua_texts_waiting", #self.waiting + #self.scoring)
  metrics:set("mlua_slots", use.slots_max)
  metrics:set("mlua_cache_blocks_used", use.blocks)
  metrics:set("mlua_cache_blocks", use.blocks_max)
  return metrics:text()
end

function Server:expire()
  for _, job in pairs(self.jobs) do
    if self.now - job.arrived > self.seconds then
      self:fail(job, 504, ("the request took more than %d seconds"):format(self.seconds), "timeout")
    end
  end
end

-- Steps --------------------------------------------------------------------------------------------------------------------

-- The prompts that are echoed with their log probabilities, as many as there are slots.
function Server:score()
  local batch, lists, top = {}, {}, 0
  while #self.scoring > 0 and #batch < self.decoder.slots do
    local prompt = table.remove(self.scoring, 1)
    batch[#batch + 1], lists[#lists + 1], top = prompt, prompt.ids, math.max(top, prompt.job.logprobs)
  end
  if #batch == 0 then return end
  local ok, scores = pcall(self.decoder.score, self.decoder, lists, top)
  if not ok then return self:step_failed(batch, scores) end
  self.failures = 0
  for i, prompt in ipairs(batch) do
    for j, list in ipairs(scores[i].top or {}) do scores[i].top[j] = table.move(list, 1, prompt.job.logprobs, 1, {}) end
    prompt.scores = scores[i]
    self:guarded(prompt.job, "begin", prompt)
  end
end

-- A sequence of the decoder for a choice; nil and why not now.
function Server:open(choice)
  local asked, sibling = choice.asked, choice.prompt.sequence
  local ids = choice.prompt.ids
  if #choice.answer.ids > 0 then -- it gave its place to another one
    ids = table.move(choice.answer.ids, 1, #choice.answer.ids, #ids + 1, table.move(ids, 1, #ids, 1, {}))
    asked = setmetatable({ prompt = #choice.prompt.ids }, { __index = asked })
  elseif sibling and not sibling.closed then
    return self.decoder:fork(sibling, asked)
  end
  return self.decoder:open(ids, asked)
end

function Server:admit()
  while #self.waiting > 0 do
    local choice = self.waiting[1]
    local sequence, why = self:open(choice)
    if not sequence and #self.running == 0 then
      self:fail(choice.job, 400, "the cache has not enough " .. why .. " for this prompt", "context_length_exceeded")
    elseif not sequence then
      return
    else
      table.remove(self.waiting, 1)
      choice.sequence, choice.prompt.sequence = sequence, sequence
      self.running[#self.running + 1] = choice
    end
  end
end

-- Where the next step may need more blocks than are free, the youngest texts give theirs up; they are read again later.
function Server:make_room()
  while #self.running > 1 do
    local use = self.decoder:use()
    if use.blocks_max == 0 or use.blocks_max - use.blocks >= #self.running then return end
    self:write_texts() -- which may end texts
    local choice = table.remove(self.running)
    if not choice then return end
    self.decoder:close(choice.sequence)
    choice.sequence = nil
    table.insert(self.waiting, 1, choice)
    self.metrics:add("mlua_preemptions_total")
  end
end

-- A step raised an error: its requests are refused. A signal, or a device that fails each time, ends the server.
function Server:step_failed(choices, problem)
  self.failures = self.failures + 1
  if core.stopped() or self.failures >= FAILURES then error(problem, 0) end
  core.write_error("mlua serve: " .. tostring(problem) .. "\n")
  for _, choice in ipairs(choices) do
    if self.jobs[choice.job.id] then self:fail(choice.job, 500, INTERNAL, "internal_error") end
  end
end

-- A token of a choice became known: where that must be its last, its place is free at once. Its text is made while the device works on the next
-- step (write_text): a text that ends the answer is found then, and what the step adds to it counts no more.
function Server:token(choice, result)
  local answer = choice.answer
  choice.unwritten, self.unwritten[#self.unwritten + 1] = result, choice
  if answer.stops.ids[result.id] or #answer.ids + 1 >= answer.limit or choice.sequence:full() then self:leave(choice) end
end

-- A choice needs no place any more.
function Server:leave(choice)
  self.decoder:close(choice.sequence)
  for i, one in ipairs(self.running) do
    if one == choice then return table.remove(self.running, i) end
  end
end

-- The text of a choice's token that has none yet.
function Server:write_text(choice)
  local job, result = choice.job, choice.unwritten
  choice.unwritten = nil
  if self.jobs[job.id] ~= job or choice.reason then return end
  if not job.first_token then
    job.first_token = true
    self.metrics:observe("mlua_first_token_seconds", self.now - job.arrived)
  end
  self.metrics:add("mlua_generated_tokens_total")
  local text, reason = choice.answer:add(result.id, choice.sequence:full())
  if job.logprobs and not choice.answer.stops.ids[result.id] then
    local entry = self:entry(choice, result.id, result.logprob, result.top)
    choice.entries[#choice.entries + 1], choice.held[#choice.held + 1] = entry, entry
  end
  if reason and not choice.sequence.closed then self:leave(choice) end
  self:deliver(choice, text, reason)
end

function Server:write_texts()
  local list = self.unwritten
  self.unwritten = {}
  for _, choice in ipairs(list) do self:guarded(choice.job, "write_text", choice) end
end

function Server:step()
  self:make_room()
  local choices = table.move(self.running, 1, #self.running, 1, {})
  if #choices == 0 then return self:write_texts() end
  local list = {}
  for i, choice in ipairs(choices) do list[i] = choice.sequence end
  local ok, results = pcall(self.decoder.start, self.decoder, list)
  if ok then
    self:receive(0) -- while the device works
    self:write_texts()
    ok, results = pcall(self.decoder.finish, self.decoder)
  end
  if not ok then return self:step_failed(choices, results) end
  self.failures = 0
  self.metrics:add("mlua_steps_total")
  for i, choice in ipairs(choices) do
    if results[i] and not choice.sequence.closed then self:token(choice, results[i]) end
  end
end

-- Beginning and end --------------------------------------------------------------------------------------------------------

local function token_of(path)
  if not path then return nil end
  local text = text_files.read(path)
  local token = text and text:match "^%s*(%S+)%s*$"
  if not token then core.fail(("--token-file %s: %s"):format(path, text and "a token is one word" or "the file cannot be read")) end
  return token
end

local function listen(options)
  local http = core.http_server {
    host = options.host or "127.0.0.1", port = options.port, token = token_of(options.token_file), body = BODY, waiting = WAITING_BYTES,
    connections = CONNECTIONS, idle = IDLE,
  }
  http:page("/health", 503, "application/json", '{"status":"loading"}', true)
  return http
end

function Server:open_paths()
  local list, one = api.models(self.model, os.time())
  for _, path in ipairs(PATHS) do self:send("route", "POST", path) end
  self:send("route", "GET", "/metrics")
  self:send("page", "/v1/models", 200, "application/json", list)
  self:send("page", "/v1/models/" .. self.model.name, 200, "application/json", one)
  self:send("page", "/health", 200, "application/json", '{"status":"ok"}', true)
end

-- No more requests: what waits is refused, what has begun is finished.
function Server:begin_end()
  self.ending = true
  self:send("page", "/health", 503, "application/json", '{"status":"shutting down"}', true)
  self:send("drain")
  for _, job in pairs(self.jobs) do
    local begun = false
    for _, choice in ipairs(job.choices) do begun = begun or choice.sequence or choice.reason end
    if not begun then self:fail(job, 503, "the server is shutting down", "shutting_down") end
  end
end

function Server:run()
  while true do
    local busy = next(self.jobs) ~= nil
    self:receive(busy and 0 or POLL)
    if core.stopped() and not self.ending then self:begin_end() end
    if self.ending and next(self.jobs) == nil then break end
    self:expire()
    self:score()
    self:admit()
    self:step()
  end
  local last = core.time()
  while self.http and self.http:sending() and core.time() - last < LAST_BYTES do self.http:poll(0.02) end
  self:send "stop"
end

---Serve a model until a signal ends that.
---@param model Module
---@param seq Axis positions
local function serve(model, seq)
  local options, how = core.options(), given.declared[model]
  local http = options.rank == 0 and listen(options) or nil
  local decoder = prepared(model, seq)
  local self = setmetatable({
    http = http, decoder = decoder, model = describe(decoder, how), metrics = Metrics.new(), queue = options.queue, seconds = options.seconds, jobs = {},
    running = {}, unwritten = {}, waiting = {}, scoring = {}, serial = 0, failures = 0, now = core.time(), epoch = os.time(),
  }, Server)
  self:open_paths()
  if http then
    local host = options.host or "127.0.0.1"
    core.write(("serving %s at http://%s:%d (context %d, %d texts at once)\n"):format(
      self.model.name, host:find ":" and "[" .. host .. "]" or host, http:port(), decoder.context, decoder.slots))
  end
  self:run()
end

return serve
