-- T5 (Raffel et al. 2020): an encoder and a decoder trained to fill in spans that are cut out of a text: RMSNorm before each layer,
-- relative positions as a learned bias of attention's scores, ReLU, no biases, tied embeddings.
--   mlua run models/t5.lua                          a small model on the text built into mlua, as bytes
--   mlua run models/t5.lua data=book.txt steps=2000
--   mlua generate models/t5.lua --from RUN --prompt "thank you <1> to your <2> week"
--   mlua check models/t5.lua preset=t5-base --device h200 --mesh dp=8
local m = require "mlua"

local cfg = m.config {
  layers = 3, embed = 192, heads = 4, head_dim = 48, ffn = 768, vocab = 320, seq = 128, batch = 16, accum = 1, steps = 150, eps = 1e-6,
  noise = 0.15, length = 3.0, buckets = 32, reach = 128, lr = 2e-3, warmup = 20, decay = 0.0, clip = 1.0, dropout = 0.0, seed = 1,
  layout = "megatron", schedule = "1f1b", data = "", tokenizer = "",
  presets = {
    demo = { layers = 2, embed = 128, heads = 4, head_dim = 32, ffn = 512, seq = 64, steps = 200 },
    ["t5-small"] = { layers = 6, embed = 512, heads = 8, head_dim = 64, ffn = 2048, vocab = 32128, seq = 512, batch = 128, steps = 524288, warmup = 10000, lr = 1e-3, dropout = 0.1 },
    ["t5-base"] = { layers = 12, embed = 768, heads = 12, head_dim = 64, ffn = 3072, vocab = 32128, seq = 512, batch = 128, steps = 524288, warmup = 10000, lr = 1e-3, dropout = 0.1 },
    ["t5-large"] = { layers = 24, embed = 1024, heads = 16, head_dim = 64, ffn = 4096, vocab = 32128, seq = 512, batch = 128, steps = 524288, warmup = 10000, lr = 1e-3, dropout = 0.1 },
  },
}
local spans = m.spans { seq = cfg.seq, noise = cfg.noise, length = cfg.length } -- `seq` tokens remain of spans.text
local A = m.axes {
  embed = cfg.embed, heads = cfg.heads, head_dim = cfg.head_dim, ffn = cfg.ffn, vocab = cfg.vocab, seq = cfg.seq, batch = cfg.batch,
  buckets = cfg.buckets,
}
local out = m.axis("seq", spans.targets) -- the decoder's positions
local START, END = 0, 1 -- bytes that no text has; the i-th span is the token vocab - i

-- Scores are not divided by sqrt(head_dim): the initial values do that.
local Attention = m.module("Attention", function(self)
  self.wq = m.param { A.embed, A.heads, A.head_dim, init = (cfg.embed * cfg.head_dim) ^ -0.5 }
  self.wk = m.param { A.embed, A.heads, A.head_dim, init = cfg.embed ^ -0.5 }
  self.wv = m.param { A.embed, A.heads, A.head_dim, init = cfg.embed ^ -0.5 }
  self.wo = m.param { A.heads, A.head_dim, A.embed, init = (cfg.heads * cfg.head_dim) ^ -0.5 }
end)

-- Of x to what it reads: x itself, or the encoder's output over kv_seq.
function Attention:forward(x, read, options)
  local q, k, v = x:dot(self.wq, "embed"), read:dot(self.wk, "embed"), read:dot(self.wv, "embed")
  options.scale = 1
  return m.attention(q, k, v, options):dot(self.wo, "heads", "head_dim")
end

local Block = m.module("Block", function(self, reads)
  self.norm1, self.attention = m.rms_norm { A.embed, eps = cfg.eps }, Attention()
  if reads then self.norm_read, self.read = m.rms_norm { A.embed, eps = cfg.eps }, Attention() end
  self.norm2 = m.rms_norm { A.embed, eps = cfg.eps }
  self.up, self.down = m.param { A.embed, A.ffn, init = cfg.embed ^ -0.5 }, m.param { A.ffn, A.embed, init = cfg.ffn ^ -0.5 }
end)

-- `own` and `read`: functions of the scores of attention to itself and to what it reads.
function Block:forward(x, own, read, encoded)
  local h = self.norm1(x)
  x = x + m.dropout(self.attention(h, h, { causal = encoded ~= nil, score = own }), cfg.dropout)
  if encoded ~= nil then x = x + m.dropout(self.read(self.norm_read(x), encoded, { score = read }), cfg.dropout) end
  return x + m.dropout(m.relu(self.norm2(x):dot(self.up, "embed")):dot(self.down, "ffn"), cfg.dropout)
end

-- The bias of a stack's first layer is that of all its layers.
local Stack = m.module("Stack", function(self, decodes)
  self.decodes = decodes
  self.bias = m.param { A.buckets, A.heads, init = cfg.embed ^ -0.5 }
  self.blocks = m.stack(cfg.layers, function() return Block(decodes) end)
  self.norm = m.rms_norm { A.embed, eps = cfg.eps }
end)

function Stack:forward(x, pads, encoded)
  local bias = self.bias:gather(m.relative_buckets(x, { buckets = cfg.buckets, reach = cfg.reach, causal = self.decodes }), "buckets")
  x = m.dropout(x, cfg.dropout)
  local own, read = function(s) return s + bias end, nil
  if pads ~= nil then
    local function hide(s) return m.where(pads, -math.huge, s) end
    if self.decodes then read = hide else own = function(s) return hide(s + bias) end end
  end
  for _, block in ipairs(self.blocks) do x = block(x, own, read, encoded) end
  return m.dropout(self.norm(x), cfg.dropout)
end

local T5 = m.module("T5", function(self)
  self.embedding = m.param { A.vocab, A.embed, init = 1.0 }
  self.encoder, self.decoder = Stack(false), Stack(true)
end)

-- `pads`: which tokens fill a prompt up and are not seen; of a training's none do.
function T5:forward(tokens, before, pads)
  if pads ~= nil then pads = pads:rename("seq", "kv_seq") end
  local encoded = self.encoder(self.embedding:gather(tokens, "vocab"), pads):rename("seq", "kv_seq")
  local x = self.decoder(self.embedding:gather(before, "vocab"), pads, encoded)
  return (x * cfg.embed ^ -0.5):dot(self.embedding, "embed")
end

-- "thank you <x> to your <y> week" and the targets "<x> for inviting me <y> last END": each span's token stands for it.
local corpus = m.corpus(cfg.data ~= "" and cfg.data or nil, { tokenizer = cfg.tokenizer ~= "" and cfg.tokenizer or nil })
local text, after = m.host("i32", 1, spans.text), m.host("i32", 1, spans.text)
local function sample(index, random)
  corpus:fill(text, after, index, { seed = cfg.seed })
  local tokens, targets, at = {}, {}, 0
  local function take(count, list)
    for i = at + 1, at + count do list[#list + 1] = text[i] end
    at = at + count
  end
  for i, span in ipairs(spans.draw(random)) do
    take(span.kept, tokens)
    tokens[#tokens + 1], targets[#targets + 1] = cfg.vocab - i, cfg.vocab - i
    take(span.cut, targets)
  end
  tokens[#tokens + 1], targets[#targets + 1] = END, END
  return { tokens = tokens, before = table.move(targets, 1, #targets - 1, 2, { START }), targets = targets }
end

-- The tokens of "thank you <1> to your <2> week", of which spans are cut out.
local function encode(prompt, of_text)
  local tokens = {}
  local function add(piece) table.move(of_text(piece), 1, #piece, #tokens + 1, tokens) end
  local at = 1
  for first, number, last in prompt:gmatch "()<(%d+)>()" do
    add(prompt:sub(at, first - 1))
    tokens[#tokens + 1], at = cfg.vocab - math.tointeger(number), last
  end
  add(prompt:sub(at))
  tokens[#tokens + 1] = END
  return tokens
end

local names = {}
for i = 1, math.min(100, cfg.vocab - 256) do names[cfg.vocab - i] = ("<%d>"):format(i) end

local model = T5()
m.train {
  model = model, batch = A.batch, seq = A.seq, steps = cfg.steps, accum = cfg.accum, clip = cfg.clip, sample = sample,
  inputs = { tokens = { A.batch, A.seq, dtype = "i32" }, before = { A.batch, out, dtype = "i32" }, targets = { A.batch, out, dtype = "i32" } },
  loss = function(i)
    local logits = model(i.tokens, i.before)
    local sum, count = m.cross_entropy(logits, i.targets)
    return sum, count, { accuracy = m.accuracy(logits, i.targets) }
  end,
  generate = {
    model = function(before, i) return model(i.tokens, before, m.eq(i.tokens, START)) end,
    input = "tokens", axis = out, prompt = { START }, stop = { END }, encode = encode, names = names,
  },
  optimizer = m.adamw { lr = cfg.lr, weight_decay = cfg.decay }, schedule = m.cosine { warmup = cfg.warmup },
  layout = m.layout[cfg.layout] { zero = true, schedule = cfg.schedule }, -- mesh axes are 1 unless --mesh sizes them
}
