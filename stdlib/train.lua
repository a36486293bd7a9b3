-- The training loop: Lua over m.compile, core.grad, optimizers, schedules and data.
local core = require "mlua.core"
local m = require "mlua"

local OPTIONS = {
  "model", "loss", "optimizer", "schedule", "steps", "batch", "seq", "vocab", "data", "accum", "clip",
  "eval_every", "eval_batches", "eval_share", "log_every", "seed", "skip", "on_step", "layout",
}

-- The sum of squares of all gradients.
local function square_sum(gradients)
  local total
  for _, g in ipairs(gradients) do
    local square = (g * g):sum()
    total = total and total + square or square
  end
  return total
end

-- Divide, clip, update; a step whose gradient is not finite changes no parameter (m.train stops there).
local function apply(o, parameters, gradients, total, count, feeds)
  local norm = core.sqrt(m.scope("gradient norm", square_sum, gradients)) / count
  local scale = 1 / count
  if o.clip and o.clip > 0 then scale = scale * core.minimum(1, o.clip / (norm + 1e-6)) end
  local ok = core.is_finite(norm)
  local scaled = {}
  for i, g in ipairs(gradients) do scaled[i] = core.where(ok, g * scale, 0) end
  local inputs = { rate = core.where(ok, feeds.rate, 0), step = feeds.step:cast("f32") }
  function inputs.step_of(p) -- feeds.step counts the model's steps in all trainings
    local offset = o.progress and o.progress.offset(p) or 0
    return offset == 0 and inputs.step or (feeds.step - offset):cast("f32")
  end
  m.scope("optimizer", o.optimizer.update, parameters, scaled, inputs)
  return { loss = total / count, grad_norm = norm }
end

local function token_inputs(o, more)
  local batch = core.axis(o.batch.name, o.batch.size // o.accum)
  local inputs = { tokens = { batch, o.seq, dtype = "i32" }, targets = { batch, o.seq, dtype = "i32" } }
  for name, spec in pairs(more or {}) do inputs[name] = spec end
  return inputs
end

-- The numbers that a microbatch draws are those that its samples have in the whole batch (random.lua).
local function cut_batch(o, feeds)
  m.context.micro = { axis = o.batch.name, size = o.batch.size // o.accum, count = o.accum, index = feeds.micro }
end

-- The inputs of a forward pass alone, which draws what training draws: in which step, and in which microbatch.
local function forward_inputs(o)
  return token_inputs(o, { step = { dtype = "i64" }, micro = o.accum > 1 and { dtype = "i64" } or nil })
end

local function forward_feeds(o, data, step, micro)
  return { tokens = data.tokens, targets = data.targets, step = step, micro = o.accum > 1 and micro or nil }
end

local function default_loss(o)
  return function(tokens, targets)
    local logits = o.model(tokens)
    if not core.is_tensor(logits) then core.fail("the model must return logits, got " .. m.shown(logits)) end
    for _, axis in ipairs(logits:axes()) do
      if axis ~= "vocab" and axis ~= o.batch.name and axis ~= o.seq.name and logits:has "vocab" then
        core.fail_axis(logits, axis,
          ("the model's logits have the axis %q, and m.train takes their %s, %s and vocab alone"):format(axis, o.batch.name, o.seq.name),
          ("sum over it there, as :dot(w, %q) does; logits with more axes need a loss of their own: m.train{loss = ...}"):format(axis))
      end
    end
    if not logits:has "vocab" then
      core.fail(("the model must return logits over the axis \"vocab\", got %s"):format(tostring(logits)), {
        help = "for other losses there is m.train{loss = function(tokens, targets) ... return sum, count end}",
      })
    end
    o.vocab = o.vocab or logits:size "vocab" -- what tokens are held against
    return m.cross_entropy(logits, targets)
  end
end

-- A parameter of another model is an error, unless the script defines the loss, which may use other models.
local function check_others(o, loss, parameters)
  local names = {}
  local others, classes = m.other_parameters(loss, parameters)
  for i, p in ipairs(others) do
    local held = classes[i] ~= ""
    names[i] = ("%s%s (%s)"):format(p:name() or "one without a name", held and " of " .. classes[i] or "", core.origin(p) or "?")
    if not o.own_loss or not held then
      core.fail("the loss depends on a parameter that the model does not hold and m.train does not change: " .. names[i], {
        help = ("put %s into a field of the model; m.freeze(...) says that it stays as it is"):format(held and "its module" or "it"),
      })
    end
  end
  if #names > 0 then m.report_untrained(names, "the loss depends on parameters of other models, which m.train does not change: ") end
end

-- The parameters that the loss reaches, and its gradients; `parameters` are all of the model.
local function differentiate(o, loss, parameters)
  if #parameters == 0 then
    core.fail("the model has no parameters to train", { help = "training changes what m.param makes, in fields of the model and its modules" })
  end
  local trained, gradients, missed = {}, {}, {}
  for i, g in ipairs(m.grad(loss, parameters)) do
    if core.is_zero(g) then
      missed[#missed + 1] = parameters[i]:name()
    else
      trained[#trained + 1], gradients[#gradients + 1] = parameters[i], g
    end
  end
  if o.model then check_others(o, loss, parameters) end
  if #missed > 0 then
    m.report_untrained(missed, ("the loss does not depend on %d of the model's %d parameters, which stay as they are: "):format(#missed, #parameters))
  end
  return trained, gradients
end

---The program of one training step: forward, gradients, clipping, optimizer. Inputs tokens, targets
---(i32), rate (the schedule's factor) and step (i64, from 1); outputs loss, grad_norm and, where
---modules add losses, aux_loss.
---@param o TrainOptions loss or model, optimizer, batch, seq, clip
---@param parameters? State[] default: those of the model
---@return Program
function m.step_program(o, parameters)
  o.accum = o.accum or 1
  o.loss = o.loss or default_loss(o)
  return m.compile(function(feeds)
    local total, count = o.loss(feeds.tokens, feeds.targets)
    local added = m.added_loss(count)
    local trained, gradients = differentiate(o, added and total + added or total, parameters or m.parameters(o.model))
    local out = apply(o, trained, gradients, total, count, feeds)
    out.aux_loss = added and added / count
    return out
  end, token_inputs(o, { rate = {}, step = { dtype = "i64" } }), { name = "step", training = true })
end

local accumulators = {} -- by name; a script's trainings share them, for each step starts afresh

local function accumulator(name, axes)
  accumulators[name] = accumulators[name]
    or core.state { name = name, axes = axes, dtype = "f32", kind = "gradient", init = m.zeros(axes) }
  return accumulators[name]
end

-- 1 where numbers differ, by their sum and that of their squares, else 0.
local function uneven(sum, squares, count)
  return core.gt(squares * count, sum * sum * (1 + 1e-5)):cast "f32"
end

-- Each added loss is a mean over a count of its own, while sums of gradients over microbatches have one divisor, the loss's.
local function warn_uneven(accum)
  if core.options().rank ~= 0 then return end
  core.write_error(("the loss counts more positions in some of a step's %d microbatches than in others: there the losses of m.add_loss weigh "
    .. "more, otherwise than in one batch\n"):format(accum))
end

-- With accumulation: one program a microbatch, which adds to gradient states (or sets them: input
-- `first`), and one that applies.
local function accumulated_step(o)
  local sums, parameters = {}, nil -- of those that the loss reaches
  local loss_sum, loss_count = accumulator("accumulated loss", {}), accumulator("accumulated count", {})
  local added_sum, weights, totals
  local micro = m.compile(function(feeds)
    cut_batch(o, feeds)
    local total, count = o.loss(feeds.tokens, feeds.targets)
    local added, weight = m.added_loss(count)
    local function add(state, value) state:assign(core.where(feeds.first, 0, state:read()) + value) end
    local gradients
    parameters, gradients = differentiate(o, added and total + added or total, m.parameters(o.model))
    for i, g in ipairs(gradients) do
      sums[i] = accumulator("gradient." .. parameters[i]:name(), m.axes_of(parameters[i]))
      add(sums[i], g)
    end
    if added then
      added_sum = accumulator("accumulated aux_loss", {})
      add(added_sum, added)
    end
    if core.is_tensor(weight) then
      weights = { accumulator("accumulated weights", {}), accumulator("accumulated squares of weights", {}) }
      add(weights[1], weight)
      add(weights[2], weight * weight)
    end
    totals, m.context.totals = m.context.totals, {} -- finished by the other program
    for _, t in ipairs(totals) do add(t.state, t.value) end
    add(loss_sum, total)
    add(loss_count, count)
  end, token_inputs(o, { step = { dtype = "i64" }, micro = { dtype = "i64" }, first = { dtype = "bool" } }), {
    name = "microbatch", training = true, microbatches = o.accum,
  })
  local finish = m.compile(function(feeds)
    local gradients = {}
    for i, sum in ipairs(sums) do gradients[i] = sum:read() end
    local out = apply(o, parameters, gradients, loss_sum:read(), loss_count:read(), feeds)
    out.aux_loss = added_sum and added_sum:read() / loss_count:read()
    out.uneven = weights and uneven(weights[1]:read(), weights[2]:read(), o.accum)
    for _, t in ipairs(totals) do
      if t.update then t.update(t.state:read()) end
    end
    return out
  end, { rate = {}, step = { dtype = "i64" } }, { name = "update", training = true })
  return micro, finish
end

local function natural(x) return type(x) == "number" and math.tointeger(x) and x >= 0 end
local function integer(x) return type(x) == "number" and math.tointeger(x) end
local function positive(x) return natural(x) and x >= 1 end
local function count_of_parts(x) return positive(x) and x <= 1 << 30 end
local function is_axis(x) return type(x) == "userdata" and not core.is_tensor(x) end
local function callable(x) return type(x) == "function" or type(x) == "table" and getmetatable(x) and getmetatable(x).__call end

-- What each option must be, in words, and the test.
local KINDS = {
  model = { "a module", m.is_module, "calling a class makes one: local model = GPT()" },
  loss = { "a function", callable }, schedule = { "a function of (step, steps)", callable, "m.cosine{warmup = 100} gives one; a constant rate is the optimizer's lr" },
  optimizer = { "what m.adamw{...} gives", function(x) return type(x) == "table" and type(x.update) == "function" end, "m.adamw{lr = 3e-4}" },
  batch = { "an axis (A.batch)", is_axis }, seq = { "an axis (A.seq)", is_axis },
  steps = { "an integer, 0 or more", natural }, accum = { "an integer from 1 to 2^30", count_of_parts },
  clip = { "a number, 0 or more", function(x) return type(x) == "number" and x >= 0 end },
  data = { "a file's name, or what m.corpus gives", function(x) return type(x) == "string" or getmetatable(x) == "corpus" end },
  skip = { "an integer, 0 or more", natural },
  eval_every = { "an integer, 0 or more", natural }, eval_batches = { "a positive integer", positive },
  seed = { "an integer", integer }, vocab = { "a positive integer", positive }, eval_share = { "a share between 0 and 1", function(x) return type(x) == "number" and x > 0 and x < 1 end },
  log_every = { "a positive integer", positive }, on_step = { "a function of (step, outputs)", callable },
}

local function check_kinds(o)
  for _, key in ipairs(OPTIONS) do
    local kind = KINDS[key]
    if kind and o[key] ~= nil and not kind[2](o[key]) then
      core.fail(("m.train's %s must be %s, got %s"):format(key, kind[1], m.shown(o[key])), { help = kind[3] })
    end
  end
end

-- A loss that returns anything but a sum and a count is an error here and not deep in the step.
local function checked_loss(loss)
  return function(...)
    local total, count = loss(...)
    if not core.is_tensor(total) or not (core.is_tensor(count) or type(count) == "number") then
      core.fail(("m.train's loss must return a sum and a count, got %s and %s"):format(m.shown(total), m.shown(count)), {
        help = "such as m.cross_entropy(model(tokens), targets); for a mean return it and 1",
      })
    end
    return total, count
  end
end

-- The options with their defaults, in a table of their own.
local function complete(options)
  m.check_options("train", options or {}, OPTIONS)
  local o, settings = {}, rawget(m, "settings") or {}
  for key, value in pairs(options or {}) do o[key] = value end
  for _, key in ipairs { "steps", "data", "accum", "seed" } do
    if o[key] == nil then o[key] = settings[key] end
  end
  o.accum, o.steps, o.seed = o.accum or 1, o.steps or 100, o.seed or core.options().seed
  o.clip = o.clip == nil and 1 or o.clip
  o.schedule = o.schedule or m.constant()
  o.optimizer = o.optimizer or m.adamw()
  for _, key in ipairs { "model", "batch", "seq" } do
    if o[key] == nil then core.fail(("m.train needs %s, which is nil or not given"):format(key), { help = "m.train { model = model, batch = A.batch, seq = A.seq }" }) end
  end
  check_kinds(o)
  if o.batch.name == o.seq.name then
    core.fail(("m.train's batch and seq are both the axis %q"):format(o.seq.name), { help = "batch = A.batch, seq = A.seq" })
  end
  if o.batch.size > (1 << 57) // o.seq.size then
    core.fail(("a step of batch=%d times %s=%d tokens: 2^57 are the most"):format(o.batch.size, o.seq.name, o.seq.size))
  end
  m.use_layout(o.layout, "m.train")
  local parts = m.microbatches(o.accum)
  m.check_batch(o.batch, o.seq, parts, o.accum)
  o.accum = parts
  o.own_loss = o.loss ~= nil
  o.loss = checked_loss(o.loss or default_loss(o))
  if o.data == "" then o.data = nil end
  if o.eval_every == 0 then o.eval_every = nil end
  o.eval_share = o.eval_share or 0.1
  o.eval_batches = o.eval_batches or 8
  return o
end

-- The corpus, and the model's progress in it.
local function open_data(o)
  local corpus = type(o.data) == "userdata" and o.data or core.corpus(o.data)
  o.progress = m.training_progress(o.model, o.optimizer, ("%s, seed %d"):format(corpus:name(), o.seed))
  local micro = o.batch.size // o.accum
  local data = { tokens = core.host("i32", micro, o.seq.size), targets = core.host("i32", micro, o.seq.size) }
  -- Samples are numbered globally: microbatch i of step s holds the same ones whatever accum is.
  function data.fill(step, i, evaluation)
    local wanted = ("%d %d %s"):format(step, i, evaluation)
    if data.held == wanted then return end
    data.held = wanted
    local share = 1 - (o.eval_every and o.eval_share or 0)
    corpus:fill(data.tokens, data.targets, (step - 1) * o.accum + i, {
      seed = o.seed, vocab = o.vocab, from = evaluation and share or 0, to = evaluation and 1 or share,
      skip = evaluation and 0 or o.skip,
    })
  end
  -- Once the programs are traced, and the model has all its parameters.
  function data.begin()
    local options, seen = core.options(), o.progress.samples()
    if not o.skip and seen > 0 and options.rank == 0 and not options.quiet then
      core.write_error(("m.train continues in %s after the %d samples that the model has seen; skip = 0 begins again\n"):format(corpus:name(), seen))
    end
    o.skip = o.skip or seen
    o.progress.begin(o.skip)
  end
  return data
end

-- "nan" whatever its sign bit is, so that a message is the same on every machine.
local function plain(x) return x ~= x and "nan" or tostring(x) end

-- Where the numbers went bad: run the forward pass again with a probe at every module.
local function explain(o, data, before, step, loss, norm)
  local paths = {}
  local probe = m.compile(function(feeds)
    local outputs = {}
    if o.accum > 1 then cut_batch(o, feeds) end
    m.context.probe = function(path, x)
      paths[#paths + 1] = path
      outputs[("%06d"):format(#paths)] = core.is_finite(x:cast "f32"):cast("f32"):min()
    end
    local total, count = o.loss(feeds.tokens, feeds.targets)
    outputs.total, outputs.count = total, core.is_tensor(count) and count or core.full({}, count)
    m.context.totals = {}
    core.take_updates() -- no state changes
    return outputs
  end, forward_inputs(o), { name = "probe", training = true }) -- which draws what the step drew
  local total, count = 0, 0
  local function culprit()
    for micro = 0, o.accum - 1 do
      data.fill(step, micro)
      local finite = probe(forward_feeds(o, data, before + step, micro))
      total, count = total + finite.total, count + finite.count
      for i, path in ipairs(paths) do
        if finite[("%06d"):format(i)] ~= 1 then return path == "" and "the model" or path end
      end
    end
  end
  local path = culprit()
  local where = path and "the first output that is not finite is that of " .. path
    or count == 0 and "the loss counts nothing: the count that belongs to its sum is 0"
    or total - total ~= 0 and "every module's output is finite, and the loss is not"
    or "every module's output is finite: the backward pass overflows"
  core.fail(("step %d: loss %s, gradient norm %s: %s"):format(step, plain(loss), plain(norm), where), {
    help = "the parameters still hold their values of the step before; try a lower lr, longer warmup or clip",
  })
end

-- The loss on the data that training does not use. Each evaluation draws the same numbers, so that losses compare: those of
-- steps 1 to eval_batches.
local function make_evaluation(o, data)
  local evaluation, idle = {}, false
  evaluation.program = m.compile(function(feeds)
    if o.accum > 1 then cut_batch(o, feeds) end
    local total, count = o.loss(feeds.tokens, feeds.targets)
    core.take_updates() -- an evaluation changes no state
    idle = m.context.idle
    return { total = total, count = count }
  end, forward_inputs(o), { name = "evaluation" })
  local function run(i)
    data.fill(1, i, true)
    return evaluation.program(forward_feeds(o, data, i // o.accum + 1, i % o.accum))
  end
  local function nothing_counts(where)
    core.fail(where .. ": the loss counts nothing in evaluation: the count that belongs to its sum is 0", {
      help = idle and "m.dropout drops nothing in evaluation; m.random_mask(axes, share) draws a mask in evaluation too, and so does "
        .. "m.dropout(x, rate, {always = true})" or "eval_batches and eval_share say how much data it sees",
    })
  end
  -- What can be reported before the first step: too little data; and where a dropout drops nothing, a mask that is empty for it.
  function evaluation.prepare()
    data.fill(1, 0, true)
    if not (idle and o.own_loss) then return end
    for i = 0, o.eval_batches * o.accum - 1 do
      if run(i).count ~= 0 then return end
    end
    nothing_counts "before the first step"
  end
  function evaluation.loss(step)
    local total, count = 0, 0
    for i = 0, o.eval_batches * o.accum - 1 do
      local result = run(i)
      total, count = total + result.total, count + result.count
    end
    if count == 0 then nothing_counts(("step %d"):format(step)) end
    return total / count
  end
  return evaluation
end

---The options of m.train. steps, data, accum and seed default to the settings of those names in m.config.
---@class TrainOptions
---@field model Module the trained module; model(tokens) returns logits over batch, seq and vocab
---@field loss? fun(tokens: Tensor, targets: Tensor): Tensor, Tensor|number a sum and a count, instead of the logits' cross-entropy
---@field batch Axis of the whole step
---@field seq Axis positions
---@field optimizer? Optimizer default m.adamw{}
---@field schedule? fun(step: integer, steps: integer): number a factor of the optimizer's lr; default m.constant()
---@field steps? integer default 100
---@field data? string|Corpus a text file, or .bin of u16 tokens; default: the text built in
---@field vocab? integer what tokens are held against; default: the size of the logits' vocab
---@field accum? integer microbatches of a step; default 1
---@field clip? number bound of the gradient norm; default 1, 0: off
---@field eval_every? integer steps between evaluations; 0: none
---@field eval_batches? integer of an evaluation; default 8
---@field eval_share? number of the data, its end, that evaluations use and training does not; default 0.1
---@field log_every? integer steps between lines
---@field seed? integer of the order of the data
---@field skip? integer samples before the first; default: those that the model has seen of these data, 0 in its first training
---@field on_step? fun(step: integer, outputs: StepOutputs) called after each step
---@field layout? Layout how tensors are sharded

---What on_step gets.
---@class StepOutputs
---@field loss number
---@field grad_norm number before clipping
---@field aux_loss? number what modules add (m.add_loss)

---What m.train returns; under mlua check all fields are nil.
---@class TrainResult
---@field loss? number of the last step
---@field eval_loss? number of the last evaluation
---@field steps? integer

---Train a model. `model(tokens)` returns logits, or `loss(tokens, targets)` a sum and a count. batch
---and seq are axes (batch is the whole step's); `accum` cuts a step into microbatches; `clip`
---bounds the gradient norm (default 1; 0: off); `data` is a text file or .bin of u16 tokens
---(default: the text built in); `eval_every` measures the loss on the last `eval_share` of the data
---that often. Prints a line or progress bar; returns {loss=, eval_loss=, steps=}.
---One more training of a model continues: in the data, by the number of samples, whatever the batch (each file and seed has a
---number of its own); in dropout's draws; in the updates that an optimizer counts, where it is the same one. Another model
---begins at the first sample. `skip = 0` begins again.
---`steps`, `data`, `accum` and `seed` default to the settings of those names in m.config.
---@param options TrainOptions
---@return TrainResult
function m.train(options)
  local o = complete(options)
  local mode = core.options().mode
  local data = mode ~= "check" and open_data(o)
  core.sequence_axis(o.seq)
  if not o.own_loss then -- layers that are created while the model runs
    o.model(core.input("tokens", { core.axis(o.batch.name, o.batch.size // o.accum), o.seq }, "i32"))
  end
  local step_program, micro, finish
  if o.accum == 1 then step_program = m.step_program(o) else micro, finish = accumulated_step(o) end
  local programs = step_program and { step_program } or { micro, finish }
  local evaluation = o.eval_every and make_evaluation(o, data)
  if mode == "check" then
    local all = table.move(programs, 1, #programs, 1, {})
    all[#all + 1] = evaluation and evaluation.program
    core.report(all, { parameters = m.parameters(o.model), tokens = o.batch.size * o.seq.size, accum = o.accum, step = #programs })
    return { loss = 0, eval_loss = evaluation and 0, steps = 0 } -- programs return zeros, too
  end
  data.begin()
  if evaluation then evaluation.prepare() end
  local flops = 0
  for _, program in ipairs(programs) do flops = flops + program:plan().flops * (program == micro and o.accum or 1) end
  local log = m.training_log(o, flops, programs[1])
  local result, warned, before = { steps = 0 }, false, o.progress.steps()
  for step = 1, o.steps do
    log.outside(core.begin_step, step, o.steps) -- which writes a profile
    local rate = o.schedule(step, o.steps)
    if type(rate) ~= "number" or rate ~= rate or math.abs(rate) == math.huge then
      core.fail(("the schedule must return a number, got %s at step %d"):format(plain(rate), step), { help = "a factor of the optimizer's lr" })
    end
    for i = 0, o.accum - 1 do
      data.fill(step, i)
      local program = step_program or micro
      local feeds = { tokens = data.tokens, targets = data.targets, step = before + step }
      if step_program then feeds.rate = rate else feeds.micro, feeds.first = i, i == 0 end
      program:start(feeds)
    end
    if finish then
      micro:finish()
      finish:start { rate = rate, step = before + step }
    end
    data.fill(step + 1, 0) -- while the device works
    local out = (step_program or finish):finish()
    result.loss, result.steps = out.loss, step
    if out.uneven == 1 and not warned then warn_uneven(o.accum) end
    warned, out.uneven = warned or out.uneven == 1, nil
    if out.loss ~= out.loss or out.grad_norm ~= out.grad_norm or math.abs(out.grad_norm) == math.huge then
      log.close()
      explain(o, data, before, step, out.loss, out.grad_norm)
    end
    o.progress.advance(o.batch.size)
    log.step(step, out.loss, out.grad_norm, rate * o.optimizer.lr)
    if o.on_step then o.on_step(step, out) end
    if evaluation and (step % o.eval_every == 0 or step == o.steps) then
      result.eval_loss = evaluation.loss(step)
      log.eval(step, result.eval_loss)
    end
    if core.stopped() then break end
  end
  core.begin_step()
  log.close()
  return result
end
