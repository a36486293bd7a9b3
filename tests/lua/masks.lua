-- Losses that draw: masks in training and in evaluation, the same whatever a step is cut into, and evaluations that compare.
local m = require "mlua"
local core = require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")

local A = m.axes { embed = 8, vocab = 256, seq = 16, batch = 8 }
local Model = m.module("Model", function(self)
  self.table, self.out = m.param { A.vocab, A.embed }, m.param { A.embed, A.vocab }
  self.calls = m.buffer { init = 0 }
end)
function Model:forward(tokens)
  self.calls:assign(self.calls:read() + 1)
  return self.table:gather(tokens, "vocab"):dot(self.out, "embed")
end

-- A masked encoder: 15 % of the tokens are hidden, and counted.
local function masked(model, draw)
  return function(tokens, targets)
    local hidden = draw(m.axes_of(tokens))
    return m.cross_entropy(model(m.where(hidden, 0, tokens)), m.where(hidden, targets, -1))
  end
end
local function by_mask(axes) return m.random_mask(axes, 0.15) end
local function by_dropout(axes) return m.eq(m.dropout(m.ones(axes), 0.15, { always = true }), 0) end
local function by_uniform(axes) return m.lt(m.uniform(axes), 0.15) end
local function by_normal(axes) return m.gt(m.normal(axes), 1.0364) end
local function by_tensor(axes) return m.random_mask(axes, m.full({ A.seq }, 0.15)) end

local values = m.host("f32", 256, 8)
for i = 1, #values do values[i] = math.cos(i) end
local function run(draw, options)
  local model, losses, evaluations = Model(), {}, {}
  m.parameters(model)
  model.table:set(values)
  model.out:set(values, { A.vocab, A.embed })
  local o = {
    model = model, loss = masked(model, draw), batch = A.batch, seq = A.seq, steps = 4, optimizer = m.sgd { lr = 0 }, log_every = 1000,
    eval_every = 1, eval_batches = 3, on_step = function(_, out) losses[#losses + 1] = out.loss end,
  }
  for key, value in pairs(options or {}) do o[key] = value end
  local result = m.train(o)
  return losses, result.eval_loss, model
end

for name, draw in pairs { mask = by_mask, dropout = by_dropout, uniform = by_uniform, normal = by_normal, tensor = by_tensor } do
  local losses, evaluation, model = run(draw)
  check.equal(evaluation == evaluation and evaluation > 1, true, name .. ": a loss in evaluation")
  check.equal(losses[1] ~= losses[2], true, name .. ": steps")
  check.equal(select(2, run(draw, { steps = 1 })), evaluation, name .. ": the same in each evaluation")
  local cut, of_cut = run(draw, { accum = 4 })
  for i = 1, 4 do check.near(cut[i], losses[i], 1e-5, name .. ": 4 microbatches") end
  check.near(of_cut, evaluation, 1e-5, name .. ": evaluation by 4 microbatches")
  check.equal(model.calls:get()[1], 4, name .. ": what evaluations assign")
end

-- A loss that depends on the mask alone: the batches of an evaluation have masks of their own.
local function of_mask(batches)
  local model = Model()
  return m.train({
    model = model, batch = A.batch, seq = A.seq, steps = 1, log_every = 1000, eval_every = 1, eval_batches = batches,
    loss = function(tokens)
      local hidden = m.random_mask(m.axes_of(tokens), 0.3):cast "f32"
      return (hidden * m.iota(A.seq):cast "f32"):sum() + 1e-30 * model(tokens):sum(), hidden:sum()
    end,
  }).eval_loss
end
check.equal(of_mask(1) ~= of_mask(2), true, "batches of an evaluation")

-- The masks themselves: their share, and that they differ by call, step and batch, not by training.
local W = m.axes { wide = 20000 }
local function drawn(training)
  return m.compile(function()
    local a, b, u, n = m.random_mask({ W.wide }, 0.3), m.random_mask({ W.wide }, 0.3), m.uniform { W.wide }, m.normal { W.wide }
    local dropped = m.dropout(m.ones { W.wide }, 0.25, { always = true })
    local function share(x) return x:cast("f32"):mean() end
    return { a = share(a), both = share(m.logical_and(a, b)), first = a, u = u:mean(), n = n:mean(), n2 = (n * n):mean(), zeros = share(m.eq(dropped, 0)),
      none = share(m.random_mask({ W.wide }, 0)), all = share(m.random_mask({ W.wide }, 1)) }
  end, { step = { dtype = "i64" } }, { training = training })
end
local one, two = drawn(false) { step = 1 }, drawn(false) { step = 2 }
check.near(one.a, 0.3, 0.02, "share")
check.near(one.both, 0.09, 0.02, "two calls are independent")
check.near(one.u, 0.5, 0.02, "uniform")
check.near(one.n, 0, 0.03, "normal")
check.near(one.n2, 1, 0.04, "variance")
check.near(one.zeros, 0.25, 0.02, "dropout that always drops")
check.equal(one.none, 0, "a share of 0")
check.equal(one.all, 1, "a share of 1")
local same, equal = 0, 0
local trained = drawn(true) { step = 1 }
for i = 1, W.wide.size do
  if one.first[i] == two.first[i] then same = same + 1 end
  if one.first[i] == trained.first[i] then equal = equal + 1 end
end
check.near(same / W.wide.size, 0.3 ^ 2 + 0.7 ^ 2, 0.02, "another step")
check.equal(equal, W.wide.size, "in training")
check.done()
