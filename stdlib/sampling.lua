-- How the next token of a row is chosen from its logits, as ops of the decoder's program (decode.lua): penalties, temperature, filters, a
-- draw, log probabilities. What a row asks for is fed, so that one program serves rows of different settings.
--
-- The order: the script's function over the logits; repetition_penalty (of tokens in prompt or answer: positive logits are divided by it,
-- negative ones multiplied; Keskar et al. 2019); presence_penalty and frequency_penalty (of tokens in the answer: subtracted once, and
-- once for each occurrence); temperature; top_k; top_p of what is left; min_p. Log probabilities are the model's: of its logits, before all of that.
local core = require "mlua.core"
local m = require "mlua"
local sampling = {}

local FEW = 64 -- up to this top_k nothing is sorted
local TOP = 20 -- the most log probabilities of other tokens

-- What a sequence may ask for: {default, test, what it must be}.
local function number(value) return type(value) == "number" and value == value and math.abs(value) < math.huge end
local function integer(value) return type(value) == "number" and math.tointeger(value) ~= nil end
local PARAMETERS = {
  { "temperature", 0.8, function(x) return number(x) and x >= 0 end, "a number, 0 or more" },
  { "top_k", 0, function(x) return integer(x) and x >= 1 end, "a positive integer" },
  { "top_p", 1, function(x) return number(x) and x > 0 and x <= 1 end, "a number above 0 and at most 1" },
  { "min_p", 0, function(x) return number(x) and x >= 0 and x <= 1 end, "a number from 0 to 1" },
  { "repetition_penalty", 1, function(x) return number(x) and x > 0 end, "a number above 0" },
  { "presence_penalty", 0, number, "a number" },
  { "frequency_penalty", 0, number, "a number" },
  { "seed", 0, integer, "an integer" },
  { "logprobs", 0, function(x) return integer(x) and x >= 0 and x <= TOP end, "an integer from 0 to " .. TOP },
}

---The names of what a sequence may ask for.
---@return string[]
function sampling.names()
  local names = {}
  for i, p in ipairs(PARAMETERS) do names[i] = p[1] end
  return names
end

local CHECKED = {} -- the metatable of what parameters gives

---What a sequence asks for, whole: absent options by their defaults. nil and the problem where one is wrong.
---@param options table may have other keys too
---@param whose? string before each name in problems: "m.generate's "
---@return table?
---@return string? problem
function sampling.parameters(options, whose)
  if getmetatable(options) == CHECKED then return options end
  local result = setmetatable({}, CHECKED)
  for _, p in ipairs(PARAMETERS) do
    local name, default, test, wanted = p[1], p[2], p[3], p[4]
    local value = options[name]
    if value ~= nil and not test(value) then return nil, ("%s%s must be %s, got %s"):format(whose or "", name, wanted, m.shown(value)) end
    if value == nil then value = default end
    result[name] = math.type(default) == "integer" and integer(value) and integer(default) and math.tointeger(value) or value
  end
  if options.seed == nil then result.seed = core.options().seed end
  return result
end

---The same with another seed.
---@param p table
---@param seed integer
---@return table
function sampling.with_seed(p, seed)
  local result = setmetatable({}, CHECKED)
  for key, value in pairs(p) do result[key] = value end
  result.seed = seed
  return result
end

---The most that any of several sequences needs of a program: {draw=, filter=, penalty=, top=}; a program for more serves less.
---@param needs table
---@param p table what sampling.parameters gave
function sampling.widen(needs, p)
  local filters = p.temperature > 0 and (p.top_k > 0 or p.top_p < 1)
  needs.draw = needs.draw or p.temperature > 0
  needs.filter = math.max(needs.filter or 0, not filters and 0 or p.top_k > 0 and p.top_k <= FEW and 1 or 2)
  needs.penalty = needs.penalty or p.repetition_penalty ~= 1 or p.presence_penalty ~= 0 or p.frequency_penalty ~= 0
  needs.top = needs.top or p.logprobs > 0
end

---Whether a program for `has` serves what `needs` says.
---@param has table
---@param needs table
---@return boolean
function sampling.serves(has, needs)
  return (has.draw or not needs.draw) and has.filter >= needs.filter and (has.penalty or not needs.penalty) and (has.top or not needs.top) or false
end

local FED = { -- the input of a row, its dtype and when there is one
  { "temperature", "f32", "draw" }, { "key", "i64", "draw" }, { "min_p", "f32", "draw" }, { "top_p", "f32", "filters" }, { "top_k", "i32", "filters" },
  { "repetition_penalty", "f32", "penalty" }, { "presence_penalty", "f32", "penalty" }, { "frequency_penalty", "f32", "penalty" },
  { "prompt", "i32", "penalty" }, { "length", "i32", "penalty" },
}

local function fed(needs, when) return when == "filters" and needs.filter > 0 or when ~= "filters" and needs[when] end

---Add the inputs of a program that serves `needs` to `inputs`.
---@param inputs table<string, table>
---@param needs table
---@param row Axis
function sampling.add_inputs(inputs, needs, row)
  for _, f in ipairs(FED) do
    if fed(needs, f[3]) then inputs[f[1]] = { row, dtype = f[2] } end
  end
end

---Host arrays for these inputs.
---@param needs table
---@param rows integer
---@return table<string, Host>
function sampling.hosts(needs, rows)
  local hosts = {}
  for _, f in ipairs(FED) do
    if fed(needs, f[3]) then hosts[f[1]] = core.host(f[2], rows):fill(f[1] == "temperature" and 0 or 1) end
  end
  return hosts
end

---The values of row `i` (from 1) for its next token.
---@param hosts table<string, Host>
---@param i integer
---@param p table what the sequence asks for
---@param prompt integer how many tokens of it are the prompt's
---@param length integer how many tokens it has
---@param again boolean whether the row was fed for this sequence before
function sampling.feed(hosts, i, p, prompt, length, again)
  if hosts.key then hosts.key[i] = core.draw_key(p.seed, length - prompt + 1) end
  if hosts.length then hosts.length[i] = length end
  if again then return end
  for name, host in pairs(hosts) do
    if name == "prompt" then host[i] = prompt
    elseif p[name] ~= nil then host[i] = p[name] end
  end
end

-- How often each token of the vocabulary occurs among the tokens of a row where `counted` is true.
local function occurrences(tokens, counted, row, position, vocab)
  local all = core.axis("token_of_a_row", row.size * position.size)
  local places = core.axis("place_in_a_row", row.size * vocab.size)
  local index = tokens + core.iota(row, "i32"):broadcast { row, position } * vocab.size
  local value = counted:cast("f32"):merge(row.name, position.name, all)
  local sums = core.scatter_add(index:merge(row.name, position.name, all), value, all.name, places)
  return sums:split(places.name, row, vocab)
end

local function penalised(logits, i, row, position, vocab)
  local at = core.iota(position, "i32"):broadcast { row, position }
  local answer = occurrences(i.history, core.logical_and(core.ge(at, i.prompt), core.lt(at, i.length)), row, position, vocab)
  local seen = occurrences(i.history, core.lt(at, i.length), row, position, vocab)
  local repeated = core.where(core.gt(logits, 0), logits / i.repetition_penalty, logits * i.repetition_penalty)
  logits = core.where(core.gt(seen, 0), repeated, logits)
  return logits - core.where(core.gt(answer, 0), 1.0, 0.0) * i.presence_penalty - answer * i.frequency_penalty
end

local PARTS, LARGE = 64, 16384

---x:argmax(axis), of a large vocabulary by parts: all blocks of a GPU have work where there are few rows. Of equal ones the first, too.
---@param x Tensor
---@param axis string
---@return Tensor
function sampling.place_of_largest(x, axis)
  local size = x:size(axis)
  if size < LARGE or size % PARTS ~= 0 or core.options().ranks > 1 then return x:argmax(axis) end
  local parts, within = core.axis("part_of_" .. axis, PARTS), core.axis("within_part", size // PARTS)
  x = x:split(axis, parts, within)
  local part = x:max(within.name):argmax(parts.name)
  return part * within.size + x:argmax(within.name):gather(part, parts.name)
end

-- The place along `axis` of what is drawn of the logits x, whose noise follows from key and token alone.
local function drawn(x, ids, i, axis)
  local u = core.random(0, m.axes_of(x), ids:cast("i64") + i.key)
  local noise = -core.log(1e-9 - core.log(u + 1e-9)) -- Gumbel's: the argmax of the sum is a sample
  local likely = core.ge(x - x:max(axis), core.log(i.min_p))
  local hot = core.gt(i.temperature, 0)
  return sampling.place_of_largest(core.where(core.logical_or(likely, core.logical_not(hot)), x + core.where(hot, noise, 0), -math.huge), axis)
end

-- The id of each row among logits that are in falling order along `axis`, with top_k and top_p.
local function drawn_of_sorted(x, ids, i, axis)
  local place = core.iota(core.axis(axis, x:size(axis)), "i32"):broadcast(m.axes_of(x))
  x = core.where(core.logical_or(core.lt(place, i.top_k), core.le(i.top_k, 0)), x, -math.huge)
  local p = m.softmax(x, axis)
  x = core.where(core.logical_or(core.lt(p:cumsum(axis) - p, i.top_p), core.ge(i.top_p, 1)), x, -math.huge)
  return ids:gather(drawn(x, ids, i, axis), axis)
end

local function chosen(x, i, needs, vocab)
  if not needs.draw then return sampling.place_of_largest(x, vocab.name) end
  x = x / core.where(core.gt(i.temperature, 0), i.temperature, 1)
  if needs.filter == 2 then
    local values, ids = x:sort(vocab.name, { descending = true })
    return drawn_of_sorted(values, ids, i, vocab.name)
  end
  local id = drawn(x, core.iota(vocab, "i32"):broadcast(m.axes_of(x)), i, vocab.name)
  if needs.filter == 0 then return id end
  local few = core.axis("likeliest", math.min(FEW, vocab.size))
  local values, ids = x:top_k(vocab.name, few.size, few)
  return core.where(core.gt(i.top_k, 0), drawn_of_sorted(values, ids, i, few.name), id)
end

---Log probabilities of logits, over `vocab`.
---@param logits Tensor f32
---@param vocab string
---@return Tensor
function sampling.log_probabilities(logits, vocab)
  local log, largest = m.logsumexp_parts(logits, vocab)
  return logits - largest - log
end

---The likeliest tokens of each row and their log probabilities: {ids, logprobs} over the axis "top".
---@param logp Tensor
---@param vocab string
---@return Tensor ids
---@return Tensor logprobs
function sampling.likeliest(logp, vocab)
  local top = core.axis("top", math.min(TOP, logp:size(vocab)))
  local values, ids = logp:top_k(vocab, top.size, top)
  return ids, values
end

---What the program of a decoder computes of the logits of its rows: {id=, logprob=, top_ids=, top_logprobs=}.
---@param logits Tensor f32 over the rows and the vocabulary
---@param i table the program's inputs; with penalties `history`, the tokens of each row by position
---@param needs table
---@param row Axis
---@param position? Axis of `history`
---@param fn? fun(logits: Tensor): Tensor
---@return table<string, Tensor>
function sampling.outputs(logits, i, needs, row, position, fn)
  local names = logits:axes()
  local name = names[1] == row.name and names[2] or names[1]
  local vocab = core.axis(name, logits:size(name))
  local logp = sampling.log_probabilities(logits, name)
  local x = logits
  if fn then
    x = fn(logits)
    if not core.is_tensor(x) or table.concat(x:axes(), " ") ~= table.concat(names, " ") then
      core.fail(("the function over the logits returns logits of the same axes (%s), got %s"):format(table.concat(names, ", "), m.shown(x)), { at = fn })
    end
    x = x:cast("f32")
  end
  if needs.penalty then x = penalised(x, i, row, position, vocab) end
  local id = chosen(x, i, needs, vocab)
  local out = { id = id, logprob = logp:gather(id, name) }
  if needs.top then out.top_ids, out.top_logprobs = sampling.likeliest(logp, name) end
  return out
end

return sampling
