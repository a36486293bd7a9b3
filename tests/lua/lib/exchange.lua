-- A pipeline whose experts' rows are exchanged with too few places, in own loops: layers assign states in the forward pass, and
-- gradients are added up in several ways. `way` = "sums": another program sets the sums to zero; "first": they begin anew at the first
-- microbatch of every other step, so that the steps between must find them as they were; "single": one program has the optimizer,
-- too. Prints what was learned, which is to be the same on any number of ranks (tests/process/moe_dispatch.c).
local m = require "mlua"
local core = require "mlua.core"
local cfg = m.config { layers = 4, seq = 8, batch = 16, steps = 4, schedule = "1f1b", chunks = 1, microbatches = 4, exchange = 1.0, way = "sums", late = false }
local A = m.axes { embed = 16, ffn = 16, experts = 4, vocab = 256, seq = cfg.seq, batch = cfg.batch }

local Block = m.module("Block", function(self)
  self.norm = m.rms_norm { A.embed }
  self.scale = m.buffer { A.embed, init = "ones" }
  self.moe = m.moe { A.embed, experts = A.experts, ffn = A.ffn, top_k = 2, bias_balance = 0.05, aux_loss = 0.01 }
end)

function Block:forward(x)
  local h = self.norm(x)
  local square, scale = core.stop_gradient(m.mean(h * h, "batch", "seq")), self.scale:read()
  self.scale:assign(0.9 * scale + 0.1 * square) -- in order, and by what it was
  return x + self.moe(h / scale)
end

local Net = m.module("Net", function(self)
  self.embedding = m.param { A.vocab, A.embed }
  self.blocks = m.stack(cfg.layers, Block)
  self.norm = m.rms_norm { A.embed }
end)

function Net:forward(tokens)
  local x = self.embedding:gather(tokens, "vocab")
  for _, block in ipairs(self.blocks) do x = block(x) end
  return self.norm(x):dot(self.embedding, "embed")
end

local model = Net()
local layout = m.layout {
  mesh = { { "pp", 1 }, { "ep", 1 } }, params = { ep = { "experts" } }, acts = { ep = { "batch", "experts" } }, exchange = cfg.exchange,
  stages = { pp = "layers", schedule = cfg.schedule, chunks = cfg.chunks > 1 and cfg.chunks or nil, microbatches = cfg.microbatches },
}
m.use_layout(layout, "exchange.lua")

local parts = cfg.way == "single" and 1 or cfg.microbatches
local micro = m.axis("batch", cfg.batch // parts)
local tokens, targets = core.host("i32", micro.size, cfg.seq), core.host("i32", micro.size, cfg.seq)
-- Of few different tokens, and more and more of one: they share experts.
local function fill(step, part)
  for i = 1, #tokens do
    local at = (step * parts + part) * #tokens + i
    tokens[i] = at * 7919 % 97 < 10 * step and 1 or at * 104729 % 251
    targets[i] = (tokens[i] * 31 + 7) % 256
  end
end

local function loss_of(feeds)
  local total, count = m.cross_entropy(model(feeds.tokens), feeds.targets)
  return total / (count * parts)
end

local spec = { micro, A.seq, dtype = "i32" }
local inputs = { tokens = spec, targets = spec }
local rate = 0.5

local function descend(parameters, gradient)
  for i, p in ipairs(parameters) do p:assign(p:read() - rate * gradient(i, p)) end
end

local steps = {}
function steps.single()
  local parameters
  local program = m.compile(function(feeds)
    local loss = loss_of(feeds)
    parameters = m.parameters(model)
    local gradients = core.grad(loss, parameters)
    descend(parameters, function(i) return gradients[i] end)
    return { loss = loss }
  end, inputs, { training = true })
  return function(step)
    fill(step, 0)
    return program { tokens = tokens, targets = targets }.loss
  end
end

-- `begins`: by an input of the program, every other step.
local function summed(begins)
  local parameters, sums, total = nil, {}, core.state { name = "loss", axes = {}, dtype = "f32", kind = "gradient", init = m.zeros {} }
  local function add(state, feeds, value)
    state:assign((begins and core.where(feeds.first, 0, state:read()) or state:read()) + value)
  end
  local more = { tokens = spec, targets = spec, first = begins and { dtype = "bool" } or nil }
  local part = m.compile(function(feeds)
    local loss = loss_of(feeds)
    parameters = m.parameters(model)
    for i, g in ipairs(core.grad(loss, parameters)) do
      local axes = m.axes_of(parameters[i])
      sums[i] = sums[i] or core.state { name = "sum." .. i, axes = axes, dtype = "f32", kind = "gradient", init = m.zeros(axes) }
      add(sums[i], feeds, g)
    end
    add(total, feeds, loss)
  end, more, { training = true, microbatches = parts })
  local finish = m.compile(function()
    descend(parameters, function(i) return sums[i]:read() end)
    if not begins then
      for _, sum in ipairs(sums) do sum:assign(m.zeros(m.axes_of(sum))) end
      total:assign(m.zeros {})
    end
    return { loss = total:read() }
  end, {}, { training = true })
  return function(step)
    for i = 0, parts - 1 do
      fill(step, i)
      local feeds = { tokens = tokens, targets = targets }
      if begins then feeds.first = i == 0 and step % 2 == 1 end
      part:start(feeds)
    end
    if not cfg.late then part:finish() end
    local loss = finish({}).loss
    if cfg.late then part:finish() end -- the step that finish depends on is settled before, all the same
    return loss
  end
end
function steps.sums() return summed(false) end
function steps.first() return summed(true) end

local function tell(name, value)
  local sum = 0
  for i = 1, #value do sum = sum + value[i] * ((i * 7) % 13 - 6) end
  print(("%s %.6f"):format(name, sum))
end

local step = steps[cfg.way]()
for i = 1, cfg.steps do print(("loss %.6f"):format(step(i))) end
for _, p in ipairs(m.parameters(model)) do tell(p:name(), p:get()) end
for i, block in ipairs(model.blocks) do tell("scale " .. i, block.scale:get()) end
