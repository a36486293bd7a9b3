-- What researchers write beyond m.train: second derivatives, straight-through estimators, states,
-- recurrence, contrastive and adversarial training.
local m = require "mlua"
local core = require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")

local A = m.axes { batch = 4, embed = 8, hidden = 6, codes = 5, seq = 70 }
local function wave(n, rate)
  local list = {}
  for i = 1, n do list[i] = math.sin(rate * i) end
  return list
end
local x = wave(32, 0.7)

-- A gradient penalty: the gradient of a gradient's norm.
local critic = m.param { A.embed, A.hidden, name = "critic", init = 0.4 }
local penalty = m.compile(function(feeds)
  local score = m.tanh(feeds.x:dot(critic, "embed")):sum()
  local g = m.grad(score, { feeds.x })[1]
  local excess = (g * g):sum "embed" - 1
  local total = (excess * excess):sum()
  return { penalty = total, gradient = m.grad(total, { critic })[1] }
end, { x = { A.batch, A.embed } })
local base = critic:get():table()
local exact = penalty { x = x }.gradient
for _, at in ipairs { 1, 20, 48 } do
  local function value(step)
    local moved = { table.unpack(base) }
    moved[at] = moved[at] + step
    critic:set(moved)
    return penalty { x = x }.penalty
  end
  check.near(exact[at], (value(0.01) - value(-0.01)) / 0.02, 1e-2, "second derivative " .. at)
end

-- Vector quantization: nearest code, straight-through gradient, and the code's own gradient.
local codebook = m.param { A.codes, A.embed, name = "codebook", init = 0.5 }
local quantize = m.compile(function(feeds)
  local distance = -2 * feeds.x:dot(codebook, "embed") + (codebook * codebook):sum "embed"
  local z = codebook:read():gather((-distance):argmax "codes", "codes")
  local q = feeds.x + (z - feeds.x):detach()
  return { z = z, q = q, gradient = m.grad((q * q):sum(), { feeds.x })[1], codes = m.grad((z * z):sum(), { codebook })[1] }
end, { x = { A.batch, A.embed } })
local out = quantize { x = x }
for i = 1, 32 do
  check.near(out.q[i], out.z[i], 1e-6, "straight-through value")
  check.near(out.gradient[i], 2 * out.z[i], 1e-6, "straight-through gradient")
end
local sum = 0
for i = 1, 40 do sum = sum + out.codes[i] end
local expected = 0
for i = 1, 32 do expected = expected + 2 * out.z[i] end
check.near(sum, expected, 1e-5, "gradients of the codes in use")

-- States: all reads see the values from before the program.
local weight = m.state { name = "weight", axes = { A.embed }, init = 1 }
local mean = m.state { name = "mean", axes = { A.embed }, init = 0 }
local count = m.state { name = "count", axes = {}, dtype = "i32", init = 0 }
local advance = m.compile(function()
  local new = weight:read() * 0.5
  weight:assign(new)
  mean:assign(0.5 * mean:read() + 0.5 * weight:read())
  count:assign(count:read() + 1)
  return { before = weight:read():sum(), after = new:sum(), count = count:read() }
end)
for step = 1, 3 do
  local o = advance {}
  check.near(o.before, 8 * 0.5 ^ (step - 1), 1e-6, "value before")
  check.near(o.after, 8 * 0.5 ^ step, 1e-6, "value after")
  check.equal(math.tointeger(o.count), step - 1, "count")
end
check.near(mean:get()[1], ((0.5 * 0 + 0.5) * 0.5 + 0.5 * 0.5) * 0.5 + 0.5 * 0.25, 1e-6, "running mean")

-- A recurrence of 70 steps, joined by one concat, against the same in Lua.
local rnn = m.compile(function(feeds)
  local h, states = m.zeros { A.batch }, {}
  for t = 0, 69 do
    h = m.tanh(0.9 * h + feeds.x:slice("seq", t, t + 1):sum "seq")
    states[t + 1] = h:broadcast { m.axis("seq", 1), A.batch }
  end
  local all = m.concat(states, "seq")
  return { all = all, gradient = m.grad(h:sum(), { feeds.x })[1] }
end, { x = { A.batch, A.seq } })
local drive = wave(280, 0.3)
out = rnn { x = drive }
for b = 0, 3 do
  local h, slope = {}, 1
  for t = 1, 70 do
    local raw = 0.9 * (h[t - 1] or 0) + drive[b * 70 + t]
    h[t] = 1 - 2 / (math.exp(2 * raw) + 1)
    check.near(out.all[(t - 1) * 4 + b + 1], h[t], 1e-5, "recurrence")
  end
  for t = 70, 1, -1 do
    slope = slope * (1 - h[t] ^ 2)
    check.near(out.gradient[b * 70 + t], slope, 1e-5, "gradient through time")
    slope = slope * 0.9
  end
end

-- Contrastive loss: targets are positions; each row and each column counts.
local contrast = m.compile(function(feeds)
  local other = m.axis("other", A.batch.size)
  local logits = feeds.a:dot(feeds.b:rename("batch", "other"), "embed")
  local rows, n = m.cross_entropy(logits, m.iota(A.batch), { axis = "other" })
  local columns = m.cross_entropy(logits, m.iota(other), { axis = "batch" })
  return { rows = rows, columns = columns, n = n }
end, { a = { A.batch, A.embed }, b = { A.batch, A.embed } })
local y = wave(32, 1.3)
out = contrast { a = x, b = y }
local rows, columns = 0, 0
for i = 0, 3 do
  local row, column, same = 0, 0, 0
  for j = 0, 3 do
    local ij, ji = 0, 0
    for e = 1, 8 do
      ij, ji = ij + x[i * 8 + e] * y[j * 8 + e], ji + x[j * 8 + e] * y[i * 8 + e]
    end
    row, column = row + math.exp(ij), column + math.exp(ji)
    if i == j then same = ij end
  end
  rows, columns = rows + math.log(row) - same, columns + math.log(column) - same
end
check.near(out.rows, rows, 1e-5, "contrastive rows")
check.near(out.columns, columns, 1e-5, "contrastive columns")
check.equal(out.n, 4.0, "contrastive count")
-- Targets that are shared by an axis of the logits count once for each position.
local shared = m.compile(function(feeds)
  local total, n = m.cross_entropy(feeds.x, m.iota(A.codes), { axis = "embed", broadcast = { A.batch } })
  return { total = total, n = n }
end, { x = { A.batch, A.codes, A.embed } })
check.equal(shared({ x = wave(160, 1) }).n, 20.0, "count of shared targets")

-- Two models that train against each other, each with its optimizer.
local Layer = m.module("Layer", function(self, from, to) self.w = m.param { from, to, init = 0.5 } end)
function Layer:forward(t) return t:dot(self.w, self.w:axes()[1]) end
local generator, judge = Layer(A.hidden, A.embed), Layer(A.embed, A.codes)
local function updater(model, optimizer, objective)
  local parameters = m.parameters(model)
  return m.compile(function(feeds)
    local loss = objective(feeds)
    optimizer.update(parameters, m.grad(loss, parameters), { rate = feeds.rate, step = feeds.step:cast "f32" })
    return loss
  end, { z = { A.batch, A.hidden }, x = { A.batch, A.embed }, rate = {}, step = { dtype = "i64" } })
end
local function score(t) return judge(t):mean() end
local judge_step = updater(judge, m.adamw { lr = 0.01 }, function(feeds) return score(generator(feeds.z)) - score(feeds.x) end)
local generator_step = updater(generator, m.sgd { lr = 0.1 }, function(feeds) return -score(generator(feeds.z)) end)
local function snapshot(model) return table.concat(m.parameters(model)[1]:get():table(), " ") end
local feeds = { z = wave(24, 0.9), x = x, rate = 1, step = 1 }
local before_g, before_j = snapshot(generator), snapshot(judge)
judge_step(feeds)
check.equal(snapshot(generator), before_g, "the judge's step leaves the generator")
check.equal(snapshot(judge) ~= before_j, true, "the judge's step changes the judge")
before_j = snapshot(judge)
local first = generator_step(feeds)
check.equal(snapshot(judge), before_j, "the generator's step leaves the judge")
check.equal(generator_step(feeds) < first, true, "the generator gets better")

-- Attention without heads is that of one head.
local A1 = m.axes { seq = 9, head_dim = 8, kv_seq = 9 }
local single = m.compile(function(i)
  local o = m.attention(i.q, i.k, i.k, { causal = true })
  local k = i.k:rename("seq", "kv_seq")
  local s = i.q:dot(k, "head_dim") * 8 ^ -0.5
  local seen = m.le(m.iota(A1.kv_seq):broadcast(m.axes_of(s)), m.iota(A1.seq))
  return m.abs(o - m.where(seen, s, -1e30):softmax "kv_seq":dot(k, "kv_seq")):max()
end, { q = { A1.seq, A1.head_dim }, k = { A1.seq, A1.head_dim } })
check.near(single { q = wave(72, 0.7), k = wave(72, 1.1) }, 0, 1e-5, "attention without heads")

-- Computed indices outside (those that are fed are refused): gather gives 0, scatter_add and one_hot drop them.
local outside = m.compile(function(i)
  local n = i.n - 1
  return {
    gathered = i.x:gather(n, "codes"), hot = n:one_hot(A.codes):sum(),
    scattered = m.scatter_add(n, i.x:slice("codes", 0, 4):rename("codes", "batch"), "batch", A.codes),
  }
end, { x = { A.codes }, n = { A.batch, dtype = "i32" } })
out = outside { x = { 1, 2, 3, 4, 5 }, n = { 0, 6, 3, 3 } }
check.all(out.gathered, { 0, 0, 3, 3 }, 0, "gather outside")
check.all(out.scattered, { 0, 0, 7, 0, 0 }, 0, "scatter outside")
check.equal(out.hot, 2.0, "one_hot outside")
check.done()
