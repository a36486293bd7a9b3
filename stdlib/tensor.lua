-- Tensor functions: the primitive ops under their public names, and what can be composed of them.
local core = require "mlua.core"
local m = require "mlua"
local packing = require "mlua.packing"
local synonyms = require "mlua.synonyms"
local methods = core.tensor_methods

-- Every elementwise op, and the leaves, as they are.
for _, name in ipairs(core.map_ops) do m[name] = core[name] end
for _, name in ipairs {
  "iota", "scatter_add", "stop_gradient", "full", "input", "state", "host", "corpus", "write_tokens", "read_tensors", "compute_dtype",
  "hash", "json",
} do
  m[name] = core[name]
end

---Tensors one after another along an axis.
---@param tensors Tensor[]
---@param axis Axis|string
---@return Tensor
function m.concat(tensors, axis)
  local most = 64 -- of one node
  if type(tensors) ~= "table" or #tensors <= most then return core.concat(tensors, axis) end
  local parts = {}
  for i = 1, #tensors, most do
    parts[#parts + 1] = core.concat({ table.unpack(tensors, i, math.min(i + most - 1, #tensors)) }, axis)
  end
  return m.concat(parts, axis)
end

---A tensor full of zeros.
---@param axes Axis[]
---@param dtype? string default "f32"
---@return Tensor
function m.zeros(axes, dtype) return core.full(axes, 0, dtype or "f32") end

---A tensor full of ones.
---@param axes Axis[]
---@param dtype? string default "f32"
---@return Tensor
function m.ones(axes, dtype) return core.full(axes, 1, dtype or "f32") end

local function count(x, axes)
  local n = 1
  for _, axis in ipairs(#axes > 0 and axes or x:axes()) do n = n * packing.mean_size(x, axis) end
  return n
end

local NARROW = { bf16 = true, f16 = true }

---At least f32: what sums and powers are computed in.
---@param x Tensor
---@return Tensor
function core.widen(x) return NARROW[x:dtype()] and x:cast("f32") or x end
local wide = core.widen

-- The operand of `what`, a tensor, at least f32, and its dtype.
local function widened(what, x)
  m.check_tensor(what, x)
  return wide(x), x:dtype()
end

---The mean over the named axes (over all axes when none is named). Accumulated in f32 or wider.
---@param x Tensor
---@param ... Axis|string
---@return Tensor
function m.mean(x, ...)
  core.check_axes("mean", x, ...)
  local dtype = x:dtype()
  return (wide(x):sum(...) * (1 / count(x, { ... }))):cast(dtype)
end

---The variance over the named axes (divided by n, not n-1).
---@param x Tensor
---@param ... Axis|string
---@return Tensor
function m.var(x, ...)
  core.check_axes("var", x, ...)
  local dtype = x:dtype()
  x = wide(x)
  local centred = x - m.mean(x, ...)
  centred = centred - core.stop_gradient(m.mean(centred, ...)) -- what the mean lost to rounding
  return m.mean(centred * centred, ...):cast(dtype)
end

---The standard deviation over the named axes: the root of m.var. Where all elements are equal it is 0 and has no
---gradient.
---@param x Tensor
---@param ... Axis|string
---@return Tensor
function m.std(x, ...)
  core.check_axes("std", x, ...)
  local dtype = x:dtype()
  return core.sqrt(m.var(wide(x), ...)):cast(dtype)
end

---The i32 index of the smallest along an axis; the first of equals.
---@param x Tensor
---@param axis Axis|string
---@return Tensor
function m.argmin(x, axis)
  core.check_axes("argmin", x, axis)
  local float = NARROW[x:dtype()] or x:dtype() == "f32" or x:dtype() == "f64"
  return (float and -x or -1 - x):argmax(axis) -- the smallest integer has no negative
end

-- exp(x - shift), its sum and the shift, so that nothing overflows: the largest element, or 0 where that is
-- infinite, lest infinities be subtracted.
local function exponentials(x, ...)
  local dtype = x:dtype()
  if dtype ~= "f32" and dtype ~= "f64" then
    core.fail("softmax and logsumexp work on floats, not on " .. dtype, { help = 'cast it: x:cast("f32")' })
  end
  local largest = x:max(...)
  local shift = core.stop_gradient(core.where(core.is_finite(largest), largest, 0))
  local e = core.exp(x - shift)
  return e, e:sum(...), shift
end

-- Over all axes they would be numbers that no model wants: a batch's samples would compete.
local function check_axes(what, x, ...)
  core.check_axes(what, x, ...)
  if select("#", ...) == 0 then
    core.fail(("m.%s needs the axes that it reduces"):format(what), { help = ('x:%s("vocab"); over all: x:%s(table.unpack(x:axes()))'):format(what, what) })
  end
end

---log(sum(exp(x))) over the named axes, without overflow: -inf, without a gradient, where all elements are
--- -inf. The result is at least f32.
---@param x Tensor
---@param ... Axis|string
---@return Tensor
function m.logsumexp(x, ...)
  check_axes("logsumexp", x, ...)
  local log, shift = m.logsumexp_parts(x, ...)
  return log + shift
end

---logsumexp as two terms: log(sum(exp(x - largest))) and the largest element. What is near the latter is best subtracted from
---it alone, since the sum of both is rounded to the spacing of numbers of its size.
---@param x Tensor
---@param ... Axis|string
---@return Tensor log
---@return Tensor largest
function m.logsumexp_parts(x, ...)
  check_axes("logsumexp_parts", x, ...)
  local _, sum, shift = exponentials(wide(x), ...)
  local empty = core.eq(sum, 0)
  return core.log(core.where(empty, 1, sum)), core.where(empty, -math.huge, shift)
end

---exp(x) / sum(exp(x)) over the named axes.
---@param x Tensor
---@param ... Axis|string
---@return Tensor
function m.softmax(x, ...)
  check_axes("softmax", x, ...)
  local dtype = x:dtype()
  local e, sum = exponentials(wide(x), ...)
  return (e / sum):cast(dtype)
end

---x - logsumexp(x) over the named axes.
---@param x Tensor
---@param ... Axis|string
---@return Tensor
function m.log_softmax(x, ...)
  check_axes("log_softmax", x, ...)
  local dtype = x:dtype()
  local log, shift = m.logsumexp_parts(x, ...)
  return (wide(x) - shift - log):cast(dtype)
end

---The Gaussian error linear unit (Hendrycks and Gimpel 2016), in the tanh form that GPT-2 uses;
---`{exact=true}` uses the error function.
---@param x Tensor
---@param options? {exact: boolean}
---@return Tensor
function m.gelu(x, options)
  m.check_options("gelu", options, { "exact" })
  local dtype
  x, dtype = widened("gelu", x)
  if options and options.exact then return (0.5 * x * (1 + core.erf(x * 0.70710678118654752))):cast(dtype) end
  -- 0.5 (1 + tanh(u)) = sigmoid(2u)
  return (x * core.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))):cast(dtype)
end

---x * sigmoid(x) (also called swish).
---@param x Tensor
---@return Tensor
function m.silu(x)
  local dtype
  x, dtype = widened("silu", x)
  return (x * core.sigmoid(x)):cast(dtype)
end

---silu(gate) * up (Shazeer 2020).
---@param gate Tensor
---@param up Tensor
---@return Tensor
function m.swiglu(gate, up) return m.silu(gate) * up end

---max(x, 0), whose slope at 0 is 0 (that of m.maximum would be 1/2).
---@param x Tensor
---@return Tensor
function m.relu(x)
  m.check_tensor("relu", x)
  return core.where(core.le(x, 0), 0, x)
end

---log(1 + exp(x)), without overflow and to the last digits on both sides; log(sigmoid(x)) is -softplus(-x).
---@param x Tensor
---@return Tensor
function m.softplus(x)
  local dtype
  x, dtype = widened("softplus", x)
  return (core.maximum(x, 0) + core.log1p(core.exp(-core.abs(x)))):cast(dtype)
end

---x limited to low .. high; its slope is 1 there, at low and high too, and 0 outside.
---@param x Tensor
---@param low number|Tensor
---@param high number|Tensor
---@return Tensor
function m.clamp(x, low, high)
  if low == nil or high == nil then
    core.fail(("clamp takes a lower and an upper bound, got %s and %s"):format(m.shown(low), m.shown(high)), {
      help = "m.clamp(x, -1, 1); m.maximum(x, low) and m.minimum(x, high) bound one side",
    })
  end
  x = core.where(core.lt(x, low), low, x) -- m.maximum would share the gradient of equals
  return core.where(core.gt(x, high), high, x)
end

---1 where the index equals the position along the new axis, else 0. A program that is fed an index outside of the axis is an
---error before it runs; computed ones read zeros.
---@param index Tensor i32
---@param axis Axis the new axis
---@param dtype? string default "f32"
---@return Tensor
function m.one_hot(index, axis, dtype)
  m.check_tensor("one_hot", index)
  if type(axis) ~= "userdata" or core.is_tensor(axis) then
    core.fail("the new axis of one_hot must be an Axis (with a size), got " .. m.shown(axis), { help = 'm.one_hot(ids, A.vocab), or m.axis("vocab", 256)' })
  end
  if index:dtype() ~= "i32" then
    core.fail("the index of one_hot must be i32, not " .. index:dtype(), { help = 'cast it: index:cast("i32")' })
  end
  local names, axes = index:axes(), {}
  for i, name in ipairs(names) do axes[i] = core.axis(name, index:size(name)) end
  axes[#axes + 1] = axis
  local hit = core.eq(core.iota(axis, "i32"):broadcast(axes), index)
  core.declare_index(hit, index, axis.size, "one_hot")
  return hit:cast(dtype or "f32")
end

---x through which no gradient flows.
---@param x Tensor
---@return Tensor
function m.detach(x) return core.stop_gradient(x) end

-- Functions of one tensor that read well as methods.
for _, name in ipairs {
  "mean", "var", "std", "argmin", "logsumexp", "softmax", "log_softmax", "gelu", "silu", "relu", "softplus", "clamp", "one_hot", "detach",
} do
  methods[name] = m[name]
end

---A value in a message: texts in quotes, what has no text of its own by its type.
---@param value any
---@return string
function m.shown(value)
  if type(value) == "string" then return ("%q"):format(value) end
  local text = tostring(value)
  return text:find("^%a+: 0x%x+$") and "a " .. type(value) or text
end

---Raise where x is no tensor.
---@param what string the function, for the message
---@param x any
---@param role? string what x is there, such as "logits"
function m.check_tensor(what, x, role)
  if core.is_tensor(x) then return end
  local help = m.is_module(x) and "calling a module returns a tensor: model(tokens)" or m.is_class(x) and "calling a class creates a module: local model = GPT()" or nil -- of nil, core.fail says which name it is
  core.fail(("%s takes a tensor%s, got %s"):format(what, role and (" (%s)"):format(role) or "", m.shown(x)), { help = help })
end

local MODULES = { rms_norm = true, layer_norm = true, moe = true } -- constructors of modules that are called with a tensor

local function is_among(key, list)
  for i = 1, #list do
    if list[i] == key then return true end
  end
end

---Raise for a key of `options` that `known` does not list, with a did-you-mean.
---@param what string the function, for the message
---@param options? table
---@param known string[]
---@param listed? string what the list part of the table holds, where it has one
function m.check_options(what, options, known, listed)
  if options == nil and not listed then return end
  if type(options) ~= "table" or m.is_module(options) or m.is_class(options) then
    local call = listed and ("m.%s{%s}"):format(what, listed)
    if MODULES[what] and core.is_tensor(options) then
      core.fail(("m.%s makes a module, of axes, and is given a tensor"):format(what), { help = ("the module is called with it: %s(x)"):format(call) })
    end
    core.fail(("m.%s takes %s, got %s"):format(what, listed and "a table" or "its options in a table", m.shown(options)), {
      help = call or "options: " .. table.concat(known, ", "),
    })
  end
  local unknown -- the first by name
  for key in pairs(options) do
    local positional = listed and math.type(key) == "integer"
    if not positional and unknown == nil and not is_among(key, known) then unknown = key end
  end
  if unknown == nil then return end
  if math.type(unknown) == "integer" then
    local value = options[unknown]
    core.fail(("m.%s takes options by name, got %s"):format(what, m.shown(value)), {
      help = core.is_tensor(value) and synonyms.for_option("params", known) or "options: " .. table.concat(known, ", "),
    })
  end
  local name = tostring(unknown)
  local guess = core.suggest(name, known)
  core.fail(("m.%s has no option %s"):format(what, m.shown(unknown)), {
    help = synonyms.for_option(name, known) or guess and ("did you mean %s?"):format(guess) or "options: " .. table.concat(known, ", "),
  })
end
