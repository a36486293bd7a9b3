-- Trains on text.jsonl by plain SGD without clipping, so that a wrong gradient moves all that follows; prints each step's loss and
-- norm, and the sum and the square of all weights in the end (tests/process/dynamic.c).
local m = require "mlua"
local cfg = m.config { accum = 1, steps = 150, layers = 2, data = "text.jsonl", pack = "document", seed = 1, recurrent = false, learned = false, experts = 0, victim = -1, seq = 64, sums = false, lr = 0.02, second = 0 }
local A = m.axes { embed = 16, heads = 4, head_dim = 4, ffn = 32, vocab = 64, seq = cfg.seq, batch = 8, width = 3 }

local Block = m.module("Block", function(self)
  self.wq, self.wk = m.param { A.embed, A.heads, A.head_dim }, m.param { A.embed, A.heads, A.head_dim }
  self.wv, self.wo = m.param { A.embed, A.heads, A.head_dim }, m.param { A.heads, A.head_dim, A.embed }
  self.norm = m.rms_norm { A.embed }
  if cfg.experts > 0 then -- the bias follows the step's loads, which fill rows add nothing to
    self.moe = m.moe { A.embed, experts = m.axis("experts", cfg.experts), ffn = A.ffn, top_k = 2, bias = true, bias_balance = 0.01 }
  end
  if cfg.experts == 0 then self.up, self.down = m.param { A.embed, A.ffn }, m.param { A.ffn, A.embed } end
  if cfg.recurrent then self.taps, self.decay = m.param { A.width, A.embed }, m.param { A.embed, A.heads } end
end)

function Block:recurrence(x)
  local y = m.conv(x, self.taps, { axis = "seq", causal = true, document = m.documents(x) })
  local a = m.sigmoid(y:dot(self.decay, "embed"))
  local h = m.scan(function(s, t)
    local h = s.h * t.a + t.y
    return { h = h }, h
  end, {
    axis = "seq", state = { h = m.zero_state(x, { A.heads, A.embed }) }, resets = m.document_starts(x),
    inputs = { a = a:broadcast(m.axes_of(a:broadcast { A.embed })), y = y:broadcast { A.heads } },
  })
  return h:sum "heads"
end

function Block:forward(x)
  local h = self.norm(x)
  local q, k, v = h:dot(self.wq, "embed"), h:dot(self.wk, "embed"), h:dot(self.wv, "embed")
  x = x + m.attention(m.rope(q), m.rope(k), v, { causal = true }):dot(self.wo, "heads", "head_dim")
  if cfg.recurrent then x = x + self:recurrence(x) end
  if cfg.experts > 0 then return x + self.moe(x) end
  return x + m.silu(x:dot(self.up, "embed")):dot(self.down, "ffn")
end

local Net = m.module("Net", function(self)
  self.table, self.blocks = m.param { A.vocab, A.embed, init = 0.5 }, m.stack(cfg.layers, Block)
  if cfg.learned then self.places = m.param { A.seq, A.embed, init = 0.5 } end
end)
function Net:forward(tokens)
  local x = self.table:gather(tokens, "vocab")
  if cfg.learned then x = x + self.places:gather(m.positions(tokens), "seq") end
  for _, block in ipairs(self.blocks) do x = block(x) end
  return x:dot(self.table, "embed")
end
-- Sums, products and means over all positions, those without a target too.
local function loss_of_positions(net)
  return function(tokens, targets)
    local logits = net(tokens)
    local sum, count = m.cross_entropy(logits, targets)
    local all, places = m.ge(targets, -1):cast "f32", m.positions(tokens):cast "f32"
    local norm = 1e-3 * logits:dot(logits, "batch", "seq", "vocab") + (logits * logits):mean() + (logits:sum "batch"):mean("seq", "vocab")
    return sum + norm, count + 0.1 * all:sum(), { place = { places:sum "batch":sum(), all:mean() } }
  end
end

local function report(...)
  if m.rank() == 0 then print(("step %s %.9g %.9g"):format(...)) end
end

local function train(net)
  local result = m.train {
    model = net, batch = A.batch, seq = A.seq, steps = cfg.steps, accum = cfg.accum, seed = cfg.seed, clip = 0, pack = cfg.pack,
    loss = cfg.sums and loss_of_positions(net) or nil, eval_every = cfg.sums and 2 or 0,
    layout = m.layout.megatron { ep = cfg.experts > 0 and 1 or nil }, optimizer = m.sgd { lr = cfg.lr }, on_step = function(step, out)
      if step == 2 and m.rank() == cfg.victim then os.execute "kill -9 $PPID" end
      report(step, out.loss, out.grad_norm)
      if cfg.sums then report(step, out.place, 0) end
    end,
  }
  if cfg.sums then report("evaluation", result.eval_loss, result.eval_place) end
  local total = m.compile(function()
    local sum, square = 0, 0
    for _, p in ipairs(m.parameters(net)) do
      local value = p:read()
      sum, square = sum + value:sum(), square + (value * value):sum()
    end
    return { sum = sum, square = square }
  end, {})
  local t = total {}
  report("weights", t.sum, t.square)
end

train(Net())
if cfg.second > 0 then -- another model, of other experts
  cfg.experts = cfg.second
  train(Net())
end
