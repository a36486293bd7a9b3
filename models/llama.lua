-- Llama (Touvron et al. 2023; Dubey et al. 2024): RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases;
-- with settings Mistral (window), Qwen2 (qkv_bias) and Qwen3 (qk_norm).
--   mlua run models/llama.lua                       a small model on the text built into mlua, as bytes
--   mlua check models/llama.lua preset=llama-3b
--   mlua run models/llama.lua --from Qwen3-0.6B/ data=mine.jsonl     (a Hugging Face folder)
-- The presets of published sizes warm up over 2,000 steps (Touvron et al. 2023) and last for 20 tokens a parameter
-- (Hoffmann et al. 2022).
local m = require "mlua"

local cfg = m.config {
  layers = 6, embed = 384, heads = 6, kv_heads = 2, ffn = 1024, vocab = 256, seq = 256, batch = 16, accum = 1, steps = 300,
  head_dim = 0, tied = true, qkv_bias = false, qk_norm = false, window = 0, window_from = 0, rope_scaling = "", positions = 0, eps = 1e-5, -- head_dim 0: embed / heads
  lr = 1e-3, warmup = 20, decay = 0.1, clip = 1.0, grad_dtype = "f32", rope_base = 500000.0, seed = 1, layout = "megatron", schedule = "1f1b", data = "", sample = 300,
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
  hf = { -- settings and fields of config.json (stdlib/hf_config.lua)
    layers = "num_hidden_layers", embed = "hidden_size", heads = "num_attention_heads", ffn = "intermediate_size", vocab = "vocab_size",
    kv_heads = { "num_key_value_heads", absent = "heads", null = "heads" },
    head_dim = { "head_dim", absent = 0, null = 0, write = function(c) return c.head_dim > 0 and c.head_dim or c.embed // c.heads end },
    positions = { "max_position_embeddings", absent = 2048, write = function(c) return c.positions > 0 and c.positions or c.seq end },
    eps = { "rms_norm_eps", absent = 1e-6 }, tied = { "tie_word_embeddings", absent = false },
    rope_base = { "rope_theta", absent = 10000.0 }, rope_scaling = m.hf.rope_scaling, must = { hidden_act = { "silu", "swish" } },
    { "LlamaForCausalLM", "llama", qkv_bias = false, qk_norm = false, window = 0, window_from = 0, must = { attention_bias = false, mlp_bias = false } },
    { "MistralForCausalLM", "mistral", qkv_bias = false, qk_norm = false, window = m.hf.window, window_from = 0, kv_heads = { "num_key_value_heads", absent = 8, null = "heads" } },
    { "Qwen2ForCausalLM", "qwen2", qkv_bias = true, qk_norm = false, window = m.hf.optional_window, window_from = m.hf.optional_window_from },
    { "Qwen3ForCausalLM", "qwen3", qkv_bias = false, qk_norm = true, window = m.hf.optional_window, window_from = m.hf.optional_window_from,
      head_dim = { "head_dim", absent = 128, write = function(c) return c.head_dim > 0 and c.head_dim or c.embed // c.heads end }, must = { attention_bias = false } },
  },
}
local A = m.axes {
  embed = cfg.embed, heads = cfg.heads, kv_heads = cfg.kv_heads, head_dim = cfg.head_dim > 0 and cfg.head_dim or m.quotient(cfg, "embed", "heads"), ffn = cfg.ffn,
  vocab = cfg.vocab, seq = cfg.seq, batch = cfg.batch,
}

local Block = m.module("Block", function(self, i)
  self.norm1, self.norm2 = m.rms_norm { A.embed, eps = cfg.eps }, m.rms_norm { A.embed, eps = cfg.eps }
  self.wq = m.param { A.embed, A.heads, A.head_dim }
  self.wk = m.param { A.embed, A.kv_heads, A.head_dim }
  self.wv = m.param { A.embed, A.kv_heads, A.head_dim }
  self.wo = m.param { A.heads, A.head_dim, A.embed }
  if cfg.qkv_bias then self.bq, self.bk, self.bv = m.bias { A.heads, A.head_dim }, m.bias { A.kv_heads, A.head_dim }, m.bias { A.kv_heads, A.head_dim } end
  if cfg.qk_norm then self.q_norm, self.k_norm = m.rms_norm { A.head_dim, eps = cfg.eps }, m.rms_norm { A.head_dim, eps = cfg.eps } end
  self.window = cfg.window > 0 and i > cfg.window_from and cfg.window or nil
  self.gate, self.up = m.param { A.embed, A.ffn }, m.param { A.embed, A.ffn }
  self.down = m.param { A.ffn, A.embed }
end)

function Block:forward(x)
  local h = self.norm1(x)
  local q, k, v = h:dot(self.wq, "embed"), h:dot(self.wk, "embed"), h:dot(self.wv, "embed")
  if cfg.qkv_bias then q, k, v = q + self.bq, k + self.bk, v + self.bv end
  if cfg.qk_norm then q, k = self.q_norm(q), self.k_norm(k) end
  local rope = { base = cfg.rope_base, scaling = cfg.rope_scaling }
  x = x + m.attention(m.rope(q, rope), m.rope(k, rope), v, { causal = true, window = self.window }):dot(self.wo, "heads", "head_dim")
  h = self.norm2(x)
  return x + m.swiglu(h:dot(self.gate, "embed"), h:dot(self.up, "embed")):dot(self.down, "ffn")
end

local Llama = m.module("Llama", function(self)
  self.embedding = m.param { A.vocab, A.embed }
  self.blocks = m.stack(cfg.layers, Block)
  self.norm = m.rms_norm { A.embed, eps = cfg.eps }
  if not cfg.tied then self.head = m.param { A.vocab, A.embed } end
end)

function Llama:forward(tokens)
  local x = self.embedding:gather(tokens, "vocab")
  for _, block in ipairs(self.blocks) do x = block(x) end
  return self.norm(x):dot(cfg.tied and self.embedding or self.head, "embed")
end

Llama.hf = { -- parameters and tensors (stdlib/hf_views.lua)
  ignore = { "rotary_emb%.inv_freq$", cfg.tied and "^lm_head%.weight$" or nil },
  embedding = { "model.embed_tokens.weight", "vocab embed" }, head = { "lm_head.weight", "vocab embed" }, ["norm.gain"] = { "model.norm.weight", "embed" },
  ["blocks.*.norm1.gain"] = { "model.layers.*.input_layernorm.weight", "embed" },
  ["blocks.*.norm2.gain"] = { "model.layers.*.post_attention_layernorm.weight", "embed" },
  ["blocks.*.wq"] = { "model.layers.*.self_attn.q_proj.weight", "(heads head_dim) embed" },
  ["blocks.*.wk"] = { "model.layers.*.self_attn.k_proj.weight", "(kv_heads head_dim) embed" },
  ["blocks.*.wv"] = { "model.layers.*.self_attn.v_proj.weight", "(kv_heads head_dim) embed" },
  ["blocks.*.wo"] = { "model.layers.*.self_attn.o_proj.weight", "embed (heads head_dim)" },
  ["blocks.*.bq"] = { "model.layers.*.self_attn.q_proj.bias", "(heads head_dim)" },
  ["blocks.*.bk"] = { "model.layers.*.self_attn.k_proj.bias", "(kv_heads head_dim)" },
  ["blocks.*.bv"] = { "model.layers.*.self_attn.v_proj.bias", "(kv_heads head_dim)" },
  ["blocks.*.q_norm.gain"] = { "model.layers.*.self_attn.q_norm.weight", "head_dim" },
  ["blocks.*.k_norm.gain"] = { "model.layers.*.self_attn.k_norm.weight", "head_dim" },
  ["blocks.*.gate"] = { "model.layers.*.mlp.gate_proj.weight", "ffn embed" },
  ["blocks.*.up"] = { "model.layers.*.mlp.up_proj.weight", "ffn embed" },
  ["blocks.*.down"] = { "model.layers.*.mlp.down_proj.weight", "embed ffn" },
}

local model = Llama()
m.train {
  model = model, batch = A.batch, seq = A.seq, vocab = cfg.vocab, steps = cfg.steps, accum = cfg.accum, clip = cfg.clip, grad_dtype = cfg.grad_dtype,
  data = cfg.data, optimizer = m.adamw { lr = cfg.lr, weight_decay = cfg.decay }, schedule = m.cosine { warmup = cfg.warmup },
  layout = m.layout[cfg.layout] { sp = true, zero = true, schedule = cfg.schedule }, -- mesh axes are 1 unless --mesh sizes them
}
if cfg.sample > 0 then m.generate(model, { prompt = "local function ", tokens = cfg.sample, seq = A.seq }) end
