-- Own examples under any layout: tokens and an image for the first stage of a pipeline, labels and weights for the last. Prints
-- what each step computed; `rows` says how many of a step each rank makes, `done` how many steps an earlier process made.
local m = require "mlua"
local cfg = m.config { steps = 3, accum = 1, batch = 8, rows = "", done = 0, layers = 4, zero = false, fsdp = false, schedule = "1f1b" }
local A = m.axes { vocab = 64, embed = 16, ffn = 32, seq = 8, batch = cfg.batch, pixels = 12, heads = 2, head_dim = 8 }
local Block = m.module("Block", function(self)
  self.norm, self.wo = m.rms_norm { A.embed }, m.param { A.heads, A.head_dim, A.embed }
  for _, name in ipairs { "wq", "wk", "wv" } do self[name] = m.param { A.embed, A.heads, A.head_dim } end
  self.up, self.down = m.param { A.embed, A.ffn }, m.param { A.ffn, A.embed }
end)
function Block:forward(x)
  local h = self.norm(x)
  local q, k, v = h:dot(self.wq, "embed"), h:dot(self.wk, "embed"), h:dot(self.wv, "embed")
  x = x + m.attention(q, k, v):dot(self.wo, "heads", "head_dim")
  return x + m.gelu(self.norm(x):dot(self.up, "embed")):dot(self.down, "ffn")
end
local Model = m.module("Model", function(self)
  self.table, self.patch = m.param { A.vocab, A.embed }, m.param { A.pixels, A.embed }
  self.blocks, self.head = m.stack(cfg.layers, Block), m.param { A.embed, A.vocab }
end)
function Model:forward(tokens, image)
  local x = self.table:gather(tokens, "vocab") + image:dot(self.patch, "pixels")
  for _, block in ipairs(self.blocks) do x = block(x) end
  return x:dot(self.head, "embed")
end

local model, tokens, made = Model(), m.host("i32", A.seq.size), 0
local function example(index, random)
  random:fill(tokens, 0, A.vocab.size - 1)
  local targets = {}
  for i = 1, #tokens do targets[i] = random:uniform() < 0.8 and tokens[i] or -1 end
  local image = random:fill_normal(m.host("f32", A.pixels.size))
  return { tokens = tokens, image = image, targets = targets, weight = random:uniform(0.5, 1.5) + index % 2 }
end
local function sample(index, random)
  made = made + 1
  return example(index, random)
end
local function loss(i)
  local logits, counted = model(i.tokens, i.image), m.ge(i.targets, 0)
  local at = m.where(counted, i.targets, 0)
  local each = (logits:logsumexp "vocab" - (logits * m.one_hot(at, A.vocab)):sum "vocab") * i.weight
  local further = { accuracy = m.accuracy(logits, i.targets), weight = { i.weight:sum(), i.weight:size "batch" } }
  return m.where(counted, each, 0):sum(), (counted:cast "f32" * i.weight):sum(), further
end
local result = m.train {
  model = model, batch = A.batch, steps = cfg.steps, accum = cfg.accum, eval_every = cfg.steps, eval_batches = 1, loss = loss,
  inputs = { tokens = { A.batch, A.seq, dtype = "i32" }, image = { A.batch, A.pixels },
    targets = { A.batch, A.seq, dtype = "i32" }, weight = { A.batch } },
  sample = sample, eval_sample = example,
  on_step = function(step, out)
    if m.rank() == 0 then print(("step %d loss %.9g norm %.9g accuracy %.9g weight %.9g"):format(step, out.loss, out.grad_norm, out.accuracy, out.weight)) end
  end,
  layout = m.layout {
    mesh = { { "pp", 1 }, { "dp", 1 }, { "cp", 1 }, { "tp", 1 } },
    params = { tp = { "heads", "ffn", "vocab" }, dp = cfg.fsdp and { "embed" } or {} },
    acts = { tp = { "heads", "ffn", "vocab", "seq" }, cp = { "seq", "kv_seq" }, dp = { "batch" } },
    state = cfg.zero and { dp = "flat" } or nil, stages = { pp = "blocks", schedule = cfg.schedule },
  },
}
if m.rank() == 0 then print(("evaluation %.9g accuracy %.9g"):format(result.eval_loss, result.eval_accuracy)) end
local rows = {}
for count in cfg.rows:gmatch "%d+" do rows[#rows + 1] = tonumber(count) end
local expected = (cfg.steps - cfg.done) * (rows[m.rank() + 1] or cfg.batch)
assert(made == expected, ("rank %d made %d examples instead of %d"):format(m.rank(), made, expected))
