-- BERT (Devlin et al. 2019): an encoder that reads to both sides, trained to restore hidden tokens and to predict whether its second
-- segment follows the first: post-norm blocks, GELU, learned positions and segments, tied output.
--   mlua run models/bert.lua                        a small model on the text built into mlua, as bytes
--   mlua run models/bert.lua data=book.txt steps=2000
--   mlua check models/bert.lua preset=bert-base --device h200 --mesh dp=8
local m = require "mlua"

local cfg = m.config {
  layers = 2, embed = 128, heads = 4, ffn = 512, vocab = 260, seq = 64, batch = 32, accum = 1, steps = 600, eps = 1e-12,
  hidden = 0.15, lr = 3e-3, warmup = 60, decay = 0.01, clip = 1.0, dropout = 0.0, seed = 1, layout = "megatron", schedule = "1f1b", data = "", tokenizer = "",
  presets = {
    demo = { embed = 64, heads = 2, ffn = 256, steps = 800 },
    ["bert-base"] = { layers = 12, embed = 768, heads = 12, ffn = 3072, vocab = 30528, seq = 512, batch = 256, steps = 1000000, lr = 1e-4, warmup = 10000, dropout = 0.1 },
    ["bert-large"] = { layers = 24, embed = 1024, heads = 16, ffn = 4096, vocab = 30528, seq = 512, batch = 256, steps = 1000000, lr = 1e-4, warmup = 10000, dropout = 0.1 },
  },
}
local hidden = math.max(1, math.floor(cfg.hidden * cfg.seq)) -- tokens of a sample that are to be restored
local A = m.axes {
  embed = cfg.embed, heads = cfg.heads, head_dim = m.quotient(cfg, "embed", "heads"), ffn = cfg.ffn, vocab = cfg.vocab,
  seq = cfg.seq, batch = cfg.batch, segments = 2, order = 2, hidden = hidden, inner = cfg.embed,
}
local CLASS, END, MASK = cfg.vocab - 3, cfg.vocab - 2, cfg.vocab - 1 -- what is no text: [CLS], [SEP], [MASK]

local Attention = m.module("Attention", function(self)
  self.wq, self.bq = m.param { A.embed, A.heads, A.head_dim }, m.bias { A.heads, A.head_dim }
  self.wk, self.bk = m.param { A.embed, A.heads, A.head_dim }, m.bias { A.heads, A.head_dim }
  self.wv, self.bv = m.param { A.embed, A.heads, A.head_dim }, m.bias { A.heads, A.head_dim }
  self.wo, self.bo = m.param { A.heads, A.head_dim, A.embed }, m.bias { A.embed }
end)

function Attention:forward(x)
  local q, k, v = x:dot(self.wq, "embed") + self.bq, x:dot(self.wk, "embed") + self.bk, x:dot(self.wv, "embed") + self.bv
  return m.attention(q, k, v):dot(self.wo, "heads", "head_dim") + self.bo
end

local Block = m.module("Block", function(self)
  self.attention, self.norm1 = Attention(), m.layer_norm { A.embed, eps = cfg.eps }
  self.up, self.up_bias = m.param { A.embed, A.ffn }, m.bias { A.ffn }
  self.down, self.down_bias = m.param { A.ffn, A.embed }, m.bias { A.embed }
  self.norm2 = m.layer_norm { A.embed, eps = cfg.eps }
end)

function Block:forward(x) -- each norm follows its sum
  x = self.norm1(x + m.dropout(self.attention(x), cfg.dropout))
  local h = m.gelu(x:dot(self.up, "embed") + self.up_bias, { exact = true }):dot(self.down, "ffn") + self.down_bias
  return self.norm2(x + m.dropout(h, cfg.dropout))
end

local Bert = m.module("Bert", function(self)
  self.words, self.positions, self.segments = m.param { A.vocab, A.embed }, m.param { A.seq, A.embed }, m.param { A.segments, A.embed }
  self.norm = m.layer_norm { A.embed, eps = cfg.eps }
  self.blocks = m.stack(cfg.layers, Block)
  self.pool, self.pool_bias = m.param { A.embed, A.inner }, m.bias { A.inner }
  self.order, self.order_bias = m.param { A.inner, A.order }, m.bias { A.order }
  self.restore, self.restore_bias = m.param { A.inner, A.embed }, m.bias { A.embed }
  self.restore_norm, self.words_bias = m.layer_norm { A.embed, eps = cfg.eps }, m.bias { A.vocab }
end)

-- Logits of the tokens at `places` over vocab, and of whether the second segment follows the first over order.
function Bert:forward(tokens, segments, places)
  local x = self.words:gather(tokens, "vocab") + self.segments:gather(segments, "segments") + self.positions
  x = m.dropout(self.norm(x), cfg.dropout)
  for _, block in ipairs(self.blocks) do x = block(x) end
  local class = x:slice("seq", 0, 1):sum "seq"
  local order = m.tanh(class:dot(self.pool, "embed") + self.pool_bias):dot(self.order, "inner") + self.order_bias
  local at = x:gather(places, "seq"):rename("embed", "inner") -- of a sample's places alone is a loss
  local restored = self.restore_norm(m.gelu(at:dot(self.restore, "inner") + self.restore_bias, { exact = true }))
  return restored:dot(self.words, "embed") + self.words_bias, order
end

-- [CLS] a [SEP] b [SEP]. In half of the samples b is what follows a, else it is from elsewhere. Of the tokens of text a share
-- `hidden` is to be restored: 80 % of them become [MASK], 10 % any token, 10 % stay.
local corpus = m.corpus(cfg.data ~= "" and cfg.data or nil, { tokenizer = cfg.tokenizer ~= "" and cfg.tokenizer or nil })
local room = cfg.seq - 3
local text, other, after = m.host("i32", 1, room), m.host("i32", 1, room), m.host("i32", 1, room)
local function sample(index, random)
  local first, follows = random:integer(room // 4, 3 * room // 4), random:integer(0, 1)
  corpus:fill(text, after, index, { seed = cfg.seed })
  corpus:fill(other, after, index, { seed = cfg.seed + 1 })
  local s = { tokens = { CLASS }, segments = { 0 }, places = {}, targets = {}, order = 1 - follows }
  local function add(token, segment) s.tokens[#s.tokens + 1], s.segments[#s.segments + 1] = token, segment end
  for i = 1, room do
    add((i > first and follows == 0 and other or text)[i], i > first and 1 or 0)
    if i == first then add(END, 0) end
  end
  add(END, 1)
  local left = room -- tokens of text from here on, of which as many are taken as are still to be
  for i, token in ipairs(s.tokens) do
    if token ~= CLASS and token ~= END then
      if random:integer(1, left) <= hidden - #s.places then
        s.places[#s.places + 1], s.targets[#s.targets + 1] = i - 1, token
        local fate = random:integer(1, 10)
        s.tokens[i] = fate <= 8 and MASK or fate == 9 and random:integer(0, CLASS - 1) or token
      end
      left = left - 1
    end
  end
  return s
end

local model = Bert()
m.train {
  model = model, batch = A.batch, seq = A.seq, steps = cfg.steps, accum = cfg.accum, clip = cfg.clip, sample = sample,
  inputs = {
    tokens = { A.batch, A.seq, dtype = "i32" }, segments = { A.batch, A.seq, dtype = "i32" }, order = { A.batch, dtype = "i32" },
    places = { A.batch, A.hidden, dtype = "i32" }, targets = { A.batch, A.hidden, dtype = "i32" },
  },
  loss = function(i)
    local words, order = model(i.tokens, i.segments, i.places)
    m.add_loss(m.cross_entropy(order, i.order, { axis = "order" }))
    local sum, count = m.cross_entropy(words, i.targets)
    return sum, count, { accuracy = m.accuracy(words, i.targets), order_accuracy = m.accuracy(order, i.order, { axis = "order" }) }
  end,
  optimizer = m.adamw { lr = cfg.lr, weight_decay = cfg.decay }, schedule = m.linear { warmup = cfg.warmup },
  layout = m.layout[cfg.layout] { sp = true, zero = true, schedule = cfg.schedule }, -- mesh axes are 1 unless --mesh sizes them
}
