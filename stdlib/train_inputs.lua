-- Examples that a script makes by itself: m.train's inputs, sample and eval_sample.
local core = require "mlua.core"
local m = require "mlua"
local universal = require "mlua.universal"

local own = {}

---Numbers of a counter generator: those that m.train's `sample` gets for the example `index`, where seed is the training's.
---@param seed integer
---@param index integer
---@return Random
function m.random_numbers(seed, index) return core.random_numbers(seed, index) end

local TAKEN = { step = true, rate = true, micro = true, first = true } -- inputs that m.train feeds itself
local EXAMPLE = "inputs = { tokens = {A.batch, A.seq, dtype = \"i32\"} }, sample = function(index, random) return { tokens = ... } end"

local function check_input(o, name, spec)
  if type(name) ~= "string" or not name:match "^[%a_][%w_]*$" then
    core.fail(("m.train's inputs are named by words, got %s"):format(m.shown(name)), { help = EXAMPLE })
  end
  if TAKEN[name] then
    core.fail(("m.train feeds %q itself: an input of its own needs another name"):format(name))
  end
  local what = ("m.train's input %q"):format(name)
  if type(spec) ~= "table" then core.fail(what .. " is a list of axes, got " .. m.shown(spec), { help = EXAMPLE }) end
  for key, axis in pairs(spec) do
    if key ~= "dtype" and (math.type(key) ~= "integer" or type(axis) ~= "userdata" or getmetatable(axis) ~= "axis") then
      core.fail(("%s has axes and a dtype, got %s = %s"):format(what, tostring(key), m.shown(axis)), { help = EXAMPLE })
    end
  end
  if spec[1] == nil or spec[1].name ~= o.batch.name or spec[1].size ~= o.batch.size then
    core.fail(("the first axis of %s must be the batch's, %s=%d"):format(what, o.batch.name, o.batch.size), {
      help = "an example is a row of each input: what is the same for all of them, a state or a constant holds",
    })
  end
end

---Raise where the options about examples do not belong together.
---@param o table m.train's options, with their kinds checked
---@param given table those that the script gave
function own.check(o, given)
  if not o.inputs then
    for _, key in ipairs { "sample", "eval_sample" } do
      if o[key] then core.fail(("m.train's %s makes examples of inputs, and inputs is not given"):format(key), { help = EXAMPLE }) end
    end
    return
  end
  for name, spec in pairs(o.inputs) do check_input(o, name, spec) end
  if next(o.inputs) == nil then core.fail("m.train's inputs are none", { help = EXAMPLE }) end
  if not o.sample then core.fail("m.train's inputs need sample, which makes one example of them", { help = EXAMPLE }) end
  for _, key in ipairs { "data", "eval_data", "tokenizer", "vocab", "eval_share" } do
    if given[key] ~= nil then core.fail(("m.train has both %s and inputs, whose examples sample makes"):format(key)) end
  end
  for _, key in ipairs { "data", "eval_data", "tokenizer" } do
    local value = universal.given(key)
    if value and value ~= "" then core.fail(("%s=%s: the script makes its own examples (m.train's sample) and does not declare %s"):format(key, value, key)) end
  end
  if o.eval_every and o.eval_every > 0 and not o.eval_sample then
    core.fail("m.train's eval_every needs eval_sample beside inputs: the function that makes the examples of evaluations", {
      help = "eval_sample = function(index, random) ... end; its indices begin at 0 in each evaluation",
    })
  end
  if not o.loss and not (o.seq and o.inputs.tokens and o.inputs.targets) then
    core.fail("m.train's inputs need loss, a function of them that returns a sum and a count", {
      help = "loss = function(inputs) return m.cross_entropy(model(inputs.tokens), inputs.targets) end",
    })
  end
end

---The inputs of a microbatch, as m.compile takes them.
---@param o table
---@return table<string, table>
function own.specs(o)
  local batch, specs = core.axis(o.batch.name, o.batch.size // o.accum), {}
  for name, spec in pairs(o.inputs) do
    specs[name] = table.move(spec, 2, #spec, 2, { batch, dtype = spec.dtype })
  end
  return specs
end

-- Which rows of a microbatch this rank makes, and the inputs that it reads of them.
local function rows_of(program, names)
  local rows = { first = math.huge, stop = 0, names = {} }
  for _, name in ipairs(names) do
    local first, count = core.own_rows(program, name)
    if count > 0 then
      rows.first, rows.stop = math.min(rows.first, first), math.max(rows.stop, first + count)
      rows.names[#rows.names + 1] = name
    end
  end
  return rows
end

-- An example has each input and nothing else; `label` is "sample(17)".
local function check_example(example, o, names, label)
  if type(example) ~= "table" then
    core.fail(("%s must return a table of %s, got %s"):format(label, table.concat(names, ", "), m.shown(example)), { help = EXAMPLE })
  end
  for _, name in ipairs(names) do
    if example[name] == nil then core.fail(("%s returned no %q, which is one of m.train's inputs"):format(label, name)) end
  end
  for name in pairs(example) do
    if o.inputs[name] == nil then
      local guess = core.suggest(tostring(name), names)
      core.fail(("%s returned %q, which is none of m.train's inputs"):format(label, tostring(name)), { help = guess and ("did you mean %s?"):format(guess) })
    end
  end
end

-- Makes examples, numbered globally from `start`, into the rows of host arrays that this rank reads.
local function maker(o, what, sample, seed, names)
  local random = core.random_numbers(seed, 0)
  local function take(example, program, rows, hosts, row, label)
    check_example(example, o, names, label)
    for _, name in ipairs(rows.names) do core.take_row(program, name, hosts[name], row, example[name], label) end
  end
  return function(program, rows, hosts, start)
    for row = rows.first, rows.stop - 1 do
      local index = start + row
      local example = sample(index, random:restart(seed, index))
      local ok, problem = pcall(take, example, program, rows, hosts, row, ("%s(%d)"):format(what, index))
      if not ok then -- of the function's line instead of m.train's
        if type(problem) ~= "table" or problem.interrupted then error(problem, 0) end
        core.fail(problem.message, { help = problem.help, at = sample })
      end
    end
  end
end

---Batches of a script's own examples, as train_data.lua has them of files: .begin(program), .fill(step, microbatch,
---evaluation, program) and .feeds.
---@param o table
---@return table
function own.open(o)
  local names, micro = {}, o.batch.size // o.accum
  for name in pairs(o.inputs) do names[#names + 1] = name end
  local function hosts()
    local made = {}
    for name, spec in pairs(own.specs(o)) do
      local sizes = {}
      for i, axis in ipairs(spec) do sizes[i] = axis.size end
      made[name] = core.host(spec.dtype or "f32", table.unpack(sizes))
    end
    return made
  end
  local make = maker(o, "sample", o.sample, o.seed, names)
  local make_eval = o.eval_sample and maker(o, "eval_sample", o.eval_sample, core.hash(("%d evaluation"):format(o.seed)), names)
  local data = { name = ("own samples, seed %d"):format(o.seed) }
  o.progress = m.training_progress(o.model, o.optimizer, data.name)
  local ring, held, spare = {}, {}, nil -- by microbatch: those that are ahead; which step's; of all else
  local training, own_rows, ahead
  local function fill(step, i)
    local slot = ahead and i or 0
    local wanted = ("%d %d %d"):format(step, i, o.skip)
    ring[slot] = ring[slot] or hosts()
    if held[slot] ~= wanted then
      held[slot] = nil -- where sample raises
      make(training, own_rows, ring[slot], o.skip + (step - 1) * o.batch.size + i * micro)
      held[slot] = wanted
    end
    data.feeds = ring[slot]
  end
  -- Of a pipeline, whose microbatches all start together, a whole step is ahead; else the next microbatch.
  function data.fill(step, i, evaluation, program)
    if program then
      spare = spare or hosts()
      data.feeds = spare
      local start = i * micro + (evaluation and 0 or o.skip + (step - 1) * o.batch.size)
      return (evaluation and make_eval or make)(program, rows_of(program, names), spare, start)
    end
    if step > o.steps then return end -- sample may have no more
    if ahead and i == 0 then
      for k = 1, o.accum - 1 do fill(step, k) end
    end
    fill(step, i)
  end
  function data.begin(program)
    local options, seen = core.options(), o.progress.samples()
    if not o.skip and seen > 0 and options.rank == 0 and not options.quiet then
      core.write_error(("m.train continues after the %d samples that the model has seen; skip = 0 begins again\n"):format(seen))
    end
    o.skip = o.skip or seen
    o.progress.begin(o.skip)
    training, own_rows, ahead = program, rows_of(program, names), program:plan().stages > 1
  end
  -- What says whether other data would give the same samples: JSON.
  function data.identity() return '{"data":{"sources":[]}}' end -- the script's text says what they are
  return data
end

return own
