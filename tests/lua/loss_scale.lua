-- Training in f16: what the scaled loss does to gradients that are small, and to steps that overflow.
local core = require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")
core.compute_dtype "f16"
local m = require "mlua"

local A = m.axes { batch = 4, seq = 8, vocab = 256, embed = 16 }
local Model = m.module("Model", function(self) self.table, self.up = m.param { A.vocab, A.embed }, m.param { A.embed, A.vocab } end)
function Model:forward(tokens) return self.table:gather(tokens, "vocab"):dot(self.up, "embed") end

local function values(states)
  local all = {}
  for i, s in ipairs(states) do
    local v, list = s:get(), {}
    for k = 1, #v do list[k] = v[k] end
    all[i] = table.concat(list, " ")
  end
  return table.concat(all, "\n")
end

-- The steps of a training: {loss, norm, scale, skipped, whether parameters and moments changed}.
local function train(options)
  local model, optimizer, steps, last = Model(), m.adamw { lr = 0.01 }, {}, nil
  local all = { model = model, batch = A.batch, seq = A.seq, vocab = 256, steps = 6, schedule = m.constant(), optimizer = optimizer }
  for key, value in pairs(options) do all[key] = value end
  if options.weight then
    all.weight, all.loss = nil, function(tokens, targets)
      local total, count = m.cross_entropy(model(tokens), targets)
      return total * options.weight, count
    end
  end
  all.on_step = function(_, out)
    local states = table.move(m.parameters(model), 1, 2, 1, m.optimizer_states(optimizer))
    local now = values(states)
    steps[#steps + 1] = { loss = out.loss, norm = out.grad_norm, scale = out.loss_scale, skipped = out.skipped, changed = now ~= last }
    last = now
  end
  m.train(all)
  return steps
end

local plain = train {}
for i, s in ipairs(plain) do
  check.equal(s.scale, 65536.0, "the scale of step " .. i)
  check.equal(s.skipped, 0.0, "step " .. i .. " counts")
  check.equal(s.changed, true, "step " .. i .. " changes parameters")
end
check.equal(plain[6].loss < plain[1].loss, true, "the loss falls")

-- Gradients overflow where the scale is 2^32: each step of those halves it and changes nothing.
local high = train { loss_scale = 2.0 ^ 32, steps = 30 }
local skipped = 0
for i, s in ipairs(high) do
  check.equal(s.scale, 2.0 ^ (32 - skipped), "the scale of step " .. i)
  if s.skipped == 1 then
    skipped = skipped + 1
    check.equal(skipped, i, "the first steps alone are skipped")
  end
  if i > 1 then check.equal(s.changed, s.skipped == 0, "whether step " .. i .. " changes parameters or moments") end
end
check.equal(skipped > 2 and skipped < 20, true, skipped .. " steps were skipped")

-- A loss of 1e-7 of the size: its gradients are zero in f16 without a scale, and not with one.
local function norms(scale)
  local steps = train { loss_scale = scale, steps = 2, clip = 0, weight = 1e-7 }
  return steps[2].norm
end
check.equal(norms(1), 0.0, "the norm without a scale")
check.near(norms(2.0 ^ 20) * 1e7, plain[2].norm, 0.02, "the norm with a scale")

-- Accumulation: the sums of microbatches are scaled alike.
local parts = train { accum = 2 }
for i = 1, 6 do check.near(parts[i].loss, plain[i].loss, 2e-3, "the loss of step " .. i .. " of two microbatches") end
check.done()
