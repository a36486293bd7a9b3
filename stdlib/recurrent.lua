-- What layers have beside a recurrence of m.scan: outer products, states to begin with, short convolutions, gated and L2 norms,
-- initial values of rates.
local core = require "mlua.core"
local m = require "mlua"
local packing = require "mlua.packing"

local function axes_of(what, spec)
  local axes = {}
  for i, axis in ipairs(spec) do
    if type(axis) ~= "userdata" or core.is_tensor(axis) then
      core.fail(("m.%s takes axes, got %s"):format(what, m.shown(axis)), { help = ("m.%s{A.heads, A.head_dim}"):format(what) })
    end
    axes[i] = axis
  end
  if #axes == 0 then core.fail(("m.%s needs its axes"):format(what), { help = ("m.%s{A.heads, A.head_dim}"):format(what) }) end
  return axes
end

local ACTIVATIONS = { silu = m.silu, sigmoid = core.sigmoid, none = function(x) return x end }

local function activation_of(what, name)
  local fn = ACTIVATIONS[name]
  if not fn then core.fail(("m.%s's activation must be silu, sigmoid or none, got %s"):format(what, m.shown(name))) end
  return fn
end

local ShortConv = m.module("ShortConv", function(self, spec)
  m.check_options("short_conv", spec, { "width", "bias", "activation", "seq" }, "A.heads, A.head_dim")
  local axes, width = axes_of("short_conv", spec), core.axis("width", spec.width or 4)
  self.seq, self.activation = spec.seq or "seq", activation_of("short_conv", spec.activation or "silu")
  self.filter = m.param { width, init = m.init.uniform(width.size ^ -0.5), table.unpack(axes) }
  if spec.bias then self.bias = m.bias(axes) end
end)

function ShortConv:forward(x)
  m.check_tensor("m.short_conv's module", x)
  local pack = packing.of(x, self.seq)
  local y = m.conv(x, self.filter, { axis = self.seq, taps = "width", causal = true, document = pack and pack.documents or nil })
  if self.bias then y = y + self.bias end
  return self.activation(y)
end

---A causal convolution along `seq`, of each channel of the axes for itself, and an activation: "silu" (the default), "sigmoid" or
---"none". `width` taps (4), with `bias` or without. With pack = "document" it does not cross documents.
---@param spec {width: integer, bias: boolean, activation: string, seq: string, [integer]: Axis}
---@return Module
function m.short_conv(spec) return ShortConv(spec) end

local GatedNorm = m.module("GatedNorm", function(self, spec)
  m.check_options("gated_norm", spec, { "eps", "first", "activation" }, "A.head_dim")
  if spec.first ~= nil and spec.first ~= "norm" and spec.first ~= "gate" then
    core.fail("m.gated_norm's first must be \"norm\" or \"gate\", got " .. m.shown(spec.first))
  end
  self.gate_first, self.activation = spec.first == "gate", activation_of("gated_norm", spec.activation or "silu")
  self.names, self.eps = {}, spec.eps or 1e-5
  local axes = axes_of("gated_norm", spec)
  for i, axis in ipairs(axes) do self.names[i] = axis.name end
  self.gain = m.param { init = "ones", decay = false, table.unpack(axes) }
end)

function GatedNorm:forward(x, gate)
  m.check_tensor("m.gated_norm's module", x)
  m.check_tensor("m.gated_norm's module", gate, "the gate")
  core.check_axes("gated_norm", x, table.unpack(self.names))
  local dtype, wide = gate:dtype(), x:dtype() == "f64" and "f64" or "f32"
  local y, open = x:cast(wide), self.activation(gate:cast(wide))
  if self.gate_first then y = y * open end
  y = y * core.rsqrt((y * y):mean(table.unpack(self.names)) + self.eps) * self.gain:read()
  return (self.gate_first and y or y * open):cast(dtype)
end

---What a recurrence gave, normalised by the root of its mean square over the axes, with a gain, and multiplied by an activation of a
---gate: norm(y, z). `first` says what comes first, the "norm" (the default) or the "gate" (Mamba-2); `activation`: "silu" (the
---default) or "sigmoid". It computes in f32; the result has the gate's dtype.
---@param spec {eps: number, first: string, activation: string, [integer]: Axis}
---@return Module
function m.gated_norm(spec) return GatedNorm(spec) end

---The outer product: each element of a times each of b, where axes of both pair by name; a{heads, key} and b{heads, value} give
---{heads, key, value}.
---@param a Tensor
---@param b Tensor
---@return Tensor
function m.outer(a, b)
  m.check_tensor("outer", a)
  m.check_tensor("outer", b)
  local all, wider = m.axes_of(a), false
  for _, axis in ipairs(m.axes_of(b)) do
    if not a:has(axis) then all[#all + 1], wider = axis, true end
  end
  return (wider and a:broadcast(all) or a) * b
end

---x divided by the root of the sum of its squares along the axes: of length 1. `eps` is added to the sum.
---@param x Tensor
---@param axis string|Axis
---@param eps? number
---@return Tensor
function m.l2_norm(x, axis, eps)
  m.check_tensor("l2_norm", x)
  local dtype = x:dtype()
  local wide = core.widen(x)
  return (wide * core.rsqrt((wide * wide):sum(axis) + (eps or 1e-6))):cast(dtype)
end

---Zeros for m.scan to begin with: f32, over the axes that x has beside `seq` and `embed`, and those of the list.
---@param x Tensor a layer's input
---@param axes Axis[]
---@param options? {seq: string, embed: string}
---@return Tensor
function m.zero_state(x, axes, options)
  m.check_tensor("zero_state", x)
  m.check_options("zero_state", options, { "seq", "embed" })
  local seq, embed = options and options.seq or "seq", options and options.embed or "embed"
  local all = {}
  for _, axis in ipairs(m.axes_of(x)) do
    if axis.name ~= seq and axis.name ~= embed then all[#all + 1] = axis end
  end
  table.move(axes_of("zero_state", axes), 1, #axes, #all + 1, all)
  return m.zeros(all)
end

---Where documents begin, for the option resets of m.scan: bool over batch and seq with pack = "document", else nil.
---@param x Tensor with the batch and seq of the model's input
---@param seq? string
---@return Tensor?
function m.document_starts(x, seq)
  local pack = packing.of(x, seq or "seq")
  return pack and packing.starts(pack) or nil
end

---Initial values: the logarithm of what is uniform from low to high.
---@param low number
---@param high number
---@return fun(axes: Axis[], key: integer): Tensor
function m.init.log_uniform(low, high)
  local spread = m.init.uniform((high - low) / 2)
  return function(axes, key) return core.log(spread(axes, key) + (high + low) / 2) end
end

---Initial values b of which softplus(b) is between low and high, its logarithm uniform (Mamba's time steps).
---@param low number
---@param high number
---@return fun(axes: Axis[], key: integer): Tensor
function m.init.time_step(low, high)
  local spread = m.init.uniform(math.log(high / low) / 2)
  return function(axes, key)
    local step = core.exp(spread(axes, key) + math.log(low * high) / 2)
    return step + core.log(-core.expm1(-step))
  end
end
