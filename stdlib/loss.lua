-- Losses. A loss is a sum and a count; only the runtime divides, so that no layout and no
-- accumulation changes what is learned.
local core = require "mlua.core"
local m = require "mlua"
local packing = require "mlua.packing"

-- The set of the names of axes that an option lists.
local function names_of(list)
  local set = {}
  for _, axis in ipairs(type(list) == "table" and list or { list }) do
    local name = type(axis) == "userdata" and not core.is_tensor(axis) and axis.name or axis
    if type(name) ~= "string" then
      core.fail("cross_entropy's broadcast lists axes, got " .. m.shown(axis), { help = 'broadcast = {"heads"}' })
    end
    set[name] = true
  end
  return set
end

local function cross_entropy(logits, targets, axis, named, options)
  local x = core.widen(logits)
  local n = x:size(axis)
  local log, shift = m.logsumexp_parts(x, axis)
  local lse = log + shift
  local positions = {}
  for _, name in ipairs(lse:axes()) do positions[name] = true end
  for _, name in ipairs(targets:axes()) do
    if not positions[name] then
      core.fail(("cross_entropy: the targets have axis %q, which the logits have not"):format(name), {
        help = "targets have the axes of the logits without " .. axis,
      })
    end
  end
  for _, name in ipairs(lse:axes()) do
    if not targets:has(name) and not named[name] then
      core.fail_axis(logits, name, ("cross_entropy: the logits have the axis %q, which the targets lack"):format(name),
        ("sum over it there, as :dot(w, %q) does; {broadcast = {%q}} compares all along it with the same targets"):format(name, name))
    end
  end
  for name in pairs(named) do
    if not positions[name] then
      core.fail(("cross_entropy: broadcast names %q, which is no axis of the logits beside %s"):format(name, axis))
    end
  end
  targets = targets:broadcast(m.axes_of(lse)) -- each position counts, also where targets are shared
  local is_target = core.eq(core.iota(core.axis(axis, n), "i32"):broadcast(m.axes_of(x)), targets)
  core.declare_index(is_target, targets, n, "cross_entropy", options.ignore or -1)
  local picked = core.where(is_target, x, 0):sum(axis)
  local smoothing = options.label_smoothing or 0
  local loss = log + (shift - picked)
  if smoothing > 0 then loss = log + (1 - smoothing) * (shift - picked) + smoothing / n * (shift - x):sum(axis) end
  if (options.z_loss or 0) > 0 then loss = loss + options.z_loss * lse * lse end
  local counts = core.ne(targets, options.ignore or -1)
  return core.where(counts, loss, 0):sum(), counts:cast("f32"):sum()
end

---Cross-entropy between logits and target ids, as a sum over all positions and the number of
---positions that count. `label_smoothing` mixes the target with the uniform distribution (Szegedy
---et al. 2015); `z_loss` adds z_loss * logsumexp^2 (Chowdhery et al. 2022); positions whose target
---is `ignore` (default -1) count for nothing; a program that is fed other targets outside of the axis is an error before it
---runs. Targets have all axes of the logits but `axis`; those that they
---lack are named by `broadcast`, such as {"samples"}: all logits along them are held against the same targets,
---and each counts.
---@param logits Tensor with axis `axis`
---@param targets Tensor i32, the other axes of logits
---@param options? {axis: Axis|string, label_smoothing: number, z_loss: number, ignore: integer, broadcast: (Axis|string)[]}
---@return Tensor sum f32
---@return Tensor count f32
function m.cross_entropy(logits, targets, options)
  m.check_options("cross_entropy", options, { "axis", "label_smoothing", "z_loss", "ignore", "broadcast" })
  options = options or {}
  m.check_tensor("cross_entropy", logits, "logits")
  m.check_tensor("cross_entropy", targets, "targets")
  for _, key in ipairs { "label_smoothing", "z_loss" } do
    local value = options[key]
    if value ~= nil and (type(value) ~= "number" or not (value >= 0)) then
      core.fail(("cross_entropy's %s must be a number, 0 or more, got %s"):format(key, m.shown(value)))
    end
  end
  local axis = options.axis or "vocab"
  if type(axis) == "userdata" and not core.is_tensor(axis) then axis = axis.name end
  if targets:dtype() ~= "i32" and logits:dtype() == "i32" then
    core.fail("cross_entropy's logits are i32 and its targets are not", { help = "the logits come first: m.cross_entropy(logits, targets)" })
  end
  if not logits:has(axis) then
    core.fail(("cross_entropy: the logits have no axis %q: their axes are %s"):format(axis, table.concat(logits:axes(), ", ")), {
      help = logits:dtype() == "i32" and "a loss gets tokens and targets: m.cross_entropy(model(tokens), targets)"
        or 'm.cross_entropy(logits, targets, {axis = "classes"}) names the one of the classes',
    })
  end
  if targets:dtype() ~= "i32" then
    core.fail("the targets of cross_entropy must be i32, not " .. targets:dtype(), { help = 'cast them: targets:cast("i32")' })
  end
  local filled = (options.ignore or -1) == -1 and targets or nil -- what fills rows up has the target -1
  return m.scope("loss", packing.by_targets, filled, cross_entropy, logits, targets, axis, names_of(options.broadcast), options)
end

---How many of the largest logits are the targets, and how many targets count, as a loss's extra results have them:
---return sum, count, { accuracy = m.accuracy(logits, targets) }. Targets as for m.cross_entropy.
---@param logits Tensor with axis `axis`
---@param targets Tensor i32, the other axes of logits
---@param options? {axis: Axis|string, ignore: integer} default vocab and -1
---@return Tensor[] the sum and the count, f32
function m.accuracy(logits, targets, options)
  m.check_options("accuracy", options, { "axis", "ignore" })
  m.check_tensor("accuracy", logits, "logits")
  m.check_tensor("accuracy", targets, "targets")
  local o = options or {}
  local axis = o.axis or "vocab"
  core.check_axes("accuracy", logits, axis)
  local counts = core.ne(targets, o.ignore or -1)
  local right = core.logical_and(core.eq(core.stop_gradient(logits):argmax(axis), targets), counts)
  return { right:cast("f32"):sum(), counts:cast("f32"):sum() }
end

---Add a loss of a module's own, such as the balance loss of a router, to that of the program being
---traced: m.train minimizes the mean of its loss plus sum / count for each, and reports the latter as
---aux_loss. `count` is what the sum is over (tokens); outside of a program it does nothing. Over microbatches (accum, pipeline
---stages) those means are averaged as the loss is: where it counts more positions in some, a run says so.
---@param sum Tensor f32
---@param count number|Tensor
function m.add_loss(sum, count)
  if core.scanning() then
    core.fail("add_loss in the step of a scan, which runs at each position", { help = "return it beside the step's output, and add it after the scan" })
  end
  m.check_tensor("add_loss", sum, "the sum")
  if #sum:axes() > 0 then
    core.fail(("add_loss takes a sum without axes, got %s"):format(tostring(sum)), { help = "x:sum() sums over all of them" })
  end
  if type(count) ~= "number" and not core.is_tensor(count) then
    core.fail("add_loss takes the number of items that its sum is over, got " .. m.shown(count), {
      help = 'm.add_loss(loss, x:size "batch" * x:size "seq"), or 1 for a mean',
    })
  end
  local list = m.context.losses
  if list then list[#list + 1] = { sum, count } end
end

---What m.add_loss was given so far in this program, as a sum over `count` items, to be added to a loss
---that is one; nil where nothing was added. Also the sum of what each was multiplied by.
---@param count number|Tensor
---@return Tensor?
---@return Tensor|number?
function m.added_loss(count)
  local total, weights
  for _, added in ipairs(m.context.losses or {}) do
    local weight = count / added[2]
    local part = added[1] * weight
    total, weights = total and total + part or part, weights and weights + weight or weight
  end
  return total, weights
end

---A sum over a whole training step, of whatever microbatches it is cut into: `state` becomes the sum
---of `value` over them, and at the step's end update(total) may assign states by it; until then it
---is read as the step before left it. Only while training; elsewhere it does nothing.
---@param state State
---@param value Tensor|number
---@param update? fun(total: Tensor)
function m.step_total(state, value, update)
  if getmetatable(state) ~= "state" or not core.is_tensor(value) and type(value) ~= "number" or update and type(update) ~= "function" then
    core.fail(("step_total takes a state, a value and a function, got %s, %s and %s"):format(m.shown(state), m.shown(value), m.shown(update)), {
      help = "m.step_total(self.load, counts, function(total) ... end)",
    })
  end
  local list = m.context.training and m.context.totals
  if list then list[#list + 1] = { state = state, value = value, update = update } end
end

---Assign the totals of a step that is one program (m.compile does).
function m.finish_totals()
  local list = m.context.totals
  m.context.totals = {}
  for _, total in ipairs(list) do
    total.state:assign(total.value)
    if total.update then total.update(total.value) end
  end
end

---The axes of a tensor, as Axis objects in its order.
---@param x Tensor
---@return Axis[]
function m.axes_of(x)
  m.check_tensor("axes_of", x)
  local axes = {}
  for i, name in ipairs(x:axes()) do axes[i] = core.axis(name, x:size(name)) end
  return axes
end
