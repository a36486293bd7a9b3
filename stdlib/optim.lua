-- Optimizers: Lua functions over tensors. A rule gets the parameter p, its gradient g (both f32),
-- its slots s (s.name reads a state of p's shape, zeros at first; assigning sets it for the next
-- step) and t (t.lr, t.step: f32 scalars; t.decay: the weight decay, 0 where the parameter is exempt;
-- t.options; t.parameter: the state), and returns the new p. The compiler fuses all of it into one
-- kernel a parameter, and a GPU runs those of all parameters in a few launches.
local core = require "mlua.core"
local m = require "mlua"
local synonyms = require "mlua.synonyms"

---What a rule of m.optimizer gets as `t`.
---@class RuleTerms
---@field lr Tensor the learning rate of this step, f32 without axes: the schedule's factor times the option lr
---@field step Tensor the step, f32 without axes, from 1
---@field decay number the option weight_decay; 0 where the parameter is exempt
---@field options table the options, with those of the parameter's group
---@field parameter State the parameter itself

---The result of m.adamw{...} and other constructors of m.optimizer.
---@class Optimizer
---@field name string "adamw"
---@field lr number the base rate, which schedules multiply
---@field options table all options
---@field update fun(parameters: State[], gradients: Tensor[], t: {rate: Tensor|number, step: Tensor|number}) assign new values to the parameters, in a program: rate is the schedule's factor, step an f32 scalar from 1

local RULE = "rule(p, g, s, t) returns the new p; s has slots, t what it is given: t.lr, t.step, t.decay, t.options, t.parameter"

-- Rounded to nearest, an average in bf16 would stop where a step changes it by less than half a unit in its last place; rounded
-- up or down by chance it is right on average. The draw follows from the seed, the state's name and the step.
local STEP_KEYS = 0x632be59bd9b4e019

-- The integer in the draw's key that is the state's own.
local function rounding_key(state, step)
  local key = core.hash(("%d rounds %s"):format(core.options().seed, state:name()))
  return core.is_tensor(step) and key or math.tointeger(step) * STEP_KEYS + key
end

local function stochastic_bf16(state, value, step)
  local key = rounding_key(state, step)
  if core.is_tensor(step) then key = step:cast "i64" * STEP_KEYS + key end
  return core.stochastic_bf16(value, core.random(key, m.axes_of(state))):cast "bf16"
end

-- Slots of one parameter: created on first reading, updated on assignment; what checks a rule's result, and that no slot is
-- only read, which would stay zero; and the slots in the order in which the rule asked for them.
local function slots(p, optimizer, dtype, step)
  local current, read, assigned, states, names = {}, {}, {}, {}, {}
  local function finish(new)
    for _, slot in ipairs(read) do
      if not assigned[slot] then
        core.fail(("m.%s: the rule reads the slot %s and never sets it"):format(optimizer.name, m.shown(slot)), { help = RULE })
      end
    end
    if not core.is_tensor(new) then core.fail(("m.%s: the rule must return a tensor, got %s"):format(optimizer.name, m.shown(new)), { help = RULE }) end
  end
  local function state_of(slot)
    if not states[slot] then states[slot], names[#names + 1] = m.slot_state(p, optimizer, slot, dtype), slot end
    return states[slot]
  end
  return setmetatable({}, {
    __index = function(_, slot)
      if current[slot] == nil then current[slot], read[#read + 1] = state_of(slot):read():cast "f32", slot end
      return current[slot]
    end,
    __newindex = function(_, slot, value)
      local state = state_of(slot)
      state:assign(state:dtype() == "bf16" and stochastic_bf16(state, value, step) or value)
      current[slot], assigned[slot] = value, true
    end,
  }), finish, names
end

local slot_states = setmetatable({}, { __mode = "k" }) -- by optimizer, then by parameter: {label = "adamw", states = by slot}
local counts = setmetatable({}, { __mode = "k" }) -- by parameter, then by name: optimizers that have made slots, also those collected since

---The state behind a slot: one for each parameter, optimizer and slot, called "wq.adamw.m". Those
---of a second AdamW over the same parameter are called "wq.adamw2.m".
---@param p State
---@param optimizer Optimizer
---@param slot string
---@param dtype? string "f32" (the default) or "bf16"
---@return State
function m.slot_state(p, optimizer, slot, dtype)
  local known = slot_states[optimizer] or {}
  slot_states[optimizer] = known
  local own = known[p]
  if not own then
    counts[p] = counts[p] or {}
    local number = (counts[p][optimizer.name] or 0) + 1
    counts[p][optimizer.name] = number
    own = { label = optimizer.name .. (number > 1 and number or ""), states = {} }
    known[p] = own
  end
  local state = own.states[slot]
  if not state then
    state = core.state_like(p, ("%s.%s.%s"):format(p:name(), own.label, slot), "optimizer", dtype)
    own.states[slot] = state
  end
  return state
end

---The states of an optimizer, by name: those of the programs that have been made so far.
---@param optimizer Optimizer
---@return State[]
function m.optimizer_states(optimizer)
  local list = {}
  if type(optimizer) ~= "table" or type(rawget(optimizer, "update")) ~= "function" then
    core.fail("m.optimizer_states takes an optimizer, got " .. m.shown(optimizer), { help = "m.adamw{lr = 1e-3} makes one" })
  end
  for _, own in pairs(slot_states[optimizer] or {}) do
    for _, state in pairs(own.states) do list[#list + 1] = state end
  end
  table.sort(list, function(a, b) return a:name() < b:name() end)
  return list
end

---Say once, on standard error, that parameters are not trained: `text` and their names.
---@param names string[]
---@param text string
function m.report_untrained(names, text)
  local options, most = core.options(), 6
  if options.rank ~= 0 or options.quiet then return end
  local listed = table.concat(names, ", ", 1, #names > most and most - 1 or #names)
  core.write_error(text .. listed .. (#names > most and (" and %d more"):format(#names - most + 1) or "") .. "\n")
end

-- What others' optimizers have: step, zero_grad, param_groups.
local function missing_field(optimizer, key)
  local name = tostring(key)
  core.fail(("m.%s: an optimizer has no %s"):format(rawget(optimizer, "name"), name), {
    help = synonyms.help(name) or "it has name, lr, options and update(parameters, gradients, t)",
  })
end

local function check_update(name, parameters, gradients, t)
  local usage = "update(parameters, gradients, {rate = 1, step = i.step}), with m.parameters(model) and m.grad(loss, parameters)"
  if type(parameters) ~= "table" or m.is_module(parameters) or #parameters == 0 then
    core.fail(("m.%s: update takes a list of parameters, got %s"):format(name, m.shown(parameters)), { help = usage })
  end
  if type(gradients) ~= "table" or #gradients ~= #parameters then
    core.fail(("m.%s: update takes a gradient for each of %d parameters, got %s"):format(name, #parameters,
      type(gradients) == "table" and #gradients or m.shown(gradients)), { help = usage })
  end
  local rate, step = type(t) == "table" and t.rate, type(t) == "table" and (t.step or t.step_of)
  if not rate or not step then
    core.fail(("m.%s: update takes a third argument, with %s"):format(name, rate and "step" or step and "rate" or "rate and step"), {
      help = usage .. "; rate is a factor of lr, step counts from 1",
    })
  end
end

local rules = setmetatable({}, { __mode = "k" }) -- of this file, which call no function of a script

local function own(rule)
  rules[rule] = true
  return rule
end

-- A text that is equal for equal options of a group.
local function text_of(options)
  local parts = {}
  for key, value in pairs(options) do parts[#parts + 1] = ("%s=%s"):format(key, math.type(value) == "float" and ("%a"):format(value) or tostring(value)) end
  return table.concat(parts, " ")
end

-- update(p, g, options, step) of one program, which calls the rule for the first parameter of each class alone: of the same
-- types, options, step and weight decay. For the others the nodes are made that it made for that one.
local function updates_by_class(optimizer, update)
  local texts, by_options = { [optimizer.options] = "" }, {}
  local function leaves_of(class, p, g, dtype, step)
    local leaves = { p, g }
    for _, slot in ipairs(class.slots) do leaves[#leaves + 1] = m.slot_state(p, optimizer, slot, dtype) end
    for i = 1, dtype == "bf16" and #class.slots or 0 do leaves[#leaves + 1] = rounding_key(leaves[2 + i], step) end
    return table.unpack(leaves)
  end
  return function(p, g, options, step)
    local text = texts[options] or text_of(options)
    local by_step = by_options[text] or {}
    by_options[text] = by_step
    local classes = by_step[step] or {}
    by_step[step] = classes
    local key = core.alike(p, g) * 2 + (m.attributes(p).decay and 1 or 0)
    local class = classes[key]
    if class and class.recording:again(leaves_of(class, p, g, options.state_dtype, step)) then return end
    local recording, slots = core.record(update, p, g, options, step)
    class = { recording = recording, slots = slots }
    if recording:close({}, leaves_of(class, p, g, options.state_dtype, step)) then classes[key] = class end
  end
end

---Make an optimizer's constructor from its defaults and rule. All take `lr`, `weight_decay`,
---`groups = function(name, p)`, which returns option overrides for a parameter, or nil, and `state_dtype`: "bf16" halves the
---memory of slots, which are then rounded stochastically and read as f32. rule(p, g, s, t) returns the
---new value of the parameter p from its gradient g (both f32); s.NAME reads a slot, a state of p's axes that is
---zero at first, and assigning it sets its value for the next step.
---@param name string
---@param defaults table options and their defaults
---@param rule fun(p: Tensor, g: Tensor, s: table<string, Tensor>, t: RuleTerms): Tensor
---@return fun(options?: table): Optimizer
function m.optimizer(name, defaults, rule)
  if type(name) ~= "string" or type(defaults) ~= "table" or type(rule) ~= "function" then
    core.fail(("m.optimizer takes a name, defaults and a rule, got %s, %s and %s"):format(m.shown(name), m.shown(defaults), m.shown(rule)), {
      help = 'm.optimizer("mine", { lr = 0.1 }, function(p, g, s, t) return p - t.lr * g end)',
    })
  end
  local known = { "groups", "state_dtype" }
  for key in pairs(defaults) do known[#known + 1] = key end
  table.sort(known)
  local function merged(base, over)
    local result = {}
    for key, value in pairs(base) do result[key] = value end
    for key, value in pairs(over or {}) do result[key] = value end
    return result
  end
  local function check(options, where)
    m.check_options(name .. where, options, known)
    for key, value in pairs(options or {}) do
      local wanted = key == "groups" and "function" or key == "state_dtype" and "string" or type(defaults[key])
      local finite = type(value) ~= "number" or value - value == 0
      if type(value) ~= wanted or not finite then
        core.fail(("m.%s%s: %s must be a %s, got %s"):format(name, where, key, finite and wanted or "finite number", m.shown(value)))
      end
      if key == "state_dtype" and value ~= "f32" and value ~= "bf16" then
        core.fail(('m.%s%s: state_dtype must be "f32" or "bf16", got %s'):format(name, where, m.shown(value)))
      end
      if (key == "beta1" or key == "beta2") and (value < 0 or value >= 1) then
        core.fail(("m.%s%s: %s must be at least 0 and less than 1, got %s"):format(name, where, key, m.shown(value)), {
          help = ("at each step the running average keeps this share of itself; the default is %s"):format(m.shown(defaults[key])),
        })
      end
    end
  end
  return function(options, ...)
    check(options, "")
    if select("#", ...) > 0 then
      core.fail(("m.%s takes one table of options, got %s too"):format(name, m.shown((...))), { help = ("m.%s{lr = %g}"):format(name, defaults.lr or 0.01) })
    end
    local all = merged(defaults, options)
    local optimizer = setmetatable({ name = name, lr = all.lr, options = all }, { __index = missing_field })
    -- Assign new values to the parameters. t: {rate = the schedule's factor, step = f32 scalars}; step_of(p), where given, is
    -- the step of one parameter, and alone says that it is no function of a script.
    function optimizer.update(parameters, gradients, t)
      if parameters == optimizer then
        core.fail("update is no method: it does not take the optimizer", { help = "call it with a dot: optimizer.update(parameters, gradients, t)" })
      end
      check_update(name, parameters, gradients, t)
      local untrained = {}
      local function update(p, g, o, step)
        local value, own, finish, names = p:read(), slots(p, optimizer, o.state_dtype, step)
        local new = rule(value, g, own, {
          lr = t.rate * o.lr, step = step, options = o, parameter = p,
          decay = m.attributes(p).decay and o.weight_decay or 0,
        })
        finish(new)
        p:assign(new)
        return names
      end
      local repeated = rules[rule] and (t.alone or not t.step_of) and updates_by_class(optimizer, update)
      local function update_all()
        for i, p in ipairs(parameters) do
          local g = gradients[i]
          if core.is_zero(g) then untrained[#untrained + 1] = p:name() end
          local group = all.groups and all.groups(p:name(), p)
          if all.groups then check(group, " groups") end
          local one = repeated or update
          one(p, g, group and merged(all, group) or all, t.step_of and t.step_of(p) or t.step)
        end
      end
      if repeated and not all.groups then core.alone(update_all) else update_all() end
      if #untrained > 0 then
        m.report_untrained(untrained, ("m.%s: the gradients of %d of %d parameters are 0, for no loss depends on them: "):format(
          name, #untrained, #parameters))
      end
    end
    return optimizer
  end
end

-- A running average with decay beta. 1 - beta in f32 has all its digits where beta, as near 1 as
-- 0.99999, has lost some: an average of beta * average + (1 - beta) * x would settle 0.1 % off.
local function average(past, beta, x) return past + (1 - beta) * (x - past) end

-- 1 - beta^step: the sum of the weights in an average that began at 0; traced once for all parameters.
local weights_of = setmetatable({}, { __mode = "k" })
local function weights(beta, step)
  if not core.is_tensor(step) then return -core.expm1(math.log(beta) * step) end
  local known = weights_of[step] or {}
  weights_of[step] = known
  known[beta] = known[beta] or -core.expm1(math.log(beta) * step)
  return known[beta]
end

local function adamw_rule(p, g, s, t)
  local o = t.options
  s.m, s.v = average(s.m, o.beta1, g), average(s.v, o.beta2, g * g)
  local mean, variance = s.m / weights(o.beta1, t.step), s.v / weights(o.beta2, t.step)
  return p - t.lr * (mean / (core.sqrt(variance) + o.eps) + t.decay * p)
end

---Adam with decoupled weight decay (Loshchilov and Hutter 2017).
---@param options? {lr: number, beta1: number, beta2: number, eps: number, weight_decay: number, state_dtype: string, groups: fun(name: string, p: State): table?}
---@return Optimizer
m.adamw = m.optimizer("adamw", { lr = 3e-4, beta1 = 0.9, beta2 = 0.95, eps = 1e-8, weight_decay = 0.1 }, own(adamw_rule))

---Gradient descent with momentum.
---@param options? {lr: number, momentum: number, nesterov: boolean, weight_decay: number, state_dtype: string, groups: fun(name: string, p: State): table?}
---@return Optimizer
m.sgd = m.optimizer("sgd", { lr = 0.01, momentum = 0.9, nesterov = false, weight_decay = 0 }, own(function(p, g, s, t)
  local o = t.options
  g = g + t.decay * p
  if o.momentum == 0 then return p - t.lr * g end
  s.momentum = o.momentum * s.momentum + g
  return p - t.lr * (o.nesterov and g + o.momentum * s.momentum or s.momentum)
end))

---Lion: the sign of an interpolated momentum (Chen et al. 2023).
---@param options? {lr: number, beta1: number, beta2: number, weight_decay: number, state_dtype: string, groups: fun(name: string, p: State): table?}
---@return Optimizer
m.lion = m.optimizer("lion", { lr = 1e-4, beta1 = 0.9, beta2 = 0.99, weight_decay = 0.1 }, own(function(p, g, s, t)
  local o = t.options
  local direction = core.sign(o.beta1 * s.m + (1 - o.beta1) * g)
  s.m = o.beta2 * s.m + (1 - o.beta2) * g
  return p - t.lr * (direction + t.decay * p)
end))

-- A tensor as a matrix: its axes, in order, cut in two where the halves are most alike in size.
local function as_matrix(x)
  local axes = m.axes_of(x)
  local cut, best = 1, math.huge
  for i = 1, #axes - 1 do
    local skew = 0
    for j, axis in ipairs(axes) do skew = skew + (j <= i and 1 or -1) * math.log(axis.size) end
    if math.abs(skew) < best then cut, best = i, math.abs(skew) end
  end
  local function fold(from, to, name)
    local merged = axes[from]
    for i = from + 1, to do
      local wider = core.axis(name .. i, merged.size * axes[i].size)
      x = x:merge(merged, axes[i], wider)
      merged = wider
    end
    x = x:rename(merged.name, name)
    return merged.size
  end
  local rows = fold(1, cut, "muon_row")
  local columns = fold(cut + 1, #axes, "muon_column")
  local function back(y)
    local function unfold(from, to, name)
      for i = to, from + 1, -1 do
        local inner = 1
        for j = from, i - 1 do inner = inner * axes[j].size end
        local outer = i == from + 1 and axes[from] or core.axis(name .. "outer" .. i, inner)
        y = y:split(name, outer, axes[i])
        name = outer.name
      end
      if from == to then y = y:rename(name, axes[from].name) end
    end
    unfold(1, cut, "muon_row")
    unfold(cut + 1, #axes, "muon_column")
    return y
  end
  return x, rows, columns, back
end

-- The nearest semi-orthogonal matrix by five Newton-Schulz steps (Jordan et al. 2024).
local function orthogonalize(x, rows, columns)
  local a, b, c = 3.4445, -4.7750, 2.0315
  local short = rows <= columns and "muon_row" or "muon_column"
  local long = rows <= columns and "muon_column" or "muon_row"
  local other = short .. "'"
  x = (x * core.rsqrt((x * x):sum() + 1e-14)):cast(core.compute_dtype())
  for _ = 1, 5 do
    local gram = x:dot(x:rename(short, other), long)
    local squared = gram:dot(gram:rename { [short] = other, [other] = short .. "''" }, other)
    local poly = b * gram + c * squared:rename(short .. "''", other)
    x = a * x + poly:dot(x:rename(short, other), other)
  end
  return x:cast("f32")
end

---Muon: orthogonalized momentum for matrices (Jordan et al. 2024), scaled to AdamW's update size (Liu
---et al. 2025) so that both share one rate; AdamW for vectors and for tensors with a vocab axis.
---@param options? {lr: number, momentum: number, beta1: number, beta2: number, eps: number, weight_decay: number, state_dtype: string, groups: fun(name: string, p: State): table?}
---@return Optimizer
m.muon = m.optimizer("muon", {
  lr = 3e-4, momentum = 0.95, beta1 = 0.9, beta2 = 0.95, eps = 1e-8, weight_decay = 0.1, adamw = false,
}, own(function(p, g, s, t)
  local o = t.options
  local has_vocab = false
  for _, name in ipairs(p:axes()) do has_vocab = has_vocab or name == "vocab" end
  if o.adamw or has_vocab or not m.attributes(t.parameter).decay or #p:axes() < 2 then return adamw_rule(p, g, s, t) end
  s.momentum = o.momentum * s.momentum + g
  local x, rows, columns, back = as_matrix(g + o.momentum * s.momentum)
  local update = back(orthogonalize(x, rows, columns)) * (0.2 * math.sqrt(math.max(rows, columns)))
  return p - t.lr * (update + t.decay * p)
end))
