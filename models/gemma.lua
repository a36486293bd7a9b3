-- Gemma 2 and 3, text (Gemma Team 2024, 2025): Llama's blocks with norms before and after each part, gains that are added to one,
-- GeGLU, embeddings scaled by the root of their width, a window on all but every pattern-th layer; Gemma 2 bounds scores and logits
-- by tanh, Gemma 3 normalises queries and keys (qk_norm) and has another rotary base in windows.
--   mlua run models/gemma.lua                       a small model on the text built into mlua, as bytes
--   mlua generate --from gemma-3-1b-pt/ --ids 2,3,1 (a Hugging Face folder)
local m = require "mlua"

local cfg = m.config {
  layers = 6, embed = 256, heads = 4, kv_heads = 2, head_dim = 64, ffn = 1024, vocab = 256, seq = 256, batch = 16, accum = 1, steps = 300,
  window = 64, pattern = 6, qk_norm = true, score_cap = 0.0, logit_cap = 0.0, query_scalar = 0.0, -- caps 0: none; query_scalar 0: head_dim
  rope_base = 1000000.0, rope_local = 10000.0, rope_scaling = "", positions = 0, eps = 1e-6, -- rope_local 0: rope_base
  lr = 1e-3, warmup = 20, decay = 0.1, clip = 1.0, seed = 1, layout = "megatron", schedule = "1f1b", data = "", sample = 300,
  presets = {
    demo = { layers = 4, embed = 192, heads = 3, kv_heads = 1, ffn = 768, pattern = 2, seq = 128, steps = 200, lr = 2e-3, warmup = 40 },
    ["gemma3-1b"] = {
      layers = 26, embed = 1152, heads = 4, kv_heads = 1, head_dim = 256, ffn = 6912, vocab = 262144, seq = 4096, batch = 4, window = 512, lr = 3e-4,
      warmup = 2000, steps = 1220000, sample = 0,
    },
  },
  hf = { -- settings and fields of config.json (stdlib/hf_config.lua)
    layers = "num_hidden_layers", embed = "hidden_size", heads = "num_attention_heads", kv_heads = "num_key_value_heads", ffn = "intermediate_size",
    vocab = "vocab_size", head_dim = { "head_dim", absent = 256 }, eps = { "rms_norm_eps", absent = 1e-6 }, rope_scaling = m.hf.rope_scaling,
    positions = { "max_position_embeddings", absent = 8192, write = function(c) return c.positions > 0 and c.positions or c.seq end },
    query_scalar = { "query_pre_attn_scalar", absent = 256, write = function(c) return c.query_scalar > 0 and m.hf.integer(c.query_scalar) or c.head_dim end },
    window = { "sliding_window", absent = 4096 }, pattern = m.hf.window_pattern,
    must = { hidden_activation = "gelu_pytorch_tanh", tie_word_embeddings = true, attention_bias = false },
    may = { hidden_act = { "gelu_pytorch_tanh", "gelu_new" }, use_bidirectional_attention = false },
    { "Gemma3ForCausalLM", "gemma3_text", qk_norm = true, rope_base = { "rope_theta", absent = 1000000.0 }, rope_local = { "rope_local_base_freq", absent = 10000.0 },
      score_cap = { "attn_logit_softcapping", absent = 0.0, null = 0.0 }, logit_cap = { "final_logit_softcapping", absent = 0.0, null = 0.0 } },
    { "Gemma2ForCausalLM", "gemma2", qk_norm = false, rope_base = { "rope_theta", absent = 10000.0 }, rope_local = 0.0, pattern = m.hf.window_alternates,
      score_cap = { "attn_logit_softcapping", absent = 50.0, null = 0.0 }, logit_cap = { "final_logit_softcapping", absent = 30.0, null = 0.0 } },
  },
}
local A = m.axes {
  embed = cfg.embed, heads = cfg.heads, kv_heads = cfg.kv_heads, head_dim = cfg.head_dim, ffn = cfg.ffn, vocab = cfg.vocab, seq = cfg.seq, batch = cfg.batch,
}
local function norm(axis) return m.rms_norm { axis, eps = cfg.eps, zero_centered = true } end
local function capped(x, cap) return cap > 0 and cap * m.tanh(x / cap) or x end
local scale = (cfg.query_scalar > 0 and cfg.query_scalar or cfg.head_dim) ^ -0.5

local Block = m.module("Block", function(self, i)
  self.norm1, self.norm2, self.norm3, self.norm4 = norm(A.embed), norm(A.embed), norm(A.embed), norm(A.embed)
  self.wq, self.wk = m.param { A.embed, A.heads, A.head_dim }, m.param { A.embed, A.kv_heads, A.head_dim }
  self.wv, self.wo = m.param { A.embed, A.kv_heads, A.head_dim }, m.param { A.heads, A.head_dim, A.embed }
  if cfg.qk_norm then self.q_norm, self.k_norm = norm(A.head_dim), norm(A.head_dim) end
  self.gate, self.up, self.down = m.param { A.embed, A.ffn }, m.param { A.embed, A.ffn }, m.param { A.ffn, A.embed }
  self.windowed = i % cfg.pattern ~= 0
end)

function Block:forward(x)
  local h = self.norm1(x)
  local q, k, v = h:dot(self.wq, "embed"), h:dot(self.wk, "embed"), h:dot(self.wv, "embed")
  if cfg.qk_norm then q, k = self.q_norm(q), self.k_norm(k) end
  local near = self.windowed and cfg.rope_local > 0
  local rope = { base = near and cfg.rope_local or cfg.rope_base, scaling = not near and cfg.rope_scaling or nil }
  local a = m.attention(m.rope(q, rope), m.rope(k, rope), v, {
    causal = true, window = self.windowed and cfg.window or nil, scale = scale,
    score = cfg.score_cap > 0 and function(s) return capped(s, cfg.score_cap) end or nil,
  })
  x = x + self.norm2(a:dot(self.wo, "heads", "head_dim"))
  h = self.norm3(x)
  return x + self.norm4((m.gelu(h:dot(self.gate, "embed")) * h:dot(self.up, "embed")):dot(self.down, "ffn"))
end

local Gemma = m.module("Gemma", function(self)
  self.embedding, self.blocks, self.norm = m.param { A.vocab, A.embed }, m.stack(cfg.layers, Block), norm(A.embed)
end)

function Gemma:forward(tokens)
  local x = self.embedding:gather(tokens, "vocab") * cfg.embed ^ 0.5
  for _, block in ipairs(self.blocks) do x = block(x) end
  return capped(self.norm(x):dot(self.embedding, "embed"), cfg.logit_cap)
end

local layer = "model.layers.*."
Gemma.hf = { -- parameters and tensors (stdlib/hf_views.lua)
  prefixes = { ["model."] = { "language_model.model.", "model.language_model." } },
  ignore = { "rotary_emb", "lm_head%.weight$", "vision_tower%.", "multi_modal_projector%." },
  embedding = { "model.embed_tokens.weight", "vocab embed" }, ["norm.gain"] = { "model.norm.weight", "embed" },
  ["blocks.*.norm1.gain"] = { layer .. "input_layernorm.weight", "embed" }, ["blocks.*.norm2.gain"] = { layer .. "post_attention_layernorm.weight", "embed" },
  ["blocks.*.norm3.gain"] = { layer .. "pre_feedforward_layernorm.weight", "embed" }, ["blocks.*.norm4.gain"] = { layer .. "post_feedforward_layernorm.weight", "embed" },
  ["blocks.*.wq"] = { layer .. "self_attn.q_proj.weight", "(heads head_dim) embed" }, ["blocks.*.wk"] = { layer .. "self_attn.k_proj.weight", "(kv_heads head_dim) embed" },
  ["blocks.*.wv"] = { layer .. "self_attn.v_proj.weight", "(kv_heads head_dim) embed" }, ["blocks.*.wo"] = { layer .. "self_attn.o_proj.weight", "embed (heads head_dim)" },
  ["blocks.*.q_norm.gain"] = { layer .. "self_attn.q_norm.weight", "head_dim" }, ["blocks.*.k_norm.gain"] = { layer .. "self_attn.k_norm.weight", "head_dim" },
  ["blocks.*.gate"] = { layer .. "mlp.gate_proj.weight", "ffn embed" }, ["blocks.*.up"] = { layer .. "mlp.up_proj.weight", "ffn embed" },
  ["blocks.*.down"] = { layer .. "mlp.down_proj.weight", "embed ffn" },
}

local model = Gemma()
m.train {
  model = model, batch = A.batch, seq = A.seq, vocab = cfg.vocab, steps = cfg.steps, accum = cfg.accum, clip = cfg.clip,
  data = cfg.data, optimizer = m.adamw { lr = cfg.lr, weight_decay = cfg.decay }, schedule = m.cosine { warmup = cfg.warmup },
  layout = m.layout[cfg.layout] { sp = true, zero = true, schedule = cfg.schedule }, -- mesh axes are 1 unless --mesh sizes them
}
if cfg.sample > 0 then m.generate(model, { prompt = "local function ", tokens = cfg.sample, seq = A.seq }) end
