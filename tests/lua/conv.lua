-- m.conv against plain loops: what padding, strides and dilations mean, which axes are paired, summed and new; finite
-- differences of its gradients; its errors.
local m = require "mlua"
local core = require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")

-- Windows of one axis, as the text of m.conv says: zeros before and after.
local function zeros_around(size, taps, o)
  local reach, stride = (o.dilation or 1) * (taps - 1), o.stride or 1
  local padding = o.padding or "valid"
  if o.causal then return reach, 0 end
  if padding == "valid" then return 0, 0 end
  if type(padding) == "number" then return padding, padding end
  if type(padding) == "table" then return padding[1], padding[2] end
  local steps = math.ceil(size / stride)
  local total = math.max((steps - 1) * stride + reach + 1 - size, 0)
  return total // 2, total - total // 2
end

-- y[t][out] of x[seq][channel] and w(tap, channel, out): `mixed` sums over the channels.
local function by_loops(x, w, seq, channels, taps, outs, o, mixed)
  local before, after = zeros_around(seq, taps, o)
  local stride, dilation, y = o.stride or 1, o.dilation or 1, {}
  local t = 0
  while t * stride + dilation * (taps - 1) <= before + seq + after - 1 do
    for out = 0, outs - 1 do
      local sum = 0
      for k = 0, taps - 1 do
        local p = t * stride + dilation * k - before
        for c = mixed and 0 or out, mixed and channels - 1 or out do
          if p >= 0 and p < seq then sum = sum + x[p * channels + c + 1] * w(k, c, out) end
        end
      end
      y[#y + 1] = sum
    end
    t = t + 1
  end
  return y, t
end

local function numbers(n, seed)
  local out = {}
  for i = 1, n do out[i] = (i * 7 + seed * 13) % 11 / 4 - 1.2 end
  return out
end

local CASES = {
  { causal = true }, { padding = "same" }, {}, { padding = 2 }, { padding = { 0, 3 } }, { causal = true, stride = 2 },
  { padding = "same", stride = 3, dilation = 2 }, { padding = { 4, 1 }, stride = 2, dilation = 2 },
}
local outputs, wanted, inputs, given = {}, {}, {}, {}
for number, case in ipairs(CASES) do
  for _, size in ipairs { { 7, 3 }, { 2, 4 }, { 5, 1 } } do -- the second is shorter than its window
    local seq, taps = size[1], size[2]
    local before, after = zeros_around(seq, taps, case)
    if before + seq + after > (case.dilation or 1) * (taps - 1) then
      local name = ("%d_%d"):format(number, seq)
      local S, C, K, O = m.axis("seq", seq), m.axis("channels", 3), m.axis("width", taps), m.axis("out", 2)
      inputs["x" .. name], inputs["w" .. name], inputs["f" .. name] = { S, C }, { K, C }, { C, O, K }
      local x, w, f = numbers(seq * 3, number), numbers(3 * taps, seq), numbers(6 * taps, taps)
      given["x" .. name], given["w" .. name], given["f" .. name] = x, w, f
      local options = { axis = "seq" }
      for key, value in pairs(case) do options[key] = value end
      outputs[#outputs + 1] = function(i) return "d" .. name, m.conv(i["x" .. name], i["w" .. name], options) end
      wanted["d" .. name] = by_loops(x, function(k, c) return w[k * 3 + c + 1] end, seq, 3, taps, 3, case, false)
      local full = { over = "channels", taps = K }
      for key, value in pairs(options) do full[key] = value end
      outputs[#outputs + 1] = function(i) return "m" .. name, i["x" .. name]:conv(i["f" .. name], full) end
      wanted["m" .. name] = by_loops(x, function(k, c, o) return f[(c * 2 + o) * taps + k + 1] end, seq, 3, taps, 2, case, true)
    end
  end
end
local out = m.compile(function(i)
  local all = {}
  for _, make in ipairs(outputs) do
    local name, y = make(i)
    all[name] = y
  end
  return all
end, inputs)(given)
for name, values in pairs(wanted) do check.all(out[name], values, 1e-5, name) end

-- Gradients of a causal one against differences of the loss by the loops.
local S, C, K = m.axis("seq", 6), m.axis("channels", 3), m.axis("width", 3)
local x, w = numbers(18, 1), numbers(9, 2)
local function loss()
  local sum = 0
  for i, y in ipairs((by_loops(x, function(k, c) return w[k * 3 + c + 1] end, 6, 3, 3, 3, { causal = true }, false))) do sum = sum + i * y * y end
  return sum
end
local got = m.compile(function(i)
  local y = m.conv(i.x, i.w, { axis = S, causal = true })
  local weight = (m.iota(S) * 3):cast "f32":broadcast { C }:permute("seq", "channels") + m.iota(C):cast "f32" + 1
  local g = m.grad((y * y * weight):sum(), { i.x, i.w })
  return { x = g[1], w = g[2] }
end, { x = { S, C }, w = { K, C } }) { x = x, w = w }
for name, list in pairs { x = x, w = w } do
  local slopes, step = {}, 1e-4
  for i, value in ipairs(list) do
    list[i] = value + step
    local high = loss()
    list[i] = value - step
    slopes[i] = (high - loss()) / (2 * step)
    list[i] = value
  end
  check.all(got[name], slopes, 1e-4, "gradient of " .. name)
end

-- An image: rows and columns of their own, strides by name, a group of channels that is kept.
local H, W, G, I = m.axis("height", 4), m.axis("width", 5), m.axis("groups", 2), m.axis("inner", 2)
local pixels, filter = numbers(80, 3), numbers(2 * 2 * 2 * 3 * 2, 4)
local image = m.compile(function(i)
  return m.conv(i.x, i.w, { axis = { "height", "width" }, taps = { "rows", "columns" }, over = "inner", stride = { width = 2 }, padding = { height = 1 } })
end, { x = { H, W, G, I }, w = { G, I, m.axis("out", 3), m.axis("rows", 2), m.axis("columns", 2) } })
local y, at = image { x = pixels, w = filter }, 0
for row = 0, 4 do
  for column = 0, 1 do
    for g = 0, 1 do
      for o = 0, 2 do
        local sum = 0
        for r = 0, 1 do
          for c = 0, 1 do
            for i = 0, 1 do
              local py, px = row + r - 1, column * 2 + c
              if py >= 0 and py < 4 then sum = sum + pixels[((py * 5 + px) * 2 + g) * 2 + i + 1] * filter[((((g * 2 + i) * 3 + o) * 2 + r) * 2 + c) + 1] end
            end
          end
        end
        at = at + 1
        check.near(y[at], sum, 1e-5, "pixel " .. at)
      end
    end
  end
end
check.equal(#y, at)

-- Windows that are far apart: most elements are under none, and have no gradient.
local far = m.compile(function(i)
  local y = m.conv(i.x, i.w, { axis = "seq", stride = 1000000, padding = 1 })
  local z = m.conv(i.x, i.w, { axis = "seq", stride = 4, causal = true })
  local g = m.grad(y:sum() + 10 * z:sum(), { i.x })
  return { y = y, x = g[1] }
end, { x = { m.axis("seq", 9) }, w = { m.axis("width", 2) } }) { x = numbers(9, 1), w = { 3, 5 } }
check.all(far.y, { numbers(9, 1)[1] * 5 }, 1e-6, "one step")
check.all(far.x, { 55, 0, 0, 30, 50, 0, 0, 30, 50 }, 1e-6, "gradients under windows that are apart")

-- Documents of 4, 1 and 4 elements: each is convolved as if it were alone.
local packed = m.compile(function(i)
  local apart = m.conv(i.x, i.w, { axis = "seq", causal = true, dilation = 2, document = i.document })
  local around = m.conv(i.x, i.w, { axis = "seq", padding = "same", document = i.document })
  local alone, whole = {}, {}
  for n, bounds in ipairs { { 0, 4 }, { 4, 5 }, { 5, 9 } } do
    local part = i.x:slice("seq", bounds[1], bounds[2])
    alone[n] = m.conv(part, i.w, { axis = "seq", causal = true, dilation = 2 })
    whole[n] = m.conv(part, i.w, { axis = "seq", padding = "same" })
  end
  return { a = apart, b = around, c = m.concat(alone, "seq"), d = m.concat(whole, "seq") }
end, { x = { m.axis("seq", 9), m.axis("embed", 2) }, w = { m.axis("embed", 2), m.axis("width", 3) }, document = { m.axis("seq", 9), dtype = "i32" } })
packed = packed { x = numbers(18, 5), w = numbers(6, 6), document = { 0, 0, 0, 0, 1, 2, 2, 2, 2 } }
check.all(packed.a, packed.c:table(), 1e-6, "documents apart")
check.all(packed.b, packed.d:table(), 1e-6, "documents apart, with elements that follow")

-- Transposed: the gradient of a convolution with the same window, of as many elements.
local turned = m.compile(function(i)
  local up = { axis = "seq", over = "out", taps = "width", stride = 3, dilation = 2, padding = 1, transposed = true }
  local y = m.conv(i.x, i.w, up)
  local down = m.conv(i.z, i.w, { axis = "seq", over = "inner", taps = "width", stride = 3, dilation = 2, padding = 1 })
  local same = { axis = "seq", over = "out", taps = "width", stride = 2, padding = "same", transposed = true }
  return { y = y, g = m.grad((down * i.x):sum(), { i.z })[1], same = m.conv(i.x, i.w, same) }
end, { x = { m.axis("seq", 4), m.axis("out", 2) }, z = { m.axis("seq", 12), m.axis("inner", 3) }, w = { m.axis("inner", 3), m.axis("out", 2), m.axis("width", 3) } })
local got_up = turned { x = numbers(8, 1), z = numbers(36, 2), w = numbers(18, 3) }
check.all(got_up.y, got_up.g:table(), 1e-5, "transposed")
check.equal(#got_up.same, 8 * 3, "twice as many elements")

-- A prefix, then single steps behind the last elements before them: as the whole at once.
local steps = m.compile(function(i)
  local whole = m.conv(i.x, i.w, { axis = "seq", causal = true })
  local parts, held = { m.conv(i.x:slice("seq", 0, 4), i.w, { axis = "seq", causal = true }) }, i.x:slice("seq", 2, 4)
  for t = 4, 6 do
    held = m.concat({ held, i.x:slice("seq", t, t + 1) }, "seq")
    parts[#parts + 1] = m.conv(held, i.w, { axis = "seq" })
    held = held:slice("seq", 1, 3)
  end
  return { whole = whole, parts = m.concat(parts, "seq") }
end, { x = { m.axis("seq", 7), m.axis("embed", 2) }, w = { m.axis("width", 3), m.axis("embed", 2) } }) { x = numbers(14, 7), w = numbers(6, 8) }
check.all(steps.parts, steps.whole:table(), 1e-6, "step by step")

-- Errors.
local a = core.input("a", { m.axis("batch", 2), m.axis("seq", 4), m.axis("embed", 3) })
local b = core.input("b", { m.axis("embed", 3), m.axis("width", 6) })
local c = core.input("c", { m.axis("embed", 3), m.axis("out", 5), m.axis("width", 2) })
check.raises("a window of 6 elements is longer than seq=4", m.conv, a, b, { axis = "seq" })
check.raises("groups are an axis of the tensor", m.conv, a, b, { axis = "seq", groups = 3 })
check.raises("m.conv needs its axis", m.conv, a, b)
check.raises("has no option \"dilate\"", m.conv, a, b, { axis = "seq", dilate = 2 })
check.raises("\"time\"", m.conv, a, b, { axis = "time" })
check.raises("may be the taps: out, width", m.conv, a, c, { axis = "seq", over = "embed" })
check.raises("takes padding or causal, not both", m.conv, a, b, { axis = "seq", causal = true, padding = 1 })
check.raises("stride must be an integer from 1 on, got 0", m.conv, a, b, { axis = "seq", causal = true, stride = 0 })
check.raises("padding must be an integer from 0 on, got -1", m.conv, a, b, { axis = "seq", padding = -1 })
check.raises("padding must be \"same\"", m.conv, a, b, { axis = "seq", padding = "full" })
check.raises("stride names \"time\"", m.conv, a, b, { axis = "seq", stride = { time = 2 } })
check.raises("cannot sum over \"batch\": the filter has no such axis", m.conv, a, c, { axis = "seq", over = { "batch" }, taps = "width" })
check.raises("convolves along \"seq\" and cannot sum it", m.conv, a, b, { axis = "seq", over = "seq", causal = true })
check.raises("names \"seq\" twice", m.conv, a, b, { axis = { "seq", "seq" } })
check.raises("works on floats", m.conv, a:cast "i32", b, { axis = "seq", causal = true })
check.raises("\"embed\" is 3 in the tensor, 4 in the filter", m.conv, a, core.input("d", { m.axis("embed", 4), m.axis("width", 2) }), { axis = "seq" })
check.raises("more than 4096 taps", m.conv, a, core.input("e", { m.axis("embed", 3), m.axis("width", 5000) }), { axis = "seq", causal = true })
check.raises("a step for each element", m.conv, a, b, { axis = "seq", causal = true, stride = 2, document = core.input("f", { m.axis("seq", 4) }, "i32") })
check.raises("document must be i32", m.conv, a, b, { axis = "seq", causal = true, document = core.input("g", { m.axis("seq", 4) }) })
check.raises("transposed, or causal", m.conv, a, b, { axis = "seq", causal = true, transposed = true })
check.raises("padding takes away all 9 elements", m.conv, a, b, { axis = "seq", transposed = true, padding = 5 })
check.done()
