-- Every optimizer against its definition in plain Lua, schedules, groups, clipping.
local m = require "mlua"
local core = require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")

local A = m.axes { row = 3, col = 4 }
local N, STEPS = 12, 4
local start, gradient = {}, {}
for i = 1, N do start[i], gradient[i] = math.sin(i), math.cos(3 * i) end

local count = 0
-- Run STEPS updates with a constant gradient; the parameter's final values. Another one is updated before it, which the optimizer's
-- rule is traced for; the parameter gets the same nodes.
local function run(optimizer, decay)
  count = count + 1
  local other, p = m.param { A.row, A.col, name = "other" .. count, decay = decay }, m.param { A.row, A.col, name = "p" .. count, decay = decay }
  p:set(start)
  local step = m.compile(function(feeds)
    optimizer.update({ other, p }, { feeds.g * 2, feeds.g }, { rate = feeds.rate, step = feeds.step:cast "f32" })
  end, { g = { A.row, A.col }, rate = {}, step = { dtype = "i64" } })
  for i = 1, STEPS do step { g = gradient, rate = 0.5, step = i } end
  return p:get()
end

-- The same in plain Lua: rule(p, g, state, step) for one element.
local function expected(rule)
  local out = {}
  for i = 1, N do
    local p, s = start[i], { m = 0, v = 0 }
    for step = 1, STEPS do p = rule(p, gradient[i], s, step) end
    out[i] = p
  end
  return out
end

check.all(run(m.adamw { lr = 0.1, weight_decay = 0.2 }), expected(function(p, g, s, t)
  s.m, s.v = 0.9 * s.m + 0.1 * g, 0.95 * s.v + 0.05 * g * g
  return p - 0.05 * (s.m / (1 - 0.9 ^ t) / (math.sqrt(s.v / (1 - 0.95 ^ t)) + 1e-8) + 0.2 * p)
end), 1e-5, "adamw")
check.all(run(m.adamw { lr = 0.1, weight_decay = 0.2 }, false), expected(function(p, g, s, t)
  s.m, s.v = 0.9 * s.m + 0.1 * g, 0.95 * s.v + 0.05 * g * g
  return p - 0.05 * (s.m / (1 - 0.9 ^ t) / (math.sqrt(s.v / (1 - 0.95 ^ t)) + 1e-8))
end), 1e-5, "adamw without decay")
-- beta2 near 1: with a constant gradient the corrected averages are the gradient and its square at every step, so that a
-- step is lr long.
local unit = { 1, 10, 20000 }
for k, last in ipairs(unit) do
  local p, optimizer = m.param { A.row, A.col, name = "near one" .. k }, m.adamw { lr = 1, beta1 = 0.99, beta2 = 0.99999, weight_decay = 0 }
  p:set(core.host("f32", N):fill(0):reshape(3, 4))
  local step = m.compile(function(feeds)
    optimizer.update({ p }, { feeds.g }, { rate = feeds.rate, step = feeds.step:cast "f32" })
  end, { g = { A.row, A.col }, rate = {}, step = { dtype = "i64" } })
  for i = 1, last do step { g = gradient, rate = i == last and 1 or 0, step = i } end
  for i, value in ipairs(p:get():table()) do
    check.near(math.abs(value), 1, 2e-5, ("adamw with beta2 = 0.99999: element %d at step %d"):format(i, last))
  end
end
check.all(run(m.sgd { lr = 0.1, momentum = 0.8, weight_decay = 0.01 }), expected(function(p, g, s)
  s.m = 0.8 * s.m + g + 0.01 * p
  return p - 0.05 * s.m
end), 1e-5, "sgd")
check.all(run(m.sgd { lr = 0.1, momentum = 0.8, nesterov = true }), expected(function(p, g, s)
  s.m = 0.8 * s.m + g
  return p - 0.05 * (g + 0.8 * s.m)
end), 1e-5, "nesterov")
check.all(run(m.lion { lr = 0.1, weight_decay = 0.3 }), expected(function(p, g, s)
  local c = 0.9 * s.m + 0.1 * g
  s.m = 0.99 * s.m + 0.01 * g
  return p - 0.05 * ((c > 0 and 1 or c < 0 and -1 or 0) + 0.3 * p)
end), 1e-5, "lion")
check.all(run(m.adamw { lr = 7, groups = function() return { lr = 0.1, weight_decay = 0 } end }), expected(function(p, g, s, t)
  s.m, s.v = 0.9 * s.m + 0.1 * g, 0.95 * s.v + 0.05 * g * g
  return p - 0.05 * (s.m / (1 - 0.9 ^ t) / (math.sqrt(s.v / (1 - 0.95 ^ t)) + 1e-8))
end), 1e-5, "groups")

-- Muon in plain Lua matrices.
local function matmul(a, b, n, k, c)
  local out = {}
  for i = 1, n do
    out[i] = {}
    for j = 1, c do
      local sum = 0
      for l = 1, k do sum = sum + a[i][l] * b[l][j] end
      out[i][j] = sum
    end
  end
  return out
end
local function transpose(a, n, c)
  local out = {}
  for j = 1, c do
    out[j] = {}
    for i = 1, n do out[j][i] = a[i][j] end
  end
  return out
end
local function muon()
  local p, momentum = {}, {}
  for i = 1, 3 do
    p[i], momentum[i] = {}, {}
    for j = 1, 4 do p[i][j], momentum[i][j] = start[(i - 1) * 4 + j], 0 end
  end
  for _ = 1, STEPS do
    local x, norm = {}, 0
    for i = 1, 3 do
      x[i] = {}
      for j = 1, 4 do
        local g = gradient[(i - 1) * 4 + j]
        momentum[i][j] = 0.95 * momentum[i][j] + g
        x[i][j] = g + 0.95 * momentum[i][j]
        norm = norm + x[i][j] ^ 2
      end
    end
    for i = 1, 3 do for j = 1, 4 do x[i][j] = x[i][j] / math.sqrt(norm) end end
    for _ = 1, 5 do
      local gram = matmul(x, transpose(x, 3, 4), 3, 4, 3)
      local squared = matmul(gram, gram, 3, 3, 3)
      for i = 1, 3 do for j = 1, 3 do gram[i][j] = -4.7750 * gram[i][j] + 2.0315 * squared[i][j] end end
      local y = matmul(gram, x, 3, 3, 4)
      for i = 1, 3 do for j = 1, 4 do x[i][j] = 3.4445 * x[i][j] + y[i][j] end end
    end
    for i = 1, 3 do
      for j = 1, 4 do p[i][j] = p[i][j] - 0.05 * (x[i][j] * 0.2 * 2 + 0.1 * p[i][j]) end
    end
  end
  local flat = {}
  for i = 1, 3 do for j = 1, 4 do flat[#flat + 1] = p[i][j] end end
  return flat
end
check.all(run(m.muon { lr = 0.1 }), muon(), core.compute_dtype() == "bf16" and 2e-2 or 1e-4, "muon")

-- Slots in bf16. Between two bf16 numbers (1 + 1/128 is the next after 1) the draw decides, in proportion.
do
  local D = core.axis("draws", 4096)
  local round = m.compile(function(i)
    local x = i.x:broadcast { D }
    return core.stochastic_bf16(x, m.uniform({ D }, 7))
  end, { x = {} })
  for _, case in ipairs { { 1, 1, 1 }, { 1 + 1 / 512, 1, 1 + 1 / 128 }, { -1 - 3 / 512, -1 - 1 / 128, -1 }, { 0, 0, 0 }, { math.huge, math.huge, math.huge } } do
    local x, low, high = table.unpack(case)
    local sum = 0
    for _, y in ipairs(round { x = x }:table()) do
      if y ~= low and y ~= high then check.near(y, low, 0, "a neighbour of " .. x) end
      sum = sum + y
    end
    if low ~= high then check.near(sum / 4096, x, 2e-4, "the mean of the rounded") else check.equal(sum / 4096, x, "what bf16 has") end
  end
end
-- An average that moves by a thousandth of the difference in a step: rounded to nearest it would stop at half of it.
do
  local p, optimizer = m.param { A.row, A.col, name = "narrow" }, m.adamw { lr = 0, beta2 = 0.999, weight_decay = 0, state_dtype = "bf16" }
  local step = m.compile(function(feeds)
    optimizer.update({ p }, { feeds.g }, { rate = feeds.rate, step = feeds.step:cast "f32" })
  end, { g = { A.row, A.col }, rate = {}, step = { dtype = "i64" } })
  for i = 1, 3000 do step { g = gradient, rate = 0, step = i } end
  local found, wanted = 0, 0
  for _, state in ipairs(m.optimizer_states(optimizer)) do
    check.equal(state:dtype(), "bf16", state:name())
    if state:name() == "narrow.adamw.v" then
      for i, v in ipairs(state:get():table()) do found, wanted = found + v, wanted + gradient[i] ^ 2 * (1 - 0.999 ^ 3000) end
    end
  end
  check.near(found / wanted, 1, 0.03, "the average of squares in bf16")
end
check.all(run(m.adamw { lr = 0.1, state_dtype = "bf16" }), run(m.adamw { lr = 0.1 }), 2e-3, "adamw with slots in bf16")
check.raises('state_dtype must be "f32" or "bf16", got "f64"', m.adamw, { state_dtype = "f64" })

-- An optimizer that nothing else uses is collected; the numbers in the names of later ones' slots follow from the order in which all were made.
do
  local p, made = m.param { A.row, name = "looped" }, setmetatable({}, { __mode = "k" })
  for i = 1, 4 do
    local optimizer = m.adamw { lr = 0.1 }
    made[optimizer] = true
    m.compile(function(feeds) optimizer.update({ p }, { feeds.g }, { rate = 1, step = feeds.step }) end, { g = { A.row }, step = {} })
    check.equal(m.optimizer_states(optimizer)[1]:name(), ("looped.adamw%s.m"):format(i > 1 and i or ""))
    optimizer = nil
    collectgarbage()
  end
  collectgarbage()
  check.equal(next(made), nil, "optimizers of a loop are collected")
end

-- Schedules, at steps 1 .. 10 of 10.
local function values(schedule)
  local list = {}
  for step = 1, 10 do list[step] = schedule(step, 10) end
  return list
end
check.all(values(m.constant { warmup = 4 }), { 0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 1 })
check.all(values(m.linear { warmup = 2 }), { 0.5, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8, 0 })
check.near(m.cosine { warmup = 2 }(6, 10), 0.55)
check.near(m.cosine { warmup = 2, final = 0 }(10, 10), 0)
check.all(values(m.wsd { warmup = 1, decay = 0.3 }), { 1, 1, 1, 1, 1, 1, 1, 2 / 3, 1 / 3, 0 }) -- a share of all ten
check.all(values(m.wsd { warmup = 5, decay = 0.3 }), { 0.2, 0.4, 0.6, 0.8, 1, 1, 1, 2 / 3, 1 / 3, 0 }) -- whatever the warm-up
check.all(values(m.wsd { warmup = 8, decay = 0.5, final = 0.5 }), { 1 / 8, 2 / 8, 3 / 8, 4 / 8, 5 / 8, 6 / 8, 7 / 8, 1, 0.75, 0.5 })
check.all(values(m.wsd { decay = 0 }), { 1, 1, 1, 1, 1, 1, 1, 1, 1, 1 })
check.raises("a share of the steps, from 0 to 1, got 500", m.wsd, { decay = 500 })
check.raises("a layer is a parameter and a product", m.linear, 16, 64)
check.raises("weight_decy", m.adamw, { weight_decy = 1 })
check.raises("m.sgd: lr must be a finite number, got inf", m.sgd, { lr = math.huge })
check.done()
