-- Randomness: a counter generator keyed by the seed and a name; the same under every layout.
local core = require "mlua.core"
local m = require "mlua"
local repeated = require "mlua.repeated"

-- What m.compile is tracing, while it does: {step = i64 tensor or nil, sites = calls so far, idle = whether a dropout drops nothing, micro = nil or which microbatch of a
-- step it is: {axis = the name of the batch's axis, size = what a microbatch has of it, count = of microbatches, index = i64 tensor}}.
m.context = { sites = 0 }

-- Each element's index in the tensor of the whole batch, of which `axes` are a microbatch's; nil where they are not.
local function index_in_batch(axes, micro)
  local index, stride, cut = nil, 1, false
  for i = #axes, 1, -1 do
    local axis = axes[i]
    local at, count = core.iota(axis, "i64"), 1
    if axis.name == micro.axis and axis.size == micro.size then at, count, cut = at + micro.index * axis.size, micro.count, true end
    at = (at * stride):broadcast(axes)
    index = index and index + at or at
    stride = stride * axis.size * count
  end
  return cut and index or nil
end

-- The samples of a microbatch get the numbers that they have in the whole batch: it does not matter into what a step is cut.
local function random(key, axes)
  local micro = m.context.micro
  return core.random(key, axes, micro and index_in_batch(axes, micro))
end

-- Box and Muller 1958.
local function normal(draw, axes, key, next)
  local radius = core.sqrt(-2 * core.log(1 - draw(key, axes)))
  return radius * core.cos(6.283185307179586 * draw(next or key + 1, axes))
end

-- An i64 key that differs at each call site of a program, and at each step where there is one.
local function site_key()
  local context = m.context
  context.sites = context.sites + 1
  local key = core.hash(("%d site %d"):format(core.options().seed, context.sites))
  for depth, position in ipairs(context.positions or {}) do key = key + position * (0x2545f4914f6cdd1d * (2 * depth - 1)) end
  if context.step then return context.step * 0x632be59bd9b4e019 + key end
  return key
end

---Uniform in [0, 1). Without a key the numbers differ at each call and, in m.train and in programs with an input `step`
---of dtype i64, at each step; they follow the seed, and each evaluation of m.train draws the same ones again.
---@param axes Axis[]
---@param key? integer|Tensor an i64; equal keys yield equal numbers
---@return Tensor
function m.uniform(axes, key) return random(key or site_key(), axes) end

---Standard normal. Without a key as m.uniform.
---@param axes Axis[]
---@param key? integer|Tensor an i64; equal keys yield equal numbers
---@return Tensor
function m.normal(axes, key) return normal(random, axes, key or site_key()) end

---True for a share of the elements, drawn as m.uniform draws without a key: also in evaluation, where m.dropout drops
---nothing. A loss draws by it which tokens it hides: m.random_mask(m.axes_of(tokens), 0.15).
---@param axes Axis[]
---@param share number|Tensor the probability, 0 .. 1; a tensor has some of the axes
---@return Tensor bool
function m.random_mask(axes, share)
  if not core.is_tensor(share) and (type(share) ~= "number" or not (share >= 0 and share <= 1)) then
    core.fail("random_mask's share must be from 0 to 1, got " .. m.shown(share))
  end
  return core.lt(random(site_key(), axes), share)
end

---Initial values, for `init` of m.param: functions of a parameter's axes and key. Your own is such a function
---too: init = function(axes, key) return m.uniform(axes, key) * 2 - 1 end; equal keys yield equal numbers.
m.init = {}

-- make(number), made once for each number: models have many parameters of the same axes with the same initial values.
local function for_each(make)
  local known = {}
  return function(number)
    if math.type(number) == nil or number ~= number or 1 / number == -math.huge then return make(number) end -- a table takes -0 for 0
    known[number] = known[number] or make(number)
    return known[number]
  end
end

-- A function of axes and a key, by one of axes, the key and key + 1.
local function by_key(value)
  local by_axes = {}
  return function(axes, key)
    if math.type(key) ~= "integer" then return value(axes, key, key + 1) end
    local like = core.alike(axes)
    by_axes[like] = by_axes[like] or repeated.by_types(function(...) return value(axes, ...) end)
    return by_axes[like](key, key + 1)
  end
end

local normals = for_each(function(std)
  return by_key(function(axes, key, next) return normal(core.random, axes, key, next) * std end)
end)

---Normal with this standard deviation.
---@param std number
---@return fun(axes: Axis[], key: integer): Tensor
function m.init.normal(std) return normals(std) end

local uniforms = for_each(function(bound)
  return by_key(function(axes, key) return (core.random(key, axes) * 2 - 1) * bound end)
end)

---Uniform in -bound .. bound.
---@param bound number
---@return fun(axes: Axis[], key: integer): Tensor
function m.init.uniform(bound) return uniforms(bound) end

local constants = for_each(function(value)
  local by_axes = {}
  return function(axes)
    local like = core.alike(axes)
    by_axes[like] = by_axes[like] or core.full(axes, value, "f32")
    return by_axes[like]
  end
end)

---This value everywhere.
---@param value number
---@return fun(axes: Axis[], key: integer): Tensor
function m.init.constant(value) return constants(value) end

setmetatable(m.init, {
  __index = function(_, name)
    core.fail(("m.init has no %s"):format(m.shown(name)), { help = "normal(std), uniform(bound) and constant(value)" })
  end,
})

---Zero each element with probability `rate` and scale the others by 1 / (1 - rate), while training;
---x itself elsewhere, unless `always` is set. What is dropped of a sample does not depend on the microbatches that the
---batch is cut into; of a tensor without the batch's axis all of them drop the same. For masks that a loss draws there is
---m.random_mask.
---@param x Tensor
---@param rate number 0 .. 1
---@param options? {always: boolean} always: in evaluation and sampling too
---@return Tensor
function m.dropout(x, rate, options)
  m.check_options("dropout", options, { "always" })
  if type(rate) ~= "number" or rate < 0 or rate >= 1 then core.fail("dropout's rate must be at least 0 and below 1, got " .. m.shown(rate), { help = "m.dropout(x, 0.1) drops a tenth" }) end
  m.check_tensor("dropout", x)
  if rate == 0 then return x end
  if not m.context.training and not (options and options.always) then
    m.context.idle = true -- what evaluation says of a loss that counts nothing
    return x
  end
  return core.where(core.ge(random(site_key(), m.axes_of(x)), rate), x * (1 / (1 - rate)), 0)
end
core.tensor_methods.dropout = m.dropout
