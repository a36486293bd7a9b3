-- Decoding: sequences that a model continues token by token. m.generate, m.score and the server use a decoder; it knows nothing of texts.
--
--   local Decoder = require "mlua.decode"
--   local d = Decoder.new(model, { seq = A.seq, slots = 8 })
--   local s, why = d:open({ 3, 1, 4 }, { temperature = 0 })   -- a sequence; nil and "slots" or "blocks" where there is no room now
--   while not s:full() do
--     local r = d:step({ s })[1]          -- {id=, logprob=, top=}: the token was added to s.ids; false while the prompt is being read
--     if r and r.id == 0 then break end   -- who calls decides when a sequence is over
--   end
--   d:close(s)                            -- its slot and its blocks are free
--
-- Fields of a decoder: `context` (the most tokens of a sequence, prompt and answer together), `slots` (the most open sequences), `vocab` (after
-- d:prepare or the first d:open), `chunk` (the most tokens of prompts that a step reads), `increment` (false: each step runs the whole program
-- over the window: the oracle that increments are compared with, and what runs where a model has none).
-- `invariant` (--batch-invariant): what is computed of a sequence is the same to the bit whatever else is decoded. Steps are always the program of
-- all slots, prompts are read one at a time and share no blocks, and a sequence that gave its place to another one gets its answer again by steps.
-- `weights`: the dtype in which weights of products are held, by the option weights = "int8" or "fp8" (runtime/ops/quantize/weights.h); nil: as they are.
-- Fields of a sequence: `ids` (prompt, then answer; not to be written), `prompt` (how many of them are the prompt's), `ready` (the prompt is
-- read: each further step gives a token), `asked` (temperature, ...: sampling.lua).
--
--   d:prepare(list, n, longest)  compile now what steps of n sequences need (default: of 1 and of all slots) that ask for these (a list of tables of
--                       options; nil: greedy), and what reads prompts of up to `longest` tokens, and load the weights of --from
--   d:open(ids, asked)  a prompt of 1 to context - 1 ids; asked = {temperature=, top_k=, top_p=, min_p=, repetition_penalty=, presence_penalty=,
--                       frequency_penalty=, seed=, logprobs=}, checked before by sampling.parameters (nil, problem), by which defaults are filled
--                       in too; asked.prompt: how many of the ids are the prompt's where the rest was answered before (a sequence that gave its
--                       place to another one continues with the same draws and penalties); asked.given: the elements of the inputs that the prompt gives
--   d:fork(s, asked)    another sequence of the same prompt, which is read once where that is possible; nil, why
--   d:start(list)       a step of these open sequences begins: each that is ready gets a token; of the others up to `chunk` tokens of prompts
--                       are read, first come first. None that is full. The host is free while the device works on tokens; prompts are read
--                       after them, in finish.
--   d:finish()          its results in the order of the list. A sequence that was closed since start gives false.
--   d:step(list)        both
--   d:close(s)          at any time, also between start and finish
--   d:score(lists, n)   of each list of ids: {logprobs = {of the 2nd, 3rd ... token}, greedy = {is it the likeliest}, top = n > 0 and {{id=, logprob=}...}
--                       for each}; lists of 2 to context ids
--   d:use()             {slots=, slots_max=, blocks=, blocks_max=} in use: blocks are 0 of 0 without increments. An open sequence has the blocks of its
--                       prompt, and takes at most one more in a step: as many must be free as sequences are stepped
-- A draw follows from the sequence's seed and from how many tokens were drawn before: it is the same whatever else is decoded beside it.
-- All ranks call the same functions in the same order, and get the same results.
local Cache = require "mlua.increment"
local core = require "mlua.core"
local from = require "mlua.from"
local given = require "mlua.given"
local kept = require "mlua.kept"
local m = require "mlua"
local sampling = require "mlua.sampling"

local FORMATS = { int8 = "i8", fp8 = "e4m3" } -- of weights, and the dtype of each

local Decoder, Sequence = { __name = "decoder" }, { __name = "sequence" }
Decoder.__index, Sequence.__index = Decoder, Sequence

---Whether there is no place for another token.
---@return boolean
function Sequence:full() return #self.ids >= self.decoder.context end

---@param model Module|fun(tokens: Tensor): Tensor logits over the batch, seq and one more axis
---@param o {seq: Axis, context: integer?, slots: integer?, chunk: integer?, positions: integer?, increment: boolean?, weights: string?, invariant: boolean?, given: table[]?, logits: nil|fun(logits: Tensor): Tensor} positions: of the cache, of all sequences together; weights: "int8" or "fp8"; given: what given.specs says of inputs that each prompt gives
---@return table
function Decoder.new(model, o)
  local self = setmetatable({
    model = model, seq = o.seq, context = math.min(o.context or o.seq.size, o.seq.size), slots = o.slots or 1, chunk = o.chunk or Cache.CHUNK,
    increment = o.increment ~= false, logits = o.logits, invariant = o.invariant or core.options().batch_invariant or false, given = o.given or {}, programs = {}, scores = {}, needs = { filter = 0 }, open_count = 0,
    weights = FORMATS[o.weights],
  }, Decoder)
  if o.weights ~= nil and not self.weights then core.fail("weights are held as int8 or fp8, not " .. m.shown(o.weights)) end
  if self.increment then self.cache = Cache.new { context = self.context, slots = self.slots, positions = o.positions, chunk = self.chunk } end
  self.batch_name = core.options().ranks > 1 and "sample" or "batch" -- "sample" no layout splits
  return self
end

-- Programs -----------------------------------------------------------------------------------------------------------------

-- How many rows a step has that serves `count` sequences: a power of four, so that programs are few, or all slots.
local function rows_for(self, count)
  if self.invariant then return self.slots end
  local rows = 1
  while rows < count do rows = 4 * rows end
  return math.min(rows, self.slots)
end

-- The program of this shape, of those that there are, that does the least of what the sequences of a list ask for (without a list: of all
-- that was asked for so far, self.needs): each was made for all that was asked for by then, so the first that serves them.
local function made(self, shape, list)
  local needs = list and not self.invariant and { filter = 0 } or self.needs
  if needs ~= self.needs then
    for _, s in ipairs(list) do sampling.widen(needs, s.asked) end
  end
  for _, program in ipairs(self.programs[shape] or {}) do
    if sampling.serves(program.needs, needs) then return program end
  end
end

local function keep(self, shape, program)
  self.programs[shape] = self.programs[shape] or {}
  table.insert(self.programs[shape], program)
  return program
end

local function check_logits(logits, batch, seq)
  if not core.is_tensor(logits) then core.fail("the model must return logits, got " .. m.shown(logits)) end
  local rest = logits:axes()
  if #rest ~= 3 or not logits:has(batch.name) or not logits:has(seq.name) then
    core.fail("the logits of a model that generates have batch, " .. seq.name .. " and one more axis, not " .. table.concat(rest, ", "))
  end
  for _, name in ipairs(rest) do
    if name ~= batch.name and name ~= seq.name then return name end
  end
end

-- The axes of what a prompt gives, and its name among a program's inputs.
local function given_input(one, batch)
  local axes = table.move(one.axes, 1, #one.axes, 2, { batch })
  axes.dtype = one.dtype
  return "given " .. one.name, axes
end

-- The logits over {batch, seq, vocabulary} of tokens {batch, seq}, in f32 (rounded to bf16, many of the likeliest would be equal), and the
-- name of the last axis. Of `inputs` what prompts give.
local function forward(self, tokens, batch, inputs)
  local tensors = {}
  for _, one in ipairs(self.given) do tensors[one.name] = inputs["given " .. one.name] end
  local logits = #self.given > 0 and given.call(self.model, tokens, tensors) or #self.given == 0 and self.model(tokens) or nil
  core.take_updates() -- what a forward pass assigns, training alone assigns
  local vocab = check_logits(logits, batch, self.seq)
  self.vocab = logits:size(vocab)
  if self.weights then logits = core.narrow_weights(logits, self.weights) end
  return core.wide_logits(logits), vocab
end

-- Where no training has given the model its weights, those of --from; then what products read of them in 8 bits. In a task nothing reads the
-- parameters again, nor changes them.
local freed = {} -- by dtype: parameters whose memory was freed
local function load_weights(self)
  local options = core.options()
  if m.is_module(self.model) and not self.loaded then from.load(self.model) end
  if self.weights and not self.loaded and not freed[self.weights] then
    local before, after = core.fill_weights(self.weights, options.task ~= nil)
    freed[self.weights] = options.task ~= nil
    if options.rank == 0 and options.task and not options.quiet and not options.json then
      core.write_error(("weights of products in %s: %.1f MB in place of %.1f MB\n"):format(self.weights, after / 1e6, before / 1e6))
    end
  end
  self.loaded = true
end

local function sizes_of(axes)
  local sizes = {}
  for i, axis in ipairs(axes) do sizes[i] = axis.size end
  return sizes
end

local function copy(needs)
  local result = {}
  for name, value in pairs(needs) do result[name] = value end
  return result
end

-- The program of the whole window that continues `rows` sequences, with its host arrays.
local function whole_program(self, rows, list)
  local shape = "whole " .. rows
  local known = made(self, shape, list)
  if known then return known end
  local batch, needs = core.axis(self.batch_name, rows), copy(self.needs)
  local inputs = { tokens = { batch, self.seq, dtype = "i32" }, position = { batch, dtype = "i32" } }
  sampling.add_inputs(inputs, needs, batch)
  for _, one in ipairs(self.given) do
    local name, axes = given_input(one, batch)
    inputs[name] = axes
  end
  local run = m.compile(function(i)
    local logits = forward(self, i.tokens, batch, i):gather(i.position, self.seq.name):cast "f32"
    local feeds = setmetatable({ history = i.tokens }, { __index = i })
    return sampling.outputs(logits, feeds, needs, batch, self.seq, self.logits)
  end, inputs, { name = "decode", often = true })
  load_weights(self)
  local hosts = sampling.hosts(needs, rows)
  local gives = {}
  for _, one in ipairs(self.given) do
    local name, axes = given_input(one, batch)
    gives[name] = core.host(one.dtype, table.unpack(sizes_of(axes)))
  end
  return keep(self, shape, {
    run = run, needs = needs, rows = rows, settings = hosts, given = gives, tokens = core.host("i32", rows, self.seq.size), position = core.host("i32", rows), owners = {},
    written = {},
  })
end

-- The program that computes into a slot what depends on what its prompt gives.
local function give_program(self)
  if not self.give then
    local whole, inputs = self.whole, { slots = { core.axis("row", 1), dtype = "i32" } }
    for name, tensor in pairs(whole.inputs) do inputs[name] = tensor end
    self.give = m.compile(function(i) self.cache:give(whole, i.slots) end, inputs, { name = "give", often = true })
    load_weights(self)
  end
  return self.give
end

-- A slot gets what depends on what its prompt gives: computed, or that of another open sequence `like` of the same prompt.
local function give(self, s, like)
  if like and not like.closed then
    local slot = { core.axis("row", 1), dtype = "i32" }
    self.share = self.share or m.compile(function(i) self.cache:give_from(i.slots, i.from) end, { slots = slot, from = slot }, { name = "share", often = true })
    self.share { slots = { s.slot }, from = { like.slot } }
    return
  end
  local feed = { slots = { s.slot } }
  for name, elements in pairs(s.given) do feed[name] = elements end
  give_program(self)(feed)
  self.given_count = (self.given_count or 0) + 1
end

-- The whole program over one sequence, of which increments are derived: traced once.
local function traced(self)
  if not self.whole then
    local batch = core.axis(self.batch_name, 1)
    local tokens = core.input("tokens of the whole program", { batch, self.seq }, "i32")
    local inputs, list = {}, {}
    for i, one in ipairs(self.given) do
      local name, axes = given_input(one, batch)
      list[i] = core.input(name, axes, one.dtype)
      inputs[name] = list[i]
    end
    self.whole = { tokens = tokens, logits = (forward(self, tokens, batch, inputs)), seq = self.seq.name, given = list, inputs = inputs }
  end
  return self.whole
end

-- The program that reads up to `new` tokens of each of `rows` sequences and gives the next one, with its host arrays.
local function increment_program(self, rows, new, list)
  local shape = rows .. " x " .. new
  local known = made(self, shape, list)
  if known then return known end
  local row, positions, needs = core.axis("row", rows), core.axis("new", new), copy(self.needs)
  local history = core.axis("history", self.context)
  local inputs = self.cache:inputs(row, positions)
  if needs.penalty then inputs.history = { row, history, dtype = "i32" } end
  sampling.add_inputs(inputs, needs, row)
  local run = m.compile(function(i)
    local logits = self.cache:logits(traced(self), i, true):cast "f32"
    return sampling.outputs(logits, i, needs, row, history, self.logits)
  end, inputs, { name = new == 1 and "step" or "prefill", often = true })
  load_weights(self)
  return keep(self, shape, {
    run = run, needs = needs, rows = rows, new = new, hosts = self.cache:hosts(rows, new), settings = sampling.hosts(needs, rows), fed = {}, owners = {}, written = {},
    history = needs.penalty and core.host("i32", rows, self.context) or nil,
  })
end

-- What is refused for looking ahead is an error. A model that may be causal runs its whole program for each token: runtime/increment
-- says so of it in these words.
local UNKNOWN = "has no increment yet"

local function step_program(self, count, new, list)
  local rows = new > 1 and self.invariant and 1 or rows_for(self, count)
  if self.increment and not self.derived then
    local ok, problem = pcall(increment_program, self, rows, new)
    if not ok then
      local text = tostring(problem)
      if not text:find(UNKNOWN, 1, true) then error(problem, 0) end
      self.increment, self.cache = false, nil
      local options = core.options()
      if options.rank == 0 and not options.quiet and not options.json then
        core.write_error(("note: each token runs the whole program over %s=%d, for the model has no increment: %s\n"):format(self.seq.name, self.seq.size, kept.problem(text)))
      end
    end
    self.derived = true
  end
  if self.increment then return increment_program(self, rows, new, list) end
  return whole_program(self, rows_for(self, count), list)
end

local LENGTHS = { 16, 64, 256, 512, 1024, 2048, 4096 } -- of chunks: the least that serves, or d.chunk

-- How many tokens of each prompt a step reads at most where the first has `longest` left, and of how many prompts.
local function chunk_for(self, longest)
  local new, rows = self.chunk, 1
  for i = #LENGTHS, 1, -1 do
    if longest <= LENGTHS[i] and LENGTHS[i] < new then new = LENGTHS[i] end
  end
  while 4 * rows * new <= self.chunk and not self.invariant do rows = 4 * rows end
  return new, rows
end

---How many tokens of a prompt of so many a step reads.
---@param tokens integer
---@return integer
function Decoder:chunk_of(tokens)
  local new = chunk_for(self, tokens)
  return new
end

---Compile now what steps need of `count` sequences that ask for these (default: of one and of all slots), and what reads their prompts.
---@param asked? table[]
---@param count? integer
---@param longest? integer tokens of the longest prompt
function Decoder:prepare(asked, count, longest)
  for _, p in ipairs(asked or { { temperature = 0 } }) do sampling.widen(self.needs, sampling.parameters(p)) end
  step_program(self, count or 1, 1)
  if not count and self.slots > 1 then step_program(self, self.slots, 1) end
  if not count then longest = self.chunk end
  if longest and self.increment then
    local new, rows = chunk_for(self, longest)
    increment_program(self, count and rows_for(self, math.min(rows, count)) or 1, new)
  end
  if not count and self.increment and #self.given > 0 then give_program(self) end
end

-- Sequences ----------------------------------------------------------------------------------------------------------------

-- A sequence, of which a part may be known from another one.
local function open(self, ids, asked, like)
  if #ids < 1 or #ids >= self.context then
    core.fail(("a prompt has 1 to %d tokens, got %d"):format(self.context - 1, #ids), { help = ("the context is the axis %s=%d"):format(self.seq.name, self.seq.size) })
  end
  local p, problem = sampling.parameters(asked or {})
  if not p then core.fail(problem) end
  if not self.derived then step_program(self, 1, 1) end -- whether there are increments
  if self.open_count >= self.slots then return nil, "slots" end
  local s = setmetatable({
    decoder = self, ids = table.move(ids, 1, #ids, 1, {}), prompt = asked and asked.prompt or #ids, asked = p, ready = not self.increment, given = {},
  }, Sequence)
  for _, one in ipairs(self.given) do
    local elements = asked and asked.given and asked.given[one.name]
    s.given["given " .. one.name] = elements or like and like.given["given " .. one.name] or core.fail(("the prompt gives no %s"):format(one.name))
  end
  if self.increment then
    local ok, why = self.cache:open(s, #ids, not self.invariant and like or nil)
    if not ok then return nil, why end
    s.ready = #ids - s.cached == 1
    if #self.given > 0 then give(self, s, like) end
  end
  self.open_count = self.open_count + 1
  sampling.widen(self.needs, p)
  return s
end

---A sequence that continues `ids`; nil and "slots" or "blocks" where there is no room for it now.
---@param ids integer[]
---@param asked? table
---@return table?
---@return string? why
function Decoder:open(ids, asked) return open(self, ids, asked) end

---Another sequence of the same prompt, whose blocks they share where all that is kept is kept by position, and which has what the prompt gives.
---@param s table
---@param asked? table
---@return table?
---@return string? why
function Decoder:fork(s, asked)
  return open(self, table.move(s.ids, 1, s.prompt, 1, {}), asked, s)
end

---Whether a sequence of the same prompt has use of another one that is open: what the prompt gives is computed once.
---@return boolean
function Decoder:gives() return self.increment and #self.given > 0 end

---Whether sequences share what they know of a prompt: fork once it is read.
---@return boolean
function Decoder:shares() return not self.invariant and self.increment and self.derived and self.cache:shares() or false end

---The sequence is over.
---@param s table
function Decoder:close(s)
  if s.closed then return end
  s.closed = true
  self.open_count = self.open_count - 1
  if self.increment then self.cache:close(s) end
end

---What is in use.
---@return table<string, integer>
function Decoder:use()
  local cache = self.increment and self.cache
  return {
    slots = self.open_count, slots_max = self.slots, blocks = cache and cache.count - #cache.free or 0, blocks_max = cache and cache.count or 0,
  }
end

-- Steps --------------------------------------------------------------------------------------------------------------------

-- Write a sequence's tokens into row i of the window; those that the row has already stay.
local function write_row(self, program, i, s)
  local width, tokens, n = self.seq.size, program.tokens, #s.ids
  local at = (i - 1) * width
  local done = program.owners[i] == s and program.written[i] or 0
  for j = done + 1, n do tokens[at + j] = s.ids[j] end
  if done == 0 then
    for j = n + 1, width do tokens[at + j] = 0 end
  end
  for name, elements in pairs(done == 0 and s.given or {}) do
    for j, value in ipairs(elements) do program.given[name][(i - 1) * #elements + j] = value end
  end
  program.owners[i], program.written[i], program.position[i] = s, n, n - 1
  sampling.feed(program.settings, i, s.asked, s.prompt, n, done > 0)
end

local function all_inputs(program, others)
  for name, host in pairs(program.settings) do others[name] = host end
  for name, host in pairs(program.given or {}) do others[name] = host end
  return others
end

-- What penalties read of the rows' tokens; those that the row has already stay.
local function write_history(self, program, i, s)
  local at, n = (i - 1) * self.context, #s.ids
  for j = program.owners[i] == s and program.written[i] + 1 or 1, n do program.history[at + j] = s.ids[j] end
  program.owners[i], program.written[i] = s, n
end

-- Begin a program of increments for sequences of which the next counts[i] tokens are read.
local function begin(self, list, counts, new)
  local program = step_program(self, #list, new, list)
  local rows = self.cache:rows(program.rows, list)
  local fed = program.fed
  for i, s in ipairs(list) do
    local row = rows[i]
    sampling.feed(program.settings, row, s.asked, s.prompt, #s.ids, fed[row] ~= nil and fed[row].sequence == s)
    if program.history then write_history(self, program, row, s) end
  end
  self.cache:feed(program.hosts, list, rows, counts, new, fed)
  local feed = {}
  for name, host in pairs(program.hosts) do feed[name] = host end
  feed.history = program.history
  program.run:start(all_inputs(program, feed))
  return { run = program.run, list = list, rows = rows, counts = counts }
end

local function top_of(out, i, count)
  local each = #out.top_ids // #out.id
  local list = {}
  for j = 1, math.min(count, each) do list[j] = { id = out.top_ids[(i - 1) * each + j], logprob = out.top_logprobs[(i - 1) * each + j] } end
  return list
end

-- Row i of a program has this result for sequence s, of `length` tokens.
local function take(out, i, s, length)
  local id, logprob, asked = out.id[i], out.logprob[i], s.asked.logprobs
  if logprob ~= logprob then core.fail("the model's logits are not finite: nothing can be drawn of them") end
  s.ids[length + 1] = id
  return { id = id, logprob = logprob, top = asked > 0 and top_of(out, i, asked) or nil }
end

-- The results of a running program by sequence.
local function collect(running, results)
  local out, rows, counts = running.run:finish(), running.rows, running.counts
  for i, s in ipairs(running.list) do
    if not s.closed then
      local length = #s.ids
      if counts then s.cached = s.cached + counts[i] end
      if not counts or s.cached == length then
        results[s], s.ready = take(out, rows and rows[i] or i, s, length), true
      end
    end
  end
end

-- Read up to `chunk` tokens of the prompts of a list, first come first.
local function prefill(self, list)
  local function left(s) return (self.invariant and s.prompt or #s.ids) - s.cached end
  local chosen, counts, new, most = {}, {}, chunk_for(self, left(list[1]))
  for i = 1, math.min(most, #list) do chosen[i], counts[i] = list[i], math.min(new, left(list[i])) end
  return begin(self, chosen, counts, new)
end

-- Begin to read the prompts of a step, once: of those that are open yet.
local function read_prompts(self, running)
  local open = {}
  for _, s in ipairs(running.reading) do
    if not s.closed then open[#open + 1] = s end
  end
  running.reading = {}
  return #open > 0 and prefill(self, open) or nil
end

---A step begins.
---@param list table[] open sequences, none of them full
function Decoder:start(list)
  assert(not self.running, "a step is running")
  local running = { list = table.move(list, 1, #list, 1, {}), reading = {} }
  if self.increment then
    local ready, counts = {}, {}
    for _, s in ipairs(list) do
      if s.ready or self.invariant and s.cached >= s.prompt then
        ready[#ready + 1], counts[#ready + 1] = s, 1
      else
        running.reading[#running.reading + 1] = s
      end
    end
    if #ready > 0 then running.step = begin(self, ready, counts, 1) end
  elseif #list > 0 then
    local program = whole_program(self, rows_for(self, #list), list)
    for i, s in ipairs(list) do write_row(self, program, i, s) end
    program.run:start(all_inputs(program, { tokens = program.tokens, position = program.position }))
    running.step = { run = program.run, list = running.list }
  end
  if not running.step then running.step = read_prompts(self, running) end
  self.running = running
end

---The results of the step that was started.
---@return (table|false)[]
function Decoder:finish()
  local running, results, list = self.running, {}, {}
  self.running = nil
  if running.step then collect(running.step, results) end
  local rest = read_prompts(self, running)
  if rest then collect(rest, results) end
  for i, s in ipairs(running.list) do list[i] = not s.closed and results[s] or false end
  return list
end

---Start and finish.
---@param list table[]
---@return (table|false)[]
function Decoder:step(list)
  self:start(list)
  return self:finish()
end

-- Scores -------------------------------------------------------------------------------------------------------------------

local function score_program(self, rows, top)
  local key = rows .. tostring(top)
  if self.scores[key] then return self.scores[key] end
  local batch = core.axis(self.batch_name, rows)
  local run = m.compile(function(i)
    local logits, vocab = forward(self, i.tokens, batch, {})
    logits = logits:cast "f32"
    local logp = sampling.log_probabilities(logits, vocab)
    local out = { logprob = logp:gather(i.targets, vocab), greedy = logits:argmax(vocab) }
    if top then out.top_ids, out.top_logprobs = sampling.likeliest(logp, vocab) end
    for name, t in pairs(out) do -- rows and positions first
      out[name] = t:has "top" and t:permute(batch.name, self.seq.name, "top") or t:permute(batch.name, self.seq.name)
    end
    return out
  end, { tokens = { batch, self.seq, dtype = "i32" }, targets = { batch, self.seq, dtype = "i32" } }, { name = "score", often = true })
  load_weights(self)
  local program = { run = run, rows = rows, tokens = core.host("i32", rows, self.seq.size), targets = core.host("i32", rows, self.seq.size) }
  self.scores[key] = program
  return program
end

local function scores_of_row(out, at, ids, top)
  local logprobs, greedy, likeliest = {}, {}, top > 0 and {} or nil
  local each = top > 0 and #out.top_ids // #out.logprob or 0
  for j = 1, #ids - 1 do
    logprobs[j], greedy[j] = out.logprob[at + j], out.greedy[at + j] == ids[j + 1]
    if likeliest then
      likeliest[j] = {}
      for k = 1, math.min(top, each) do
        local place = (at + j - 1) * each + k
        likeliest[j][k] = { id = out.top_ids[place], logprob = out.top_logprobs[place] }
      end
    end
  end
  return { logprobs = logprobs, greedy = greedy, top = likeliest }
end

---Compile now what score needs.
---@param top integer
function Decoder:prepare_score(top) score_program(self, self.slots, top > 0) end

---Log probabilities of the tokens of texts, each given those before it.
---@param lists integer[][]
---@param top? integer how many of the likeliest tokens too
---@return table[]
function Decoder:score(lists, top)
  local results, width = {}, self.seq.size
  top = top or 0
  for first = 1, #lists, self.slots do
    local count = math.min(self.slots, #lists - first + 1)
    local program = score_program(self, rows_for(self, count), top > 0)
    program.tokens:fill(0)
    program.targets:fill(0)
    for i = 1, count do
      local ids = lists[first + i - 1]
      if #ids < 2 or #ids > self.context then
        core.fail(("a text that is scored has 2 to %d tokens, got %d"):format(self.context, #ids), { help = ("the context is the axis %s=%d"):format(self.seq.name, width) })
      end
      for j = 1, #ids - 1 do program.tokens[(i - 1) * width + j], program.targets[(i - 1) * width + j] = ids[j], ids[j + 1] end
    end
    local out = program.run { tokens = program.tokens, targets = program.targets }
    for i = 1, count do results[first + i - 1] = scores_of_row(out, (i - 1) * width, lists[first + i - 1], top) end
  end
  return results
end

return Decoder
