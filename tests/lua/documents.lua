-- Documents packed into one row with the document mask give what each gives alone; a window, what the
-- tokens within it give alone.
local m = require "mlua"
local core = require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")
core.compute_dtype "f32"

local heads, head_dim, one = m.axis("heads", 2), m.axis("head_dim", 8), m.axis("batch", 1)

local function attention(length, options)
  local inputs = {}
  for _, name in ipairs { "q", "k", "v" } do inputs[name] = { one, m.axis("seq", length), heads, head_dim } end
  if options.document then inputs.document = { one, m.axis("seq", length), dtype = "i32" } end
  return m.compile(function(i)
    local o = {}
    for key, value in pairs(options) do o[key] = value end
    if o.document then o.document = i.document end
    local out = m.attention(i.q, i.k, i.v, o)
    local gradients = m.grad((out * out):sum(), { i.q, i.k, i.v })
    return { out = out, dq = gradients[1], dk = gradients[2], dv = gradients[3] }
  end, inputs)
end

local ROW = heads.size * head_dim.size
local function numbers(length, scale)
  local list = {}
  for i = 1, length * ROW do list[i] = math.sin(scale * i * i) end
  return list
end
local function cut(list, first, length)
  return table.move(list, (first - 1) * ROW + 1, (first - 1 + length) * ROW, 1, {})
end

for _, lengths in ipairs { { 3, 1, 8 }, { 300, 17, 283 } } do
  local total, ids = 0, {}
  for d, length in ipairs(lengths) do
    for _ = 1, length do ids[#ids + 1] = d * 7 end
    total = total + length
  end
  local q, k, v = numbers(total, 1), numbers(total, 0.37), numbers(total, 0.11)
  local packed = attention(total, { causal = true, document = true }) { q = q, k = k, v = v, document = ids }
  local first = 1
  for d, length in ipairs(lengths) do
    local alone = attention(length, { causal = true }) {
      q = cut(q, first, length), k = cut(k, first, length), v = cut(v, first, length),
    }
    for _, name in ipairs { "out", "dq", "dk", "dv" } do
      check.all(cut(packed[name]:table(), first, length), alone[name]:table(), 1e-5,
        ("%s of document %d of %d tokens"):format(name, d, total))
    end
    first = first + length
  end
end

-- The last query of a window sees exactly the window.
for _, case in ipairs { { 12, 5 }, { 600, 129 } } do
  local length, window = case[1], case[2]
  local q, k, v = numbers(length, 1), numbers(length, 0.37), numbers(length, 0.11)
  local whole = attention(length, { causal = true, window = window }) { q = q, k = k, v = v }
  local first = length - window + 1
  local part = attention(window, { causal = true }) {
    q = cut(q, first, window), k = cut(k, first, window), v = cut(v, first, window),
  }
  check.all(cut(whole.out:table(), length, 1), cut(part.out:table(), window, 1), 1e-5, ("window %d of %d"):format(window, length))
end
check.done()
