-- m.moe against a loop over all experts in plain ops: values, every gradient, capacity and drops,
-- losses of the router by their formulas, loads, and the bias that evens them. moe_ranks.lua runs
-- the same on several ranks.
local ranks = ...
local m = require "mlua"
local core = require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")

local A = m.axes { batch = 4, seq = 10, embed = 12, ffn = 20, experts = 6 }
local function axes(list)
  local out = {}
  for i, axis in ipairs(list) do out[i] = axis end
  return out
end
local X = { A.batch, A.seq, A.embed }

-- The same from the same parameters, without routing: every expert sees every token.
local function dense(moe, x, o)
  local logits = x:dot(moe.router:read(), "embed")
  local probs = o.router == "sigmoid" and m.sigmoid(logits) or m.softmax(logits, "experts")
  local select = moe.bias and m.detach(probs) + moe.bias:read() or m.detach(probs)
  local chosen -- 1 for the top_k of each token
  for _ = 1, o.top_k do
    local best = m.one_hot((chosen and select - 10 * chosen or select):argmax "experts", A.experts)
    chosen = chosen and chosen + best or best
  end
  local weights = probs * chosen
  if o.normalize ~= false and o.top_k > 1 then weights = weights / weights:sum "experts" end
  weights = weights * (o.scale or 1)
  local y
  for e = 0, A.experts.size - 1 do
    local function of(w) return w:slice("experts", e, e + 1):sum "experts" end
    local h = x:dot(of(moe.up:read()), "embed")
    h = moe.gate and m.swiglu(x:dot(of(moe.gate:read()), "embed"), h) or m.gelu(h)
    local part = h:dot(of(moe.down:read()), "ffn") * weights:slice("experts", e, e + 1):sum "experts"
    y = y and y + part or part
  end
  if moe.shared_up then
    y = y + m.swiglu(x:dot(moe.shared_gate, "embed"), x:dot(moe.shared_up, "embed")):dot(moe.shared_down, "ffn")
  end
  return y, chosen, probs, logits
end

local function layer(o)
  local spec = { A.embed, experts = A.experts, ffn = A.ffn, init = 0.4 }
  for key, value in pairs(o) do spec[key] = value end
  local moe = m.moe(spec)
  m.parameters(moe) -- names them
  return moe
end

-- y and the gradients of sum(y * w) for x and every parameter.
local function results(moe, fn, x_axes)
  local parameters = m.parameters(moe)
  return m.compile(function(feeds)
    local x = m.uniform(axes(x_axes or X), 7) * 2 - 1 + feeds.zero
    local y = fn(x)
    local loss = (y * m.uniform(m.axes_of(y), 8)):sum()
    local out = { y = y }
    local wrt = { x, table.unpack(parameters) }
    for i, g in ipairs(m.grad(loss, wrt)) do out[i == 1 and "dx" or "d" .. parameters[i - 1]:name()] = g end
    return out
  end, { zero = {} }) { zero = 0 }
end

local function same(a, b, what)
  for name, value in pairs(a) do check.all(value, b[name], 1e-5, what .. ": " .. name) end
end

-- All of a list; on several ranks, where each takes its time, those that say so.
local function each(list)
  local i = 0
  return function()
    repeat i = i + 1 until not list[i] or not ranks or list[i].ranks
    local o = {}
    for key, value in pairs(list[i] or {}) do o[key] = value end
    o.ranks = nil
    return list[i] and o
  end
end

for o in each {
  { top_k = 2 }, { top_k = 1 }, { top_k = 6 }, { top_k = 3, normalize = false, scale = 2.5, expert = "gelu" },
  { top_k = 2, router = "sigmoid", bias_balance = 0.1, shared = 2, ranks = true }, { top_k = 2, capacity = 5 }, { top_k = 6, capacity = 1 },
  { top_k = 3, capacity = 9, router = "sigmoid", expert = "gelu" },
} do
  local what = ("top_k %d, %s, %s, capacity %s"):format(o.top_k, o.router or "softmax", o.expert or "swiglu", tostring(o.capacity))
  local moe = layer(o)
  if moe.bias then moe.bias:set { 0.3, -0.2, 0, 0.1, -0.4, 0.2 } end
  same(results(moe, moe), results(moe, function(x) return (dense(moe, x, o)) end), what)
end

-- Other axes than batch and seq, and an order of axes that is not theirs.
if not ranks then
  local moe, o = layer { top_k = 2 }, { top_k = 2 }
  local B = m.axes { a = 2, b = 3, c = 4 }
  for _, list in ipairs { { A.embed, A.seq }, { B.a, A.embed, B.b, B.c }, { A.seq, A.batch, A.embed } } do
    same(results(moe, moe, list), results(moe, function(x) return (dense(moe, x, o)):permute(table.unpack(x:axes())) end, list), "axes")
  end
  local held = layer { top_k = 2, capacity = 5 }
  for _, list in ipairs { { A.embed, A.seq }, { B.a, A.seq, A.embed, B.b }, { A.seq, A.batch, A.embed } } do
    same(results(held, held, list), results(held, function(x) return (dense(held, x, o)):permute(table.unpack(x:axes())) end, list), "axes, capacity")
  end
end

-- All tokens to one expert: the others are empty. With room for two, the first two tokens of each
-- sequence are served and the others give 0.
local one_way = {} -- router weights: positive inputs choose expert 3, then 1
for i = 1, A.embed.size * A.experts.size do
  local e = (i - 1) % A.experts.size
  one_way[i] = e == 3 and 1 or e == 1 and 0.5 or -e
end
do
  local free, full = layer { top_k = 1 }, layer { top_k = 1, capacity = 1 }
  free.router:set(one_way)
  full.router:set(one_way)
  for _, key in ipairs { "gate", "up", "down" } do full[key]:set(free[key]:get()) end
  local function forward(moe)
    return m.compile(function(feeds)
      local y = moe(m.uniform(axes(X), 7) + feeds.zero)
      return { y = y, other = m.zeros {} }
    end, { zero = {} }, { training = true }) { zero = 0 }
  end
  local y, cut = forward(free).y, forward(full).y
  local expected = {}
  for i = 1, #y do expected[i] = (i - 1) // A.embed.size % A.seq.size < 2 and y[i] or 0 end
  check.all(cut, expected, 1e-6, "what a small capacity drops")
  check.all(free.load:get(), { 0, 0, 0, 40, 0, 0 }, 0, "load of one way")
  check.all(full.dropped:get(), { 32 }, 0, "dropped")
  local statistics = full:statistics()
  check.near(statistics.dropped, 0.8, 1e-6)
  check.near(statistics.peak, 6, 1e-6)
  if not ranks then same(results(free, free), results(free, function(x) return (dense(free, x, { top_k = 1 })) end), "empty experts") end
  -- second choices fill expert 1 to its room, too: kept are the first four of each sequence
  local two = layer { top_k = 2, capacity = 1 }
  two.router:set(one_way)
  forward(two)
  check.all(two.dropped:get(), { 2 * 4 * 6 }, 0, "dropped second choices")
end

-- The router's losses.
for o in each {
  { top_k = 2, aux_loss = 0.3, z_loss = 0.1, ranks = true }, { top_k = 2, aux_loss = 0.3, aux_over = "batch" }, { top_k = 3, z_loss = 0.2 },
  { top_k = 1, router = "sigmoid", aux_loss = 0.1, z_loss = 0.05 },
} do
  local moe = layer(o)
  local out = m.compile(function(feeds)
    local x = m.uniform(axes(X), 7) * 2 - 1 + feeds.zero
    moe(x)
    local added = m.added_loss(60) -- of twice as many tokens
    local _, chosen, probs, logits = dense(moe, x, o)
    local gradient = m.grad(added, { moe.router })[1]
    return { added = added, chosen = chosen, probs = probs, logits = logits, size = (gradient * gradient):sum() }
  end, { zero = {} }) { zero = 0 }
  local E, S, B = 6, 10, 4
  local function at(list, b, s, e) return list[((b - 1) * S + s - 1) * E + e] end
  local aux, z = 0, 0
  local whole = o.aux_over == "batch"
  for b = 1, whole and 1 or B do
    for e = 1, E do
      local f, p, n = 0, 0, 0
      for b2 = whole and 1 or b, whole and B or b do
        for s = 1, S do
          local total = 0
          for e2 = 1, E do total = total + at(out.probs, b2, s, e2) end
          f, p, n = f + at(out.chosen, b2, s, e), p + at(out.probs, b2, s, e) / total, n + 1
        end
      end
      aux = aux + E * f / (n * o.top_k) * p / n * (n / (B * S))
    end
  end
  for b = 1, B do
    for s = 1, S do
      local total = 0
      for e = 1, E do total = total + math.exp(at(out.logits, b, s, e)) end
      z = z + math.log(total) ^ 2 / (B * S)
    end
  end
  check.near(out.added, 60 * ((o.aux_loss or 0) * aux + (o.z_loss or 0) * z), 1e-5, "router losses")
  if not (out.size > 1e-6) then check.equal(out.size, "a gradient", "of the router losses") end
end

if ranks then return check.done() end -- of trainings, tests/process/dist_models.c

-- Training: aux_loss is told and not in the loss; accumulation changes nothing; the bias evens a
-- router that sends nearly everything one way.
local T = m.axes { batch = 4, seq = 16, vocab = 256, embed = 16, ffn = 16, experts = 4 }
local Tiny = m.module("Tiny", function(self, o)
  self.embedding = m.param { T.vocab, T.embed, init = 0.5 }
  local spec = { T.embed, experts = T.experts, ffn = T.ffn, top_k = 1 }
  for key, value in pairs(o) do spec[key] = value end
  self.moe, self.head = m.moe(spec), m.param { T.vocab, T.embed }
end)
function Tiny:forward(tokens)
  local x = self.embedding:gather(tokens, "vocab")
  return (x + self.moe(x)):dot(self.head, "embed")
end

local function train(o, options)
  local Fresh = m.module("Fresh", function(self) self.tiny = Tiny(o) end)
  function Fresh:forward(tokens) return self.tiny(tokens) end
  local model, seen = Fresh(), {}
  local all = {
    model = model, batch = T.batch, seq = T.seq, steps = 4, optimizer = m.adamw { lr = 0.01 }, log_every = 1000,
    on_step = function(_, out)
      seen[#seen + 1] = { out.loss, out.aux_loss, model.tiny.moe:statistics().peak, table.unpack(model.tiny.moe.load:get()) }
    end,
  }
  for key, value in pairs(options or {}) do all[key] = value end
  -- the same initial values for every training, whatever its parameters are called
  local parameters = m.parameters(model)
  for i, p in ipairs(parameters) do
    local list = {}
    for j = 1, p:elements() do list[j] = math.sin(i * 100 + j * j * 0.37) * 0.4 end
    p:set(list)
  end
  if options and options.skew then
    local list = model.tiny.embedding:get()
    for j = 1, #list do list[j] = math.abs(list[j]) end
    model.tiny.embedding:set(list)
    list = {}
    for j = 1, T.embed.size * T.experts.size do list[j] = 0.4 * math.sin(j * j) + ((j - 1) % T.experts.size == 2 and 0.1 or -0.1) end
    model.tiny.moe.router:set(list)
  end
  all.skew = nil
  m.train(all)
  return seen
end

local options = { aux_loss = 0.02, z_loss = 0.001, top_k = 2, bias_balance = 0.01 }
local whole, cut = train(options), train(options, { accum = 4 })
for step = 1, 4 do
  for i = 1, #whole[step] do check.near(cut[step][i], whole[step][i], 1e-5, ("accumulation: step %d, figure %d"):format(step, i)) end
end
if not (whole[1][2] > 0.02) then check.equal(whole[1][2], "above the weight of a balanced load", "aux_loss") end
local plain = train { top_k = 2, bias_balance = 0.01 }
check.near(plain[1][1], whole[1][1], 1e-6, "the loss without that of the router")
check.equal(plain[1][2], nil, "aux_loss of none")

local skewed = train({ router = "sigmoid", bias_balance = 0.01 }, { steps = 60, skew = true, optimizer = m.adamw { lr = 1e-4 } })
check.near(skewed[1][3], 4, 1e-6, "everything to one expert at first")
local totals, largest = { 0, 0, 0, 0 }, 0
for step = 21, 60 do
  for e = 1, 4 do totals[e] = totals[e] + skewed[step][3 + e] end
end
for e = 1, 4 do largest = math.max(largest, totals[e] / (40 * 64 / 4)) end
if not (largest < 1.4) then check.equal(largest, "below 1.4", "load behind the bias, over the even one") end

-- What it is made of: rows of groups, and sums at indices that keep an axis.
do
  local B = m.axes { batch = 2, row = 3, k = 2, group = 2, n = 1 }
  local input = m.input
  local out = m.compile(function(i)
    return { y = i.x:ragged_dot(i.w, "k", i.starts, i.ends), sums = m.scatter_add(i.index, i.x, "row", B.group, { "batch" }) }
  end, {
    x = { B.batch, B.row, B.k }, w = { B.group, B.k, B.n }, starts = { B.batch, B.group, dtype = "i32" },
    ends = { B.batch, B.group, dtype = "i32" }, index = { B.batch, B.row, dtype = "i32" },
  }) {
    x = { 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12 }, w = { 1, 10, 100, 1000 }, starts = { 0, 1, 1, 3 }, ends = { 1, 3, 2, 3 },
    index = { 0, 1, 1, 1, 0, 0 },
  }
  check.all(out.y, { 21, 4300, 6500, 0, 109, 0 }, 1e-6, "ragged_dot")
  check.all(out.sums, { 1, 2, 8, 10, 20, 22, 7, 8 }, 1e-6, "scatter_add that keeps an axis")
  local x, w = input("x", { B.row, B.k }), input("w", { B.group, B.k, B.n })
  local starts, real = input("s", { B.group }, "i32"), input("r", { B.group })
  check.raises("has no such axis", x.ragged_dot, x, input("v", { B.group, B.n }), "k", starts, starts)
  check.raises("each end of ragged_dot is i32, not f32", x.ragged_dot, x, w, "k", starts, real)
  check.raises("needs rows, the contracted one", x.ragged_dot, input("y", { B.batch, B.row, B.k }), w, "k", starts, starts)
  check.raises("with rows beside the contracted axis", x.ragged_dot, x, w, "k", input("t", { B.row }, "i32"), starts)
end

check.raises("cannot choose top_k=7 of 6 experts", m.moe, { A.embed, experts = A.experts, ffn = A.ffn, top_k = 7 })
check.raises("m.moe's experts must be an axis", m.moe, { A.embed, experts = 4, ffn = A.ffn })
check.raises("no option \"expert_count\"", m.moe, { A.embed, expert_count = 4, ffn = A.ffn })
check.raises("capacity must be a factor above 0", m.moe, { A.embed, experts = A.experts, ffn = A.ffn, capacity = 0 })
check.raises("capacity must be a factor above 0", m.moe, { A.embed, experts = A.experts, ffn = A.ffn, capacity = 0 / 0 })
for _, key in ipairs { "aux_loss", "z_loss", "bias_balance", "scale", "shared" } do
  for _, value in ipairs { -1, 0 / 0, math.huge, "1" } do
    check.raises("m.moe's " .. key .. " must be", m.moe, { A.embed, experts = A.experts, ffn = A.ffn, [key] = value })
  end
end
check.raises("shared must be an integer, 0 or more, got 1.5", m.moe, { A.embed, experts = A.experts, ffn = A.ffn, shared = 1.5 })
check.raises("router must be softmax or sigmoid", m.moe, { A.embed, experts = A.experts, ffn = A.ffn, router = "hash" })
check.done()
