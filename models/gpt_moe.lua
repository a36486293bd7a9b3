-- A mixture-of-experts transformer: Llama's blocks with m.moe in the place of the feed-forward
-- network (Shazeer et al. 2017; Jiang et al. 2024; Dai et al. 2024). No token is dropped unless
-- `capacity` says so. `exchange` has ranks send one another tokens instead of experts (m.layout). The
-- presets moe-8x and moe-64x leave the router's losses out, as the models do that they are timed beside.
--   mlua run models/gpt_moe.lua                     a small model on the text built into mlua, as bytes
--   mlua run models/gpt_moe.lua experts=16 top_k=4 router=sigmoid balance=0.001 aux=0
--   mlua check models/gpt_moe.lua preset=moe-64x batch=32 exchange=1.5 --mesh ep=8
-- The presets moe-8x and moe-64x warm up over 2,000 steps (Dai et al. 2024) and last for 20 tokens a parameter that a
-- token meets (Hoffmann et al. 2022).
local m = require "mlua"

local cfg = m.config {
  layers = 4, embed = 256, heads = 4, kv_heads = 2, ffn = 256, experts = 8, top_k = 2, shared = 0, router = "softmax",
  capacity = 0.0, exchange = 0.0, aux = 0.01, z = 1e-3, balance = 0.0, vocab = 256, seq = 256, batch = 16, accum = 1, steps = 300,
  lr = 1e-3, warmup = 20, decay = 0.1, clip = 1.0, rope_base = 500000.0, seed = 1, schedule = "1f1b", data = "", sample = 300,
  presets = {
    demo = { layers = 3, embed = 192, heads = 4, kv_heads = 2, ffn = 192, seq = 128, steps = 200, lr = 2e-3, warmup = 40 },
    ["moe-8x"] = {
      layers = 16, embed = 2048, heads = 16, kv_heads = 8, ffn = 5632, experts = 8, top_k = 2, vocab = 50304, seq = 4096,
      batch = 4, lr = 3e-4, warmup = 2000, steps = 1720000, aux = 0.0, z = 0.0, sample = 0,
    },
    ["moe-64x"] = {
      layers = 12, embed = 2048, heads = 16, kv_heads = 8, ffn = 1408, experts = 64, top_k = 6, vocab = 50304, seq = 4096,
      batch = 4, lr = 3e-4, warmup = 2000, steps = 1070000, aux = 0.0, z = 0.0, sample = 0,
    },
  },
}
local A = m.axes {
  embed = cfg.embed, heads = cfg.heads, kv_heads = cfg.kv_heads, head_dim = m.quotient(cfg, "embed", "heads"), ffn = cfg.ffn,
  experts = cfg.experts, vocab = cfg.vocab, seq = cfg.seq, batch = cfg.batch,
}

local Block = m.module("Block", function(self)
  self.norm1, self.norm2 = m.rms_norm { A.embed }, m.rms_norm { A.embed }
  self.wq = m.param { A.embed, A.heads, A.head_dim }
  self.wk = m.param { A.embed, A.kv_heads, A.head_dim }
  self.wv = m.param { A.embed, A.kv_heads, A.head_dim }
  self.wo = m.param { A.heads, A.head_dim, A.embed }
  self.moe = m.moe {
    A.embed, experts = A.experts, ffn = A.ffn, top_k = cfg.top_k, shared = cfg.shared, router = cfg.router,
    capacity = cfg.capacity ~= 0 and cfg.capacity or nil, aux_loss = cfg.aux, z_loss = cfg.z, bias_balance = cfg.balance,
  }
end)

function Block:forward(x)
  local h, rope = self.norm1(x), { base = cfg.rope_base }
  local q, k, v = h:dot(self.wq, "embed"), h:dot(self.wk, "embed"), h:dot(self.wv, "embed")
  x = x + m.attention(m.rope(q, rope), m.rope(k, rope), v, { causal = true }):dot(self.wo, "heads", "head_dim")
  return x + self.moe(self.norm2(x))
end

local GPT = m.module("GPT", function(self)
  self.embedding = m.param { A.vocab, A.embed }
  self.blocks = m.stack(cfg.layers, Block)
  self.norm = m.rms_norm { A.embed }
end)

function GPT:forward(tokens)
  local x = self.embedding:gather(tokens, "vocab")
  for _, block in ipairs(self.blocks) do x = block(x) end
  return self.norm(x):dot(self.embedding, "embed")
end

local model = GPT()
local layout = m.layout { -- mesh axes are 1 unless --mesh sizes them; "ep" splits experts, elsewhere the batch
  mesh = { { "pp", 1 }, { "dp", 1 }, { "ep", 1 }, { "cp", 1 }, { "tp", 1 } },
  params = { tp = { "heads", "kv_heads", "ffn", "vocab" }, ep = { "experts" } },
  acts = { tp = { "heads", "kv_heads", "ffn", "vocab", "seq" }, cp = { "seq", "kv_seq" }, dp = { "batch" }, ep = { "batch", "experts" } },
  stages = { pp = "layers", schedule = cfg.schedule }, exchange = cfg.exchange,
}
m.train {
  model = model, batch = A.batch, seq = A.seq, vocab = cfg.vocab, steps = cfg.steps, accum = cfg.accum, clip = cfg.clip,
  data = cfg.data, optimizer = m.adamw { lr = cfg.lr, weight_decay = cfg.decay }, schedule = m.cosine { warmup = cfg.warmup }, layout = layout,
}
if cfg.sample > 0 then m.generate(model, { prompt = "local function ", tokens = cfg.sample, seq = A.seq }) end
