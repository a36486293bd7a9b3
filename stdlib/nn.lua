-- Layers: normalisation, rotary positions, attention.
local core = require "mlua.core"
local m = require "mlua"
local packing = require "mlua.packing"

-- The axes that a norm reduces: without any it would be all of them, the batch's too.
local function sizes(what, spec)
  local axes = {}
  for i, axis in ipairs(spec) do
    if type(axis) ~= "userdata" or core.is_tensor(axis) then
      core.fail(("m.%s takes axes, got %s"):format(what, m.shown(axis)), { help = ("m.%s{A.embed}"):format(what) })
    end
    axes[i] = axis
  end
  if #axes == 0 then core.fail(("m.%s needs the axes that it reduces"):format(what), { help = ("m.%s{A.embed}"):format(what) }) end
  return axes
end

local function names(axes)
  local list = {}
  for i, axis in ipairs(axes) do list[i] = axis.name end
  return table.unpack(list)
end

local RMSNorm = m.module("RMSNorm", function(self, spec)
  m.check_options("rms_norm", spec, { "eps", "gain", "zero_centered" }, "A.embed")
  self.axes = sizes("rms_norm", spec)
  self.eps = spec.eps or 1e-5
  self.added = spec.zero_centered and 1 or nil
  if spec.gain ~= false then self.gain = m.param { init = spec.zero_centered and "zeros" or "ones", decay = false, table.unpack(self.axes) } end
end)

function RMSNorm:forward(x)
  m.check_tensor("m.rms_norm's module", x)
  core.check_axes("rms_norm", x, names(self.axes))
  local dtype = x:dtype()
  local wide = core.widen(x)
  local y = wide * core.rsqrt((wide * wide):mean(names(self.axes)) + self.eps)
  if self.gain then y = y * (self.added and self.gain:read() + self.added or self.gain:read()) end
  return y:cast(dtype)
end

---Root-mean-square normalisation over the axes, with a gain (Zhang and Sennrich 2019); `zero_centered`: the parameter is the
---gain less one (Gemma).
---@param spec {eps: number, gain: boolean, zero_centered: boolean, [integer]: Axis}
---@return Module
function m.rms_norm(spec) return RMSNorm(spec) end

local LayerNorm = m.module("LayerNorm", function(self, spec)
  m.check_options("layer_norm", spec, { "eps", "bias" }, "A.embed")
  self.axes = sizes("layer_norm", spec)
  self.eps = spec.eps or 1e-5
  self.gain = m.param { init = "ones", decay = false, table.unpack(self.axes) }
  if spec.bias ~= false then self.bias = m.bias(self.axes) end
end)

function LayerNorm:forward(x)
  m.check_tensor("m.layer_norm's module", x)
  core.check_axes("layer_norm", x, names(self.axes))
  local dtype = x:dtype()
  local wide = core.widen(x)
  local centred = wide - wide:mean(names(self.axes))
  -- What the mean lost to rounding all elements have too much: a row of large equal ones would become up to 1 instead of 0.
  -- (Not so of bf16, in which rows like that mean nothing.) In exact arithmetic it is 0, whatever x.
  if dtype == "f32" then centred = centred - core.stop_gradient(centred:mean(names(self.axes))) end
  local y = centred * core.rsqrt((centred * centred):mean(names(self.axes)) + self.eps) * self.gain:read()
  if self.bias then y = y + self.bias:read() end
  return y:cast(dtype)
end

---Layer normalisation over the axes, with gain and bias (Ba, Kiros and Hinton 2016).
---@param spec {eps: number, bias: boolean, [integer]: Axis}
---@return Module
function m.layer_norm(spec) return LayerNorm(spec) end

-- "llama3 factor=8 original=8192" as a table.
local function rope_scaling(scaling)
  if type(scaling) == "string" then
    local text = scaling
    scaling = { kind = text:match "^%S+" }
    for word in text:gsub("^%S+", "", 1):gmatch "%S+" do
      local key, value = word:match "^([%w_]+)=(%S+)$"
      if not key then core.fail(("rope's scaling %q: %q is no key=value"):format(text, word)) end
      scaling[key] = value == "true" or value ~= "false" and tonumber(value)
    end
  end
  m.check_options("rope's scaling", scaling, { "kind", "factor", "original", "low", "high", "fast", "slow", "attention", "mscale", "mscale_all", "truncate" })
  local kind = scaling.kind
  if kind ~= "linear" and kind ~= "llama3" and kind ~= "yarn" then
    core.fail("rope's scaling must be linear, llama3 or yarn, got " .. m.shown(kind), { help = 'scaling = "llama3 factor=8 low=1 high=4 original=8192"' })
  end
  for _, key in ipairs(kind == "linear" and { "factor" } or { "factor", "original" }) do
    if type(scaling[key]) ~= "number" or scaling[key] <= 0 then core.fail(("rope's scaling %s needs %s, a number above 0"):format(kind, key)) end
  end
  return scaling
end

-- The rates of the pairs, slower for longer texts: linear (all by `factor`), llama3 (those whose wave is long against
-- `original` positions: Dubey et al. 2024), yarn (those that turn seldom in `original` positions: Peng et al. 2023).
local function scaled_rate(rate, scaling, pair, size, base)
  local slow = rate / scaling.factor
  if scaling.kind == "linear" then return slow end
  local original = scaling.original
  if scaling.kind == "llama3" then
    local low, high = scaling.low or 1, scaling.high or 4
    local share = core.maximum(0, core.minimum(1, (rate * (original / (2 * math.pi)) - low) / (high - low)))
    return slow * (1 - share) + rate * share
  end
  local function dimension(turns) return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base)) end
  local first, last = dimension(scaling.fast or 32), dimension(scaling.slow or 1)
  if scaling.truncate ~= false then first, last = math.floor(first), math.ceil(last) end
  first, last = math.max(first, 0), math.min(last, size - 1)
  if first == last then last = last + 0.001 end
  local share = core.maximum(0, core.minimum(1, (pair - first) / (last - first)))
  return slow * share + rate * (1 - share)
end

-- What yarn multiplies sine and cosine by.
local function rope_attention(scaling)
  if scaling.kind ~= "yarn" then return 1 end
  local function mscale(by) return scaling.factor <= 1 and 1 or 0.1 * by * math.log(scaling.factor) + 1 end
  if scaling.attention then return scaling.attention end
  if (scaling.mscale or 0) ~= 0 and (scaling.mscale_all or 0) ~= 0 then return mscale(scaling.mscale) / mscale(scaling.mscale_all) end
  return mscale(1)
end

---Rotary position embedding (Su et al. 2021): rotates the pairs (i, i + dim/2) of `head_dim`, or with `interleaved` the
---pairs (2i, 2i + 1), by position * base^(-2i/dim). `scaling` slows rotations for texts longer than those trained on: a table or its
---text, "linear factor=2", "llama3 factor=8 low=1 high=4 original=8192", "yarn factor=4 original=32768".
---@param x Tensor with axes seq and head_dim
---Positions count from 0 along seq, with pack = "document" in each document, or are `positions`, integers over seq.
---@param options? {base: number, seq: string, head_dim: string, offset: integer, positions: Tensor, scaling: string|table, interleaved: boolean}
---@return Tensor
function m.rope(x, options)
  m.check_options("rope", options, { "base", "seq", "head_dim", "offset", "positions", "scaling", "interleaved" })
  options = options or {}
  local seq, dim = options.seq or "seq", options.head_dim or "head_dim"
  m.check_tensor("rope", x)
  seq, dim = type(seq) == "userdata" and seq.name or seq, type(dim) == "userdata" and dim.name or dim
  local base = options.base or 10000
  if type(base) ~= "number" or not (base > 0) then core.fail("rope's base must be a number above 0, got " .. m.shown(base)) end
  for _, name in ipairs { seq, dim } do
    if not x:has(name) then
      core.fail(("rope: the tensor has no axis %q: its axes are %s"):format(name, table.concat(x:axes(), ", ")), {
        help = 'q of x:dot(wq, "embed") has it, with wq = m.param{A.embed, A.heads, A.head_dim}; the options seq and head_dim name others',
      })
    end
  end
  local size, dtype = x:size(dim), x:dtype()
  local wide = dtype == "f64" and "f64" or "f32"
  if size % 2 ~= 0 then core.fail(("rope needs an even %s, not %d"):format(dim, size)) end
  local pairs_axis = core.axis(dim, size // 2)
  local positions = options.positions or (packing.of(x, seq) or {}).positions
  if positions then
    m.check_tensor("rope", positions, "positions")
    if not positions:has(seq) then core.fail(("rope's positions must have the axis %q"):format(seq)) end
  end
  local position = (positions and positions:cast(wide) or core.iota(core.axis(seq, x:size(seq)), wide)) + (options.offset or 0)
  local places = m.axes_of(position)
  places[#places + 1] = pairs_axis
  local rate = core.exp(core.iota(pairs_axis, wide) * (-2 / size * math.log(base)))
  local scaling = options.scaling and options.scaling ~= "" and rope_scaling(options.scaling)
  if scaling then rate = scaled_rate(rate, scaling, core.iota(pairs_axis, wide), size, base) end
  local angle = position:broadcast(places) * rate
  local cos, sin = core.cos(angle), core.sin(angle)
  local factor = scaling and rope_attention(scaling) or 1
  if factor ~= 1 then cos, sin = cos * factor, sin * factor end
  if options.interleaved then -- the result has the first of all pairs, then the second: products of two such are the same
    local two = core.axis("of_pair", 2)
    x = x:split(dim, pairs_axis, two)
    x = core.concat({ x:slice("of_pair", 0, 1):max "of_pair", x:slice("of_pair", 1, 2):max "of_pair" }, dim)
  end
  local a, b = x:slice(dim, 0, size // 2):cast(wide), x:slice(dim, size // 2, size):cast(wide)
  return core.concat({ (a * cos - b * sin):cast(dtype), (b * cos + a * sin):cast(dtype) }, dim)
end

---softmax(scale * q k, masked) v over the axis `seq` of k and v. k and v may have `kv_heads` in
---place of `heads` (grouped-query attention: query head h reads head h // (heads // kv_heads)).
---options: `causal`; `window` (a query sees the last `window` keys); `scale` (default
---1/sqrt(head_dim)); `document` (an i32 tensor over batch and seq: only equal ids see each other);
---`score = function(s, i)`, traced and compiled into the kernel, where s is the scaled score and
---i.batch, i.head, i.q, i.k are indices; `m.where(shown, s, -math.huge)` is a mask, and a GPU skips
---blocks that it hides. k and v may be longer or shorter than q when their axis is called `kv_seq`;
---then causal and window count from the end: the last query sees the last key.
---`seq`, `heads` and `head_dim` name q's axes where they are called something else; without heads
---there is one.
---@param q Tensor
---@param k Tensor
---@param v Tensor
---@param options? {causal: boolean, window: integer, scale: number, score: function, document: Tensor, seq: string, heads: string, head_dim: string}
---@return Tensor
function m.attention(q, k, v, options)
  m.check_tensor("attention", q, "q")
  m.check_tensor("attention", k, "k")
  m.check_tensor("attention", v, "v")
  m.check_options("attention", options, { "causal", "window", "scale", "score", "document", "seq", "heads", "head_dim" })
  local window = options and options.window
  if window ~= nil and (not math.tointeger(window) or window < 1) then
    core.fail(("attention's window must be a positive integer, got %s"):format(m.shown(window)), {
      help = "a query sees the last `window` keys, its own position included; leave it out to see all",
    })
  end
  local heads, seq = options and options.heads or "heads", options and options.seq or "seq"
  local pack = (not options or options.document == nil) and k:has(seq) and packing.of(q, seq)
  if pack or options and options.document == false then
    local own = { document = pack and pack.documents or nil }
    for key, value in pairs(options or {}) do own[key] = own[key] or key ~= "document" and value or nil end
    options = own
  end
  if q:has(heads) or k:has(heads) or v:has(heads) or not q:has(seq) then return core.attention(q, k, v, options or {}) end
  local dim = options and options.head_dim or "head_dim"
  if type(dim) == "string" and not q:has(dim) then
    core.fail(("attention: q has no axis %q: its axes are %s"):format(dim, table.concat(q:axes(), ", ")), {
      help = 'x:dot(wq, "embed") with wq = m.param{A.embed, A.heads, A.head_dim} has it; {head_dim = "embed"} names another axis',
    })
  end
  local function with_heads(x)
    local axes = m.axes_of(x)
    axes[#axes + 1] = core.axis(heads, 1)
    return x:broadcast(axes)
  end
  return core.attention(with_heads(q), with_heads(k), with_heads(v), options or {}):sum(heads)
end
