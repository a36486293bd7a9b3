-- Llama (Touvron et al. 2023; Dubey et al. 2024): RMSNorm, rotary positions, grouped-query
-- attention, SwiGLU, no biases.
--   mlua run models/llama.lua                       a small model on the text built into mlua, as bytes
--   mlua check models/llama.lua preset=llama-3b
-- The presets of published sizes warm up over 2,000 steps (Touvron et al. 2023) and last for 20 tokens a parameter
-- (Hoffmann et al. 2022).
local m = require "mlua"

local cfg = m.config {
  layers = 6, embed = 384, heads = 6, kv_heads = 2, ffn = 1024, vocab = 256, seq = 256, batch = 16, accum = 1, steps = 300,
  lr = 1e-3, warmup = 20, decay = 0.1, clip = 1.0, rope_base = 500000.0, seed = 1, layout = "megatron", schedule = "1f1b", data = "", sample = 300,
  presets = {
    demo = { layers = 4, embed = 256, heads = 4, kv_heads = 2, ffn = 704, seq = 128, steps = 200, lr = 2e-3, warmup = 40 },
    ["llama-1b"] = {
      layers = 16, embed = 2048, heads = 16, kv_heads = 8, ffn = 8192, vocab = 128256, seq = 4096, batch = 4,
      lr = 3e-4, warmup = 2000, steps = 1550000, sample = 0,
    },
    ["llama-3b"] = {
      layers = 28, embed = 3072, heads = 24, kv_heads = 8, ffn = 8192, vocab = 128256, seq = 4096, batch = 2,
      lr = 2e-4, warmup = 2000, steps = 7800000, sample = 0,
    },
  },
}
local A = m.axes {
  embed = cfg.embed, heads = cfg.heads, kv_heads = cfg.kv_heads, head_dim = m.quotient(cfg, "embed", "heads"), ffn = cfg.ffn,
  vocab = cfg.vocab, seq = cfg.seq, batch = cfg.batch,
}

local Block = m.module("Block", function(self)
  self.norm1, self.norm2 = m.rms_norm { A.embed }, m.rms_norm { A.embed }
  self.wq = m.param { A.embed, A.heads, A.head_dim }
  self.wk = m.param { A.embed, A.kv_heads, A.head_dim }
  self.wv = m.param { A.embed, A.kv_heads, A.head_dim }
  self.wo = m.param { A.heads, A.head_dim, A.embed }
  self.gate, self.up = m.param { A.embed, A.ffn }, m.param { A.embed, A.ffn }
  self.down = m.param { A.ffn, A.embed }
end)

function Block:forward(x)
  local h = self.norm1(x)
  local q, k, v = h:dot(self.wq, "embed"), h:dot(self.wk, "embed"), h:dot(self.wv, "embed")
  local rope = { base = cfg.rope_base }
  x = x + m.attention(m.rope(q, rope), m.rope(k, rope), v, { causal = true }):dot(self.wo, "heads", "head_dim")
  h = self.norm2(x)
  return x + m.swiglu(h:dot(self.gate, "embed"), h:dot(self.up, "embed")):dot(self.down, "ffn")
end

local Llama = m.module("Llama", function(self)
  self.embedding = m.param { A.vocab, A.embed }
  self.blocks = m.stack(cfg.layers, Block)
  self.norm = m.rms_norm { A.embed }
end)

function Llama:forward(tokens)
  local x = self.embedding:gather(tokens, "vocab")
  for _, block in ipairs(self.blocks) do x = block(x) end
  return self.norm(x):dot(self.embedding, "embed")
end

local model = Llama()
m.train {
  model = model, batch = A.batch, seq = A.seq, vocab = cfg.vocab, steps = cfg.steps, accum = cfg.accum, clip = cfg.clip,
  data = cfg.data, optimizer = m.adamw { lr = cfg.lr, weight_decay = cfg.decay }, schedule = m.cosine { warmup = cfg.warmup },
  layout = m.layout[cfg.layout] { sp = true, zero = true, schedule = cfg.schedule }, -- mesh axes are 1 unless --mesh sizes them
}
if cfg.sample > 0 then m.generate(model, { prompt = "local function ", tokens = cfg.sample, seq = A.seq }) end
