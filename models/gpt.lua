-- GPT-2 (Radford et al. 2019): learned positions, pre-norm blocks, GELU, tied embeddings.
--   mlua run models/gpt.lua                         a small model on the text built into mlua, as bytes
--   mlua run models/gpt.lua data=book.txt steps=500
--   mlua run models/gpt.lua preset=gpt2-124m data=tokens.bin      (uint16 tokens)
--   mlua check models/gpt.lua preset=gpt2-124m
-- The presets of published sizes warm up over 2,000 steps, as nanoGPT does (gpt2-124m's loss leaps when it warms up
-- over 20), and last for 20 tokens a parameter (Hoffmann et al. 2022).
local m = require "mlua"

local cfg = m.config {
  layers = 6, embed = 384, heads = 6, ffn = 0, vocab = 256, seq = 256, batch = 16, accum = 1, steps = 300,
  lr = 1e-3, warmup = 20, decay = 0.1, clip = 1.0, dropout = 0.0, seed = 1, layout = "megatron", reshard = true, schedule = "1f1b", data = "", sample = 300,
  presets = {
    demo = { layers = 4, embed = 256, heads = 4, seq = 128, batch = 16, steps = 200, lr = 2e-3, warmup = 40 },
    ["gpt2-124m"] = { layers = 12, embed = 768, heads = 12, vocab = 50304, seq = 1024, batch = 64, lr = 6e-4, warmup = 2000, steps = 38000, sample = 0 },
    ["gpt2-1.5b"] = { layers = 48, embed = 1600, heads = 25, vocab = 50304, seq = 1024, batch = 16, lr = 2e-4, warmup = 2000, steps = 1900000, sample = 0 },
    ["gpt-1.3b"] = { layers = 24, embed = 2048, heads = 16, vocab = 50304, seq = 2048, batch = 8, lr = 2e-4, warmup = 2000, steps = 1600000, sample = 0 },
  },
}
local A = m.axes {
  embed = cfg.embed, heads = cfg.heads, head_dim = m.quotient(cfg, "embed", "heads"), vocab = cfg.vocab, seq = cfg.seq,
  ffn = cfg.ffn > 0 and cfg.ffn or 4 * cfg.embed, batch = cfg.batch,
}
local residual = 0.02 / math.sqrt(2 * cfg.layers) -- projections into the residual stream start smaller

local Attention = m.module("Attention", function(self)
  self.wq, self.bq = m.param { A.embed, A.heads, A.head_dim }, m.bias { A.heads, A.head_dim }
  self.wk, self.bk = m.param { A.embed, A.heads, A.head_dim }, m.bias { A.heads, A.head_dim }
  self.wv, self.bv = m.param { A.embed, A.heads, A.head_dim }, m.bias { A.heads, A.head_dim }
  self.wo, self.bo = m.param { A.heads, A.head_dim, A.embed, init = residual }, m.bias { A.embed }
end)

function Attention:forward(x)
  local q = x:dot(self.wq, "embed") + self.bq
  local k = x:dot(self.wk, "embed") + self.bk
  local v = x:dot(self.wv, "embed") + self.bv
  return m.attention(q, k, v, { causal = true }):dot(self.wo, "heads", "head_dim") + self.bo
end

local MLP = m.module("MLP", function(self)
  self.up, self.up_bias = m.param { A.embed, A.ffn }, m.bias { A.ffn }
  self.down, self.down_bias = m.param { A.ffn, A.embed, init = residual }, m.bias { A.embed }
end)

function MLP:forward(x)
  return m.gelu(x:dot(self.up, "embed") + self.up_bias):dot(self.down, "ffn") + self.down_bias
end

local Block = m.module("Block", function(self)
  self.norm1, self.attention = m.layer_norm { A.embed }, Attention()
  self.norm2, self.mlp = m.layer_norm { A.embed }, MLP()
end)

function Block:forward(x)
  x = x + m.dropout(self.attention(self.norm1(x)), cfg.dropout)
  return x + m.dropout(self.mlp(self.norm2(x)), cfg.dropout)
end

local GPT = m.module("GPT", function(self)
  self.wte, self.wpe = m.param { A.vocab, A.embed }, m.param { A.seq, A.embed }
  self.blocks = m.stack(cfg.layers, Block)
  self.norm = m.layer_norm { A.embed }
end)

function GPT:forward(tokens)
  local x = self.wte:gather(tokens, "vocab") + self.wpe
  for _, block in ipairs(self.blocks) do x = block(x) end
  return self.norm(x):dot(self.wte, "embed")
end

local model = GPT()
m.train {
  model = model, batch = A.batch, seq = A.seq, vocab = cfg.vocab, steps = cfg.steps, accum = cfg.accum, clip = cfg.clip,
  data = cfg.data, optimizer = m.adamw { lr = cfg.lr, weight_decay = cfg.decay }, schedule = m.cosine { warmup = cfg.warmup },
  layout = m.layout[cfg.layout] { sp = true, zero = true, reshard = cfg.reshard, schedule = cfg.schedule }, -- mesh axes are 1 unless --mesh sizes them
}
if cfg.sample > 0 then m.generate(model, { prompt = "local function ", tokens = cfg.sample, seq = A.seq }) end
