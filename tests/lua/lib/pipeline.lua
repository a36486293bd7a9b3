-- What pipelines may get wrong: weights that all layers share, states that the forward pass
-- assigns, losses that layers add, dropout, evaluation, a second training, sampling. Prints what was
-- learned, which is to be the same on any number of ranks (tests/process/pipeline.c).
local m = require "mlua"
local core = require "mlua.core"
local cfg = m.config {
  layers = 4, seq = 8, batch = 16, steps = 2, accum = 1, schedule = "1f1b", chunks = 1, microbatches = 4, early = false, again = false,
  common = false,
}
local A = m.axes { embed = 16, ffn = 32, vocab = 256, seq = cfg.seq, batch = cfg.batch }

local Block = m.module("Block", function(self)
  self.norm = m.rms_norm { A.embed }
  self.scale, self.sum = m.buffer { A.embed, init = "ones" }, m.buffer {}
end)

function Block:forward(x, up, down, common, first)
  local h = self.norm(x)
  local square, scale = core.stop_gradient(m.mean(h * h, "batch", "seq")), self.scale:read()
  self.scale:assign(0.9 * scale + 0.1 * square)
  h = h / scale -- the backward pass reads it too
  if common then h = h / common:read() end
  if common and first then common:assign(0.5 * (common:read() + square)) end
  h = m.dropout(m.gelu(h:dot(up, "embed")):dot(down, "ffn"), 0.1)
  m.add_loss((h * h):sum(), cfg.seq * cfg.batch) -- one for all layers in the end
  m.step_total(self.sum, h:sum())
  return x + h
end

local Net = m.module("Net", function(self)
  self.embedding = m.param { A.vocab, A.embed }
  self.up, self.down = m.param { A.embed, A.ffn }, m.param { A.ffn, A.embed }
  self.exit = m.param { A.embed, m.axis("exit", 4) } -- of a loss of each layer's own, known before the layers behind it are
  self.common = cfg.common and m.buffer { A.embed, init = "ones" }
  self.blocks = m.stack(cfg.layers, Block)
  self.norm = m.rms_norm { A.embed }
end)

function Net:forward(tokens)
  local x = self.embedding:gather(tokens, "vocab")
  for i, block in ipairs(self.blocks) do
    x = block(x, self.up, self.down, self.common, i == 1)
    local y = x:dot(self.exit, "embed")
    m.add_loss((y * y):sum(), cfg.seq * cfg.batch)
  end
  return self.norm(x):dot(self.embedding, "embed")
end

local model = Net()
local layout = m.layout {
  mesh = { { "pp", 1 } },
  stages = {
    pp = "layers", schedule = cfg.schedule, chunks = cfg.chunks > 1 and cfg.chunks or nil, microbatches = cfg.microbatches,
  },
}
-- Assigned what the backward pass gives, and read in the forward pass: no pipeline can do that.
local seen = cfg.early and core.state { name = "seen", axes = {}, kind = "other", init = m.zeros {} }
local function loss(tokens, targets)
  local total, count = m.cross_entropy(model(tokens), targets)
  if not seen then return total, count end
  seen:assign(core.grad(total, { model.up })[1]:sum())
  return total + 0 * seen:read() * model.embedding:read():sum(), count
end
-- A text of its own: the one that is built in are mlua's sources, and how far sums of another order
-- drive two trainings apart would change with them.
local text = ("text.%d"):format(core.options().rank)
local file, number, letters = assert(io.open(text, "wb")), 1, {}
for i = 1, 4096 do
  number = number * 1103515245 + 12345 & 0x7fffffff
  letters[i] = string.char(97 + (number >> 16) % 26)
end
file:write(table.concat(letters))
file:close()
local function train(more)
  local o = {
    model = model, loss = loss, batch = A.batch, seq = A.seq, vocab = 256, steps = cfg.steps, accum = cfg.accum,
    optimizer = m.adamw { lr = 0.01 }, layout = layout, log_every = 100, eval_batches = 1, data = text,
    on_step = function(_, out) print(("learned %.7f %.7f %.7f"):format(out.loss, out.grad_norm, out.aux_loss)) end,
  }
  for key, value in pairs(more or {}) do o[key] = value end
  print(("evaluation %.7f"):format(m.train(o).eval_loss or 0))
end
train()
if cfg.again then train { accum = 2 * cfg.accum, eval_every = 2, optimizer = m.sgd { lr = 0.1 } } end
os.remove(text)
local function tell(name, value)
  local sum = 0
  for i = 1, #value do sum = sum + value[i] * ((i * 7) % 13 - 6) end
  print(("%s %.6f"):format(name, sum))
end
for _, p in ipairs(m.parameters(model)) do tell(p:name(), p:get()) end
for i, block in ipairs(model.blocks) do
  tell("scale " .. i, block.scale:get())
  tell("sum " .. i, block.sum:get())
end
