-- Convolutions by the names of axes.
local core = require "mlua.core"
local m = require "mlua"
local packing = require "mlua.packing"

local OPTIONS = { "axis", "taps", "over", "causal", "padding", "stride", "dilation", "transposed", "document", "dtype" }
local MOST = 2 ^ 31 -- of strides, dilations and paddings

local function name_of(axis) return type(axis) == "userdata" and not core.is_tensor(axis) and axis.name or axis end

-- The names in an option that is an axis or a list of axes.
local function names(what, value)
  local list = type(value) == "table" and value or { value }
  local out = {}
  for i, axis in ipairs(list) do
    out[i] = name_of(axis)
    if type(out[i]) ~= "string" then core.fail(("m.conv's %s must name axes, got %s"):format(what, m.shown(axis))) end
    for k = 1, i - 1 do
      if out[k] == out[i] then core.fail(("m.conv's %s names %q twice"):format(what, out[i])) end
    end
  end
  if type(value) == "table" and next(value) ~= nil and #out == 0 then core.fail(("m.conv's %s must be a list of axes"):format(what)) end
  return out
end

local function contains(list, name)
  for _, other in ipairs(list) do
    if other == name then return true end
  end
  return false
end

local function integer(what, value, least)
  local n = type(value) == "number" and math.tointeger(value)
  if n and n >= least and n < MOST then return n end
  core.fail(("m.conv's %s must be an integer from %d on, got %s"):format(what, least, m.shown(value)))
end

-- The value of an option for each axis: one for all, or a table by their names.
local function by_axis(what, value, axes, default)
  local out = {}
  local each = type(value) == "table" and value[1] == nil and next(value) ~= nil
  for i, axis in ipairs(axes) do
    if each then out[i] = value[axis] else out[i] = value end
    if out[i] == nil then out[i] = default end
  end
  for key in pairs(each and value or {}) do
    if not contains(axes, key) then
      core.fail(("m.conv's %s names %s, which is none of its axes"):format(what, m.shown(key)), { help = "its axes are " .. table.concat(axes, ", ") })
    end
  end
  return out
end

-- The axes of w that are the taps of `axes`, in their order.
local function taps_of(x, w, axes, given)
  local own = {}
  if given ~= nil then
    own = names("taps", given)
    for _, name in ipairs(own) do
      if not w:has(name) then
        core.fail(("m.conv's filter has no axis %q to be the taps"):format(name), { help = "its axes are " .. table.concat(w:axes(), ", ") })
      end
    end
  else
    for _, name in ipairs(w:axes()) do
      if not x:has(name) then own[#own + 1] = name end
    end
  end
  if #own ~= #axes then
    core.fail(("m.conv is along %d %s, and its filter has %d axes that may be the taps%s"):format(#axes, #axes == 1 and "axis" or "axes", #own,
      #own > 0 and ": " .. table.concat(own, ", ") or ""), {
      help = given == nil and (#own > #axes and 'name them: taps = "width"; the others become channels of the result'
        or "the filter needs an axis of taps that the tensor has not: m.param{A.embed, m.axis(\"width\", 4)}") or "taps lists one for each axis, in the same order",
    })
  end
  return own
end

-- Zeros before and after along an axis, and the steps that the window makes.
-- Elements before and after the axis as an option gives them: a number, {before, after} or "valid".
local function given_padding(axis, option)
  if option == "valid" then return 0, 0 end
  if type(option) ~= "table" then
    local both = integer("padding", option, 0)
    return both, both
  end
  if #option ~= 2 then core.fail(("m.conv's padding along %q must be {before, after}"):format(axis)) end
  return integer("padding", option[1], 0), integer("padding", option[2], 0)
end

local function padded(x, axis, taps, option, stride, dilation, causal)
  local size, reach = x:size(axis), dilation * (taps - 1)
  local before, after = 0, 0
  if causal then
    before = reach
  elseif option == "same" then
    local total = math.max(0, (size + stride - 1) // stride * stride - stride + reach + 1 - size)
    before = total // 2
    after = total - before
  else
    before, after = given_padding(axis, option)
  end
  local room = before + size + after - reach
  if room < 1 then
    core.fail_axis(x, axis, ("a window of %d elements is longer than %s=%d with its padding"):format(reach + 1, axis, size), 'padding = "same" or causal = true keeps the length')
  end
  return before, (room - 1) // stride + 1
end

-- Elements that are taken away before the first, and the steps of a transposed convolution.
local function cropped(x, axis, taps, option, stride, dilation)
  local size, reach = x:size(axis), dilation * (taps - 1)
  local whole = (size - 1) * stride + reach + 1
  local before, after = 0, 0
  if option == "same" then
    before = (reach + 1 - stride) // 2
    after = whole - size * stride - before
  else
    before, after = given_padding(axis, option)
  end
  local steps = whole - before - after
  if steps < 1 then
    core.fail_axis(x, axis, ("padding takes away all %d elements that a transposed convolution of %s=%d has"):format(whole, axis, size), 'padding = "same" leaves stride times as many as there were')
  end
  return before, steps
end

-- The convolution of which each tap counts where the element under it is of the step's document: a tap by itself at a time, added in f32.
local function within_documents(x, w, window, over, document, dtype)
  local axis, taps, stride, dilation, before, steps = table.unpack(window)
  core.check_axes("convolution", document, axis)
  if stride ~= 1 or steps ~= x:size(axis) then
    core.fail("m.conv keeps documents apart where there is a step for each element", { help = 'with causal = true or padding = "same", and stride 1' })
  end
  if document:dtype() ~= "i32" or document:size(axis) ~= steps then
    core.fail(("m.conv's document must be i32, of %d elements along %q, got %s"):format(steps, axis, tostring(document)), { help = "document = m.documents(tokens)" })
  end
  local plain, sum = core.conv(x, w, { window }, over, dtype), nil
  local wide = plain:dtype() == "f64" and "f64" or "f32"
  return packing.apart(document, function()
    for k = 0, w:size(taps) - 1 do
      local ahead = dilation * k - before
      local part = core.conv(x, w:slice(taps, k, k + 1), { { axis, taps, 1, 1, -ahead, steps } }, over, wide)
      if math.abs(ahead) < steps then
        local other = document:pad(axis, math.max(-ahead, 0), math.max(ahead, 0)):slice(axis, math.max(ahead, 0), math.max(ahead, 0) + steps)
        if ahead ~= 0 then part = core.where(core.eq(other, document), part, 0) end
        sum = sum and sum + part or part
      end
    end
    return sum:cast(plain:dtype())
  end)
end

---A convolution along one axis or several (of a sequence, an image): each element of the result is the sum, over the taps k of
---the filter, of w[k] times the element of x at stride * step + dilation * k, zeros beyond the ends. Every other axis is paired
---by name, as in m.dot: those of both are convolved each for itself (depthwise, groups) or, listed in `over`, summed (channels in);
---those of w alone are new (channels out) and come last. Sums are in f32 or wider; the axis keeps its name, whatever its length.
---
---    m.conv(x, w, { axis = "seq", causal = true })                  -- x {batch, seq, embed}, w {embed, width}: depthwise, causal
---    m.conv(x, w, { axis = "seq", over = "embed", taps = "width" }) -- w {embed, out, width}: gives {batch, seq, out}
---    m.conv(image, w, { axis = { "height", "width" }, taps = { "rows", "columns" }, over = "channels", stride = 16 })
---
---`padding`: "valid" (none, the default), "same" (as many steps as x has elements, divided by the stride and rounded up), a number at
---both ends, or {before, after}. `causal` pads before alone, so that no step sees later elements. padding, stride and dilation are one for
---all axes, or a table by axis: stride = {height = 2}. With `document` (m.documents(tokens)) no step sees another document's elements.
---`transposed` is the other way round (PyTorch's ConvTranspose): each element of x adds w[k] times itself to the result's element at
---stride * its place + dilation * k, and padding takes elements away; with "same" there are stride times as many as x has.
---@param x Tensor
---@param w Tensor the filter; its axes that x has not are the taps, unless `taps` names them, one for each of `axis` in their order
---@param options {axis: string|Axis|table, taps?: string|Axis|table, over?: string|Axis|table, causal?: boolean, padding?: string|integer|table, stride?: integer|table, dilation?: integer|table, transposed?: boolean, document?: Tensor, dtype?: string}
---@return Tensor
function m.conv(x, w, options)
  m.check_tensor("conv", x, "which is convolved")
  m.check_tensor("conv", w, "the filter")
  m.check_options("conv", options, OPTIONS)
  local o = options or {}
  if o.axis == nil then core.fail("m.conv needs its axis", { help = 'm.conv(x, w, {axis = "seq", causal = true})' }) end
  if o.causal ~= nil and type(o.causal) ~= "boolean" then core.fail("m.conv's causal must be true or false, got " .. m.shown(o.causal)) end
  if o.transposed ~= nil and type(o.transposed) ~= "boolean" then core.fail("m.conv's transposed must be true or false, got " .. m.shown(o.transposed)) end
  if o.transposed and (o.causal or o.document ~= nil) then core.fail("m.conv is transposed, or causal or of documents, not both") end
  if o.causal and o.padding ~= nil then core.fail("m.conv takes padding or causal, not both", { help = "causal = true pads before the first element, by what the window needs" }) end
  local axes, over = names("axis", o.axis), names("over", o.over ~= nil and o.over or {})
  if #axes < 1 or #axes > 3 then core.fail(("m.conv is along one to three axes, not %d"):format(#axes)) end
  core.check_axes("convolution", x, table.unpack(axes))
  local taps = taps_of(x, w, axes, o.taps)
  for _, name in ipairs(over) do
    if contains(axes, name) or contains(taps, name) then core.fail(("m.conv convolves along %q and cannot sum it"):format(name)) end
    for what, t in pairs { ["the tensor"] = x, ["the filter"] = w } do
      if not t:has(name) then core.fail(("m.conv cannot sum over %q: %s has no such axis"):format(name, what), { help = "its axes are " .. table.concat(t:axes(), ", ") }) end
    end
  end
  local stride, dilation = by_axis("stride", o.stride, axes, 1), by_axis("dilation", o.dilation, axes, 1)
  local padding, windows = by_axis("padding", o.padding, axes, "valid"), {}
  for i, axis in ipairs(axes) do
    local s, d = integer("stride", stride[i], 1), integer("dilation", dilation[i], 1)
    if type(padding[i]) == "string" and padding[i] ~= "same" and padding[i] ~= "valid" then
      core.fail(('m.conv\'s padding must be "same", "valid", a number or {before, after}, got %s'):format(m.shown(padding[i])))
    end
    if o.transposed then
      local before, steps = cropped(x, axis, w:size(taps[i]), padding[i], s, d)
      windows[i] = { axis, taps[i], 1, -d, -before, steps, s }
    else
      local before, steps = padded(x, axis, w:size(taps[i]), padding[i], s, d, o.causal)
      windows[i] = { axis, taps[i], s, d, before, steps }
    end
  end
  if o.document == nil then return core.conv(x, w, windows, over, o.dtype) end
  m.check_tensor("conv", o.document, "the documents")
  if #axes > 1 then core.fail("m.conv keeps documents apart along one axis, not along " .. #axes) end
  return within_documents(x, w, windows[1], over, o.document, o.dtype)
end
core.tensor_methods.conv = m.conv
