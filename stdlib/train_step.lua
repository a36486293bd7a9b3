-- The programs of a training step: forward pass, gradients, clipping, optimizer; with accumulation one of a microbatch and one
-- that applies their sums.
local core = require "mlua.core"
local m = require "mlua"
local dynamic = require "mlua.dynamic"
local extras = require "mlua.train_extras"
local kept = require "mlua.kept"
local loss_scale = require "mlua.loss_scale"
local options = require "mlua.train_options"
local repeated = require "mlua.repeated"
local packing = require "mlua.packing"
local own = require "mlua.train_inputs"

local step = {}

-- The sum of squares of all gradients.
local function square_sum(gradients)
  local total = (gradients[1] * gradients[1]):sum()
  local add = repeated.by_types(function(total, g) return total + (g * g):sum() end)
  for i = 2, #gradients do total = add(total, gradients[i]) end
  return total
end

-- Divide, clip, update; a step whose gradient is not finite changes no parameter (m.train stops there, or in f16 scales the loss less).
local function apply(o, parameters, gradients, total, count, feeds)
  local scaling = loss_scale.of(o)
  if scaling then gradients = scaling.gradients(gradients) end
  local norm = core.sqrt(m.scope("gradient norm", core.alone, square_sum, gradients)) / count
  local scale = 1 / count
  if o.clip and o.clip > 0 then scale = scale * core.minimum(1, o.clip / (norm + 1e-6)) end
  local ok = core.is_finite(norm)
  local scaled = {}
  core.alone(function()
    local scaled_of = repeated.by_types(function(g) return core.where(ok, g * scale, 0) end)
    for i, g in ipairs(gradients) do scaled[i] = scaled_of(g) end
  end)
  local function updates(step) return scaling and scaling.steps(step:cast("f32")) or step:cast("f32") end
  local inputs = { rate = core.where(ok, feeds.rate, 0), step = updates(feeds.step), alone = true }
  local steps = { [0] = inputs.step } -- feeds.step counts the model's steps in all trainings
  function inputs.step_of(p)
    local offset = o.progress and o.progress.offset(p) or 0
    steps[offset] = steps[offset] or updates(feeds.step - offset)
    return steps[offset]
  end
  m.scope("optimizer", o.optimizer.update, parameters, scaled, inputs)
  local out = { loss = total / count, grad_norm = norm }
  if scaling then scaling.guard(ok, out) end
  return out
end

local function token_inputs(o, more)
  if o.inputs then
    local specs = own.specs(o)
    for name, spec in pairs(more) do specs[name] = spec end
    return specs
  end
  local batch = core.axis(o.batch.name, o.batch.size // o.accum)
  local inputs = { tokens = { batch, o.seq, dtype = "i32" }, targets = { batch, o.seq, dtype = "i32" } }
  if o.pack == "document" then
    inputs.documents, inputs.positions = { batch, o.seq, dtype = "i32" }, { batch, o.seq, dtype = "i32" }
  end
  for name, spec in pairs(more) do inputs[name] = spec end
  return inputs
end

-- The numbers that a microbatch draws are those that its samples have in the whole batch (random.lua).
function step.cut_batch(o, feeds)
  m.context.micro = { axis = o.batch.name, size = o.batch.size // o.accum, count = o.accum, index = feeds.micro }
end

-- The inputs of a forward pass alone, which draws what training draws: in which step, and in which microbatch.
function step.forward_inputs(o)
  return token_inputs(o, { step = { dtype = "i64" }, micro = o.accum > 1 and { dtype = "i64" } or nil })
end

-- What a program is fed: the batch that `data` holds, and more.
function step.feeds(data, more)
  for name, host in pairs(data.feeds) do more[name] = host end
  return more
end

function step.forward_feeds(o, data, number, micro)
  return step.feeds(data, { step = number, micro = o.accum > 1 and micro or nil })
end

-- The loss of a microbatch, of its inputs or of tokens and targets: a sum, a count, and a list of further results.
function step.loss(o, feeds)
  local total, count, results
  if o.inputs then
    local inputs = {}
    for name in pairs(o.inputs) do inputs[name] = feeds[name] end
    total, count, results = o.loss(setmetatable(inputs, getmetatable(feeds)))
  elseif o.pack == "document" then
    total, count, results = packing.trace(o, feeds, function() return o.loss(feeds.tokens, feeds.targets) end)
  else
    total, count, results = o.loss(feeds.tokens, feeds.targets)
  end
  return total, count, extras.check(results, o.loss_function or o.loss)
end

-- The loss's further results in what a step returned: {name, value}.
function step.results(o, out)
  local list = {}
  for i, result in ipairs(o.results) do list[i] = { result.name, out[result.name] } end
  return list
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
  local scaling = loss_scale.of(o)
  for i, g in ipairs(m.grad(scaling and scaling.loss(loss) or loss, parameters)) do
    if core.is_zero(g) then
      missed[#missed + 1] = parameters[i]:name()
    else
      trained[#trained + 1], gradients[#gradients + 1] = parameters[i], o.grad_dtype == "bf16" and g:cast("bf16"):cast("f32") or g
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
---modules add losses, aux_loss, and what the loss returns beside its sum and count.
---@param o TrainOptions loss or model, optimizer, batch, seq, clip
---@param parameters? State[] default: those of the model
---@return Program
function m.step_program(o, parameters)
  o.accum = o.accum or 1
  o.loss = o.loss or options.default_loss(o)
  return m.compile(function(feeds)
    local total, count, results = step.loss(o, feeds)
    local added = m.added_loss(count)
    local trained, gradients = differentiate(o, added and total + added or total, parameters or m.parameters(o.model))
    local out = apply(o, trained, gradients, total, count, feeds)
    out.aux_loss = added and added / count
    for _, r in ipairs(results) do out[r.name] = r.sum / r.count end
    o.results = results
    return out
  end, token_inputs(o, { rate = {}, step = { dtype = "i64" } }), { name = "step", training = true })
end

local accumulators = {} -- by name, of totals by their state; a script's trainings share them, for each step starts afresh

function step.accumulator(name, axes)
  accumulators[name] = accumulators[name]
    or core.state { name = name, axes = axes, dtype = "f32", kind = "gradient", init = m.zeros(axes) }
  return accumulators[name]
end

local total_count = 0 -- of totals with an accumulator

-- Of what microbatches add to a total: its state is read as the step before left it.
function step.total_accumulator(state)
  if accumulators[state] then return accumulators[state] end
  local narrow, axes = { bf16 = true, f16 = true }, m.axes_of(state)
  local dtype = narrow[state:dtype()] and "f32" or state:dtype()
  total_count = total_count + 1
  accumulators[state] = core.state {
    name = ("accumulated total %d of %s"):format(total_count, state:name() or "no name"), axes = axes, dtype = dtype, kind = "gradient",
    init = m.full(axes, 0, dtype),
  }
  return accumulators[state]
end

-- 1 where numbers differ, by their sum and that of their squares, else 0.
local function uneven(sum, squares, count)
  return core.gt(squares * count, sum * sum * (1 + 1e-5)):cast "f32"
end

-- Each added loss is a mean over a count of its own, while sums of gradients over microbatches have one divisor, the loss's.
function step.warn_uneven(accum)
  if core.options().rank ~= 0 then return end
  core.write_error(("the loss counts more positions in some of a step's %d microbatches than in others: there the losses of m.add_loss weigh "
    .. "more, otherwise than in one batch\n"):format(accum))
end

-- The program of a microbatch, which adds to gradient states (or sets them: input `first`), and what applies these. `shape`
-- has batch, seq and accum: o, or under cp = "dynamic" those of a row. `lead`: the program that mixed microbatches began with.
local function accumulate(o, shape, name, lead)
  local sums, parameters = {}, nil -- of those that the loss reaches
  local loss_sum, loss_count = step.accumulator("accumulated loss", {}), step.accumulator("accumulated count", {})
  local added_sum, weights, totals
  local micro = m.compile(function(feeds)
    if not o.dynamic then step.cut_batch(o, feeds) end
    local total, count, results = step.loss(shape, feeds)
    local added, weight = m.added_loss(count)
    local function add(state, value) state:assign(core.where(feeds.first, 0, state:read()) + value) end
    local add_gradient = repeated.by_types(add)
    local gradients
    parameters, gradients = differentiate(o, added and total + added or total, m.parameters(o.model))
    core.alone(function()
      for i, g in ipairs(gradients) do
        local name = "gradient." .. parameters[i]:name()
        accumulators[name] = accumulators[name] or core.state_like(parameters[i], name, "gradient")
        sums[i] = accumulators[name]
        add_gradient(sums[i], g)
      end
    end)
    if added then
      added_sum = step.accumulator("accumulated aux_loss", {})
      add(added_sum, added)
    end
    if core.is_tensor(weight) then
      weights = { step.accumulator("accumulated weights", {}), step.accumulator("accumulated squares of weights", {}) }
      add(weights[1], weight)
      add(weights[2], weight * weight)
    end
    totals, m.context.totals = m.context.totals, {} -- finished by the other program
    for _, t in ipairs(totals) do
      t.sum = step.total_accumulator(t.state)
      add(t.sum, core.is_tensor(t.value) and t.value:cast(t.sum:dtype()) or t.value)
    end
    add(loss_sum, total)
    add(loss_count, count)
    for _, r in ipairs(results) do
      add(step.accumulator("accumulated result " .. r.name, {}), r.sum)
      add(step.accumulator("accumulated count of " .. r.name, {}), r.count)
    end
    o.results = results
  end, token_inputs(shape, { step = { dtype = "i64" }, micro = not o.dynamic and { dtype = "i64" } or nil, first = { dtype = "bool" } }), {
    name = name, training = true, microbatches = o.dynamic and (o.dynamic.most_slots or 2) or o.accum, group = shape.group,
    mixed = o.dynamic and o.dynamic.most_slots and (lead or true) or nil, plan_only = shape.plan_only, estimate = shape.estimate,
  })
  local function compile_finish(programs) return m.compile(function(feeds)
    local gradients = {}
    for i, sum in ipairs(sums) do gradients[i] = sum:read() end
    local out = apply(o, parameters, gradients, loss_sum:read(), loss_count:read(), feeds)
    out.aux_loss = added_sum and added_sum:read() / loss_count:read()
    out.uneven = weights and uneven(weights[1]:read(), weights[2]:read(), o.accum)
    for _, r in ipairs(o.results) do
      out[r.name] = step.accumulator("accumulated result " .. r.name):read() / step.accumulator("accumulated count of " .. r.name):read()
    end
    for _, t in ipairs(totals) do
      t.state:assign(t.sum:read())
      if t.update then t.update(t.sum:read()) end
    end
    return out
  end, { rate = {}, step = { dtype = "i64" } }, { name = "update", training = true, applies = programs }) end
  return micro, compile_finish
end

-- With accumulation: one program a microbatch, and one that applies what they have added up.
function step.accumulated_step(o)
  local micro, finish = accumulate(o, o, "microbatch")
  return micro, finish { micro }
end

-- The sums of a window's loss, for its errors alone, as pcall returns them.
local function traced_window(shape, ranks)
  return kept.traced(function()
    local feeds = {}
    m.context.training, m.context.group = true, ranks
    for name, axes in pairs(token_inputs(shape, {})) do feeds[name] = core.input(name, { axes[1], axes[2] }, axes.dtype) end
    local total, count, results = step.loss(shape, feeds)
    return dynamic.check(shape, total, count, results, feeds)
  end)
end

-- Programs are of rows, whose lengths no line of the script has: what they do not allow is found in windows.
local function check_window(o)
  local before = core.node_count()
  local ok, sums = traced_window(dynamic.window(o))
  dynamic.note_nodes(o, core.node_count() - before)
  if not ok then error(sums, 0) end
  dynamic.check_lengths(o, sums, packing.last.apart, function() return traced_window(dynamic.longer(o)) end)
end

-- Under cp = "dynamic": the rows, each with the program of its microbatches, in a check of large programs only some; and the program
-- that applies.
function step.dynamic_step(o)
  check_window(o)
  local made = {}
  local function make(row, lead)
    local finish
    row.program, finish = dynamic.planned(o, row, made)
    if row.program then return row.program, finish end
    row.program, finish = accumulate(o, row.o, ("microbatch of %s%d x %d"):format(row.rows > 1 and row.rows .. " rows of " or "", row.ranks, row.tokens), lead)
    return row.program, finish
  end
  local function make_all()
    local rows, programs = dynamic.rows(o), {}
    local first = dynamic.lead(o, rows)
    local _, finish = make(first)
    made = { first.program }
    local decisive = dynamic.decisive(o, rows)
    for _, row in ipairs(rows) do
      if row ~= first and (not decisive or decisive[row]) then
        _, finish = make(row, first.program)
        made[#made + 1] = row.program
      end
    end
    for _, row in ipairs(rows) do programs[#programs + 1] = row.program end
    return rows, finish(programs)
  end
  return core.together(function() return dynamic.choose(o, make, make_all) end)
end

return step
