-- m.cross_entropy and what it is made of against their formulas in plain Lua: values, counts, gradients.
local m = require "mlua"
local core = require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")

local ROWS, VOCAB = 7, 13
local A = m.axes { row = ROWS, vocab = VOCAB }
local logits, targets = {}, {}
for i = 1, ROWS * VOCAB do logits[i] = 6 * math.sin(i * i) end
for i = 1, ROWS do targets[i] = i * 5 % VOCAB end
targets[3], targets[6] = -1, 2

-- The sum, the count and the gradient of the sum.
local function formula(o)
  local sum, count, gradient = 0, 0, {}
  local smoothing, z = o.label_smoothing or 0, o.z_loss or 0
  for i = 1, ROWS do
    local total = 0
    for v = 1, VOCAB do total = total + math.exp(logits[(i - 1) * VOCAB + v]) end
    local lse, counts = math.log(total), targets[i] ~= (o.ignore or -1)
    for v = 1, VOCAB do
      local x = logits[(i - 1) * VOCAB + v]
      local wanted = smoothing / VOCAB + (v - 1 == targets[i] and 1 - smoothing or 0)
      local p = math.exp(x - lse)
      sum = sum + (counts and -wanted * (x - lse) or 0)
      gradient[#gradient + 1] = counts and p - wanted + 2 * z * lse * p or 0
    end
    if counts then sum, count = sum + z * lse * lse, count + 1 end
  end
  return sum, count, gradient
end

for _, o in ipairs {
  {}, { label_smoothing = 0.1 }, { z_loss = 0.01 }, { ignore = 2 }, { label_smoothing = 0.3, z_loss = 0.1, ignore = 5 },
} do
  local name = ("smoothing %s, z %s, ignore %s"):format(o.label_smoothing, o.z_loss, o.ignore)
  local list = { table.unpack(targets) }
  if o.ignore then -- an id outside the vocabulary is only for `ignore`
    for i, id in ipairs(list) do if id < 0 then list[i] = o.ignore end end
    targets = list
  end
  local out = m.compile(function(i)
    local sum, count = m.cross_entropy(i.x, i.targets, o)
    return { sum = sum, count = count, gradient = m.grad(sum, { i.x })[1] }
  end, { x = { A.row, A.vocab }, targets = { A.row, dtype = "i32" } }) { x = logits, targets = targets }
  local sum, count, gradient = formula(o)
  check.near(out.sum, sum, 1e-5, name .. ": sum")
  check.equal(out.count, count, name .. ": count")
  check.all(out.gradient, gradient, 1e-5, name .. ": gradient")
end

-- Another axis, more axes, and logits that overflow without the largest subtracted.
local B = m.axes { batch = 2, seq = 3, classes = 4 }
local huge, ids = {}, { 0, 1, 2, 3, 0, 1 }
for i = 1, 24 do huge[i] = 300 * ((i * 7) % 5 - 2) end
local out = m.compile(function(i)
  local sum, count = m.cross_entropy(i.x, i.targets, { axis = "classes" })
  local lse = m.logsumexp(i.x, "classes")
  return { sum = sum, count = count, lse = lse, soft = m.softmax(i.x, "classes"):sum("classes"),
    log_soft = m.log_softmax(i.x, "classes") }
end, { x = { B.batch, B.seq, B.classes }, targets = { B.batch, B.seq, dtype = "i32" } }) { x = huge, targets = ids }
local sum, lse, log_soft = 0, {}, {}
for i = 1, 6 do
  local largest, total = -math.huge, 0
  for v = 1, 4 do largest = math.max(largest, huge[4 * i - 4 + v]) end
  for v = 1, 4 do total = total + math.exp(huge[4 * i - 4 + v] - largest) end
  lse[i] = largest + math.log(total)
  for v = 1, 4 do log_soft[4 * i - 4 + v] = huge[4 * i - 4 + v] - lse[i] end
  sum = sum + lse[i] - huge[4 * i - 3 + ids[i]]
end
check.near(out.sum, sum, 1e-5, "huge logits: sum")
check.equal(out.count, 6)
check.all(out.lse, lse, 1e-5, "logsumexp")
check.all(out.log_soft, log_soft, 1e-5, "log_softmax")
check.all(out.soft, { 1, 1, 1, 1, 1, 1 }, 1e-6, "softmax")

-- Infinite logits: of nothing to add up the logarithm is -inf, without a gradient; softmax of it is no number.
local inf, R = math.huge, m.axis("rows", 3)
local edge = m.compile(function(i)
  local lse = i.x:logsumexp "classes"
  return { lse = lse, all = i.x:slice("rows", 0, 1):logsumexp(table.unpack(i.x:axes())), soft = i.x:softmax "classes",
    gradient = m.grad(m.where(m.lt(lse, inf), lse, 0):sum(), { i.x })[1] }
end, { x = { R, B.classes } }) { x = { -inf, -inf, -inf, -inf, -inf, 5, -inf, -inf, 1, inf, -inf, 0 } }
check.equal(edge.all, -inf, "logsumexp over all axes")
for i, value in ipairs { -inf, 5.0, inf } do check.equal(edge.lse[i], value, "logsumexp of row " .. i) end
for i, value in ipairs { 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0 } do
  check.equal(edge.gradient[i], value, "its gradient")
  if i <= 4 then check.equal(edge.soft[i] == edge.soft[i], false, "softmax of -inf is a number") end
end

-- All positions ignored: nothing to learn from, and no NaN.
local none = m.compile(function(i)
  local total, count = m.cross_entropy(i.x, i.targets)
  return { total = total, count = count, gradient = m.abs(m.grad(total, { i.x })[1]):max() }
end, { x = { A.row, A.vocab }, targets = { A.row, dtype = "i32" } }) {
  x = logits, targets = { -1, -1, -1, -1, -1, -1, -1 },
}
check.equal(none.total, 0)
check.equal(none.count, 0)
check.equal(none.gradient, 0)

check.raises("has no option \"smoothing\"", m.cross_entropy, m.input("x", { A.row, A.vocab }),
  m.input("t", { A.row }, "i32"), { smoothing = 0.1 })
check.done()
