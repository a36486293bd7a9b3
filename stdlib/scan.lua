-- m.scan: a recurrence along an axis, from its step.
local core = require "mlua.core"
local m = require "mlua"
local packing = require "mlua.packing"

local USAGE = 'm.scan(function(s, t) local h = s.h * t.g + t.x; return { h = h }, h end, { axis = "seq", state = { h = m.zeros{...} }, inputs = { x = x, g = g } })'
local OPTIONS = { "axis", "state", "inputs", "reverse", "resets" }

-- A table of tensors as a list of {key, tensor}, in one order in every process; a tensor alone has the key 1.
local function listed(what, value)
  if core.is_tensor(value) then return { { 1, value } }, true end
  if type(value) ~= "table" then
    core.fail(("scan's %s must be a table of tensors, got %s"):format(what, m.shown(value)), { help = USAGE })
  end
  local list = {}
  for key, tensor in pairs(value) do
    if not core.is_tensor(tensor) then
      core.fail(("scan's %s.%s must be a tensor, got %s"):format(what, tostring(key), m.shown(tensor)), { help = USAGE })
    end
    list[#list + 1] = { key, tensor }
  end
  return list, false
end

local function keyed(list, single, values)
  if single then return values[1] end
  local t = {}
  for i, pair in ipairs(list) do t[pair[1]] = values[i] end
  return t
end

-- The axis's name and its size: that of the inputs, or of an axis as m.axes makes it.
local function length_of(axis, inputs)
  local name = type(axis) == "string" and axis or axis.name
  if #inputs > 0 and inputs[1][2]:has(name) then return name, inputs[1][2]:size(name) end
  if type(axis) == "string" then
    if #inputs > 0 then return name, 0 end -- scan_parameter says which input has no such axis
    core.fail("scan without inputs needs an axis with its size", { help = "axis = A.seq" })
  end
  return name, axis.size
end

local function read_options(options)
  m.check_options("scan", options, OPTIONS)
  local axis = options.axis
  if type(axis) ~= "string" and not (type(axis) == "userdata" and not core.is_tensor(axis)) then
    core.fail("scan's axis must be an axis or its name, got " .. m.shown(axis), { help = 'axis = "seq"' })
  end
  if options.state == nil then core.fail("scan needs state, the tensors that it begins with", { help = USAGE }) end
  if options.reverse ~= nil and type(options.reverse) ~= "boolean" then
    core.fail("scan's reverse must be true or false, got " .. m.shown(options.reverse))
  end
  if options.resets ~= nil then
    m.check_tensor("scan", options.resets, "resets")
    if options.resets:dtype() ~= "bool" then
      core.fail(("scan's resets must be bool, got %s"):format(options.resets:dtype()), { help = 'core.ne(document, previous): true where the state begins anew' })
    end
  end
end

-- Which microbatch is being traced, where `whole` has the axis of the batch at its full size; else nil.
local function cut_of(whole)
  local micro = m.context.micro
  return micro and micro.count > 1 and whole:has(micro.axis) and whole:size(micro.axis) == micro.size * micro.count and micro or nil
end

-- The tensor's batch as {microbatch, batch of a microbatch}.
local function by_microbatch(tensor, micro)
  local part = core.axis("part_of_batch", micro.count)
  return tensor:split(micro.axis, part, core.axis(micro.axis, micro.size)), part
end

-- A state as long as the batch begins with what belongs to the microbatch that is being traced.
local function in_microbatch(tensor)
  local micro = cut_of(tensor)
  return micro and by_microbatch(tensor, micro):gather(micro.index:cast "i32", "part_of_batch") or tensor
end

-- The counterpart: what a microbatch assigns to a state as long as the batch are its own rows.
core.assigning(function(state, value)
  local whole = m.context.micro and state:read()
  local micro = whole and cut_of(whole)
  if not micro or not value:has(micro.axis) or value:size(micro.axis) ~= micro.size then return value end
  local before, part = by_microbatch(whole, micro)
  local mine = core.eq(core.iota(part), micro.index:cast "i32")
  return core.where(mine, value:broadcast(m.axes_of(before)), before):merge("part_of_batch", micro.axis, micro.axis)
end)

-- States and outputs are those of one position.
local function check_axis(what, key, tensor, axis)
  if not tensor:has(axis) then return end
  core.fail(("scan's %s has the axis %q of the scan: %s"):format(key == 1 and what or ("%s.%s"):format(what, key), axis, m.shown(tensor)), {
    help = ("x:rename(%q, \"other\") keeps it under another name"):format(axis),
  })
end

-- A state keeps its dtype and axes.
local function check_type(name, state, next)
  local same = state:dtype() == next:dtype() and #state:axes() == #next:axes()
  for _, axis in ipairs(m.axes_of(state)) do same = same and next:has(axis) and next:size(axis) == axis.size end
  if same then return end
  core.fail(("scan: state %s changes from %s to %s"):format(m.shown(name), m.shown(state), m.shown(next)), {
    at = next, help = "a state keeps its dtype and axes from step to step: cast or reduce its new value, or begin with another initial one",
  })
end

-- What the step returned: the new states in the order of `states`, and its output.
local function check_states(states, single, given)
  if single then
    if core.is_tensor(given) then return { given } end
    core.fail("scan's step must return the new state, a tensor, got " .. m.shown(given), { help = "return new_state, output" })
  end
  if type(given) ~= "table" then
    core.fail("scan's step must return a table of the new states, got " .. m.shown(given), { help = "return { h = h }, output" })
  end
  local next, known = {}, {}
  for i, pair in ipairs(states) do
    known[pair[1]], next[i] = true, given[pair[1]]
    if not core.is_tensor(next[i]) then
      core.fail(("scan's step must return state %s, a tensor, got %s"):format(tostring(pair[1]), m.shown(next[i])), { help = "return { h = h }, output" })
    end
  end
  for key in pairs(given) do
    if not known[key] then core.fail(("scan's step returns a state %s that scan was not given"):format(tostring(key)), { help = "state = { h = m.zeros{...} } says what each begins with" }) end
  end
  return next
end

-- Call the step; what it must not do is refused meanwhile.
local function trace(step, position, s, t)
  local positions, before = m.context.positions, core.scanning(true)
  m.context.positions = table.move(positions or {}, 1, #(positions or {}), 1, {})
  table.insert(m.context.positions, position)
  local result = table.pack(pcall(step, s, t))
  m.context.positions = positions
  core.scanning(before)
  if not result[1] then error(result[2], 0) end
  return result[2], result[3]
end

---A recurrence: step(s, t) is applied at each position of `axis`, with the states and the slices of the inputs, and returns
---the new states and an output: a tensor, a table of tensors or nothing. It is traced once, whatever the length. Tensors
---without the axis may be used in it as they are. Gives the outputs of all positions, the axis first, and the states after
---the last; both have gradients, as the initial states do. A state keeps its dtype and axes. With `reverse` the last
---position comes first. Where `resets`, a bool tensor with the axis, is true, the state begins anew before the step.
---@param step fun(s: table, t: table): table, Tensor|table|nil
---@param options {axis: Axis|string, state: table<string, Tensor>|Tensor, inputs: table<string, Tensor>|Tensor|nil, reverse: boolean|nil, resets: Tensor|nil}
---@return Tensor|table|nil outputs
---@return table|Tensor states
function m.scan(step, options)
  if type(step) ~= "function" then core.fail("scan's step must be a function, got " .. m.shown(step), { help = USAGE }) end
  if type(options) ~= "table" then core.fail("scan takes its options in a table, got " .. m.shown(options), { help = USAGE }) end
  read_options(options)
  local states, one_state = listed("state", options.state)
  local inputs, one_input = listed("inputs", options.inputs == nil and {} or options.inputs)
  local axis, length = length_of(options.axis, inputs)
  local call = { axis = axis, length = length, reverse = options.reverse, inputs = {}, states = {}, names = {} }
  local function input(tensor)
    local parameter = core.scan_parameter(tensor, axis, length)
    table.move({ parameter, tensor }, 1, 2, #call.inputs + 1, call.inputs)
    return parameter
  end
  local s, t = {}, {}
  for i, pair in ipairs(inputs) do t[i] = input(pair[2]) end
  local reset = options.resets and input(options.resets)
  local position = input(core.iota(core.axis(axis, length), "i64"))
  for i, pair in ipairs(states) do
    check_axis("state", pair[1], pair[2], axis)
    local initial = in_microbatch(pair[2])
    local parameter = core.scan_parameter(initial)
    table.move({ parameter, initial }, 1, 2, #call.states + 1, call.states)
    call.names[i] = tostring(pair[1])
    s[i] = reset and core.where(reset, initial, parameter) or parameter
  end
  local given, output = trace(step, position, keyed(states, one_state, s), keyed(inputs, one_input, t))
  call.next = check_states(states, one_state, given)
  for i, pair in ipairs(states) do check_type(pair[1], call.states[2 * i - 1], call.next[i]) end
  local outputs, one_output = {}, false
  if output ~= nil then outputs, one_output = listed("output", output) end
  call.stacked = {}
  for i, pair in ipairs(outputs) do
    check_axis("output", pair[1], pair[2], axis)
    call.stacked[i] = pair[2]
  end
  local made
  if options.reverse then made = core.scan(call) else made = packing.apart(options.resets, core.scan, call) end
  local y = output ~= nil and keyed(outputs, one_output, made) or nil
  return y, keyed(states, one_state, table.move(made, #outputs + 1, #made, 1, {}))
end
