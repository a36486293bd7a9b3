-- A mixture-of-experts transformer: Llama's blocks with m.moe in the place of the feed-forward
-- network (Shazeer et al. 2017; Jiang et al. 2024; Dai et al. 2024). No token is dropped unless
-- `capacity` says so. `exchange` has ranks send one another tokens instead of experts (m.layout). The
-- presets moe-8x and moe-64x leave the router's losses out, as the models do that they are timed beside. With
-- settings it is Mixtral, or Qwen3-MoE (qk_norm).
--   mlua run models/gpt_moe.lua                     a small model on the text built into mlua, as bytes
--   mlua run models/gpt_moe.lua experts=16 top_k=4 router=sigmoid balance=0.001 aux=0
--   mlua check models/gpt_moe.lua preset=moe-64x batch=32 exchange=1.5 --mesh ep=8
--   mlua run models/gpt_moe.lua --from Qwen3-30B-A3B/ data=mine.jsonl        (a Hugging Face folder)
-- The presets moe-8x and moe-64x warm up over 2,000 steps (Dai et al. 2024) and last for 20 tokens a parameter that a
-- token meets (Hoffmann et al. 2022).
local m = require "mlua"

local cfg = m.config {
  layers = 4, embed = 256, heads = 4, kv_heads = 2, ffn = 256, experts = 8, top_k = 2, shared = 0, router = "softmax",
  head_dim = 0, tied = true, qk_norm = false, window = 0, rope_scaling = "", normalize = "auto", positions = 0, eps = 1e-5, -- head_dim 0: embed / heads
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
  hf = { -- settings and fields of config.json (stdlib/hf_config.lua)
    layers = "num_hidden_layers", embed = "hidden_size", heads = "num_attention_heads", top_k = "num_experts_per_tok", vocab = "vocab_size",
    kv_heads = { "num_key_value_heads", absent = "heads", null = "heads" },
    head_dim = { "head_dim", absent = 0, null = 0, write = function(c) return c.head_dim > 0 and c.head_dim or c.embed // c.heads end },
    positions = { "max_position_embeddings", absent = 2048, write = function(c) return c.positions > 0 and c.positions or c.seq end },
    eps = { "rms_norm_eps", absent = 1e-6 }, tied = { "tie_word_embeddings", absent = false }, rope_base = { "rope_theta", absent = 10000.0 },
    rope_scaling = m.hf.rope_scaling, must = { hidden_act = { "silu", "swish" } }, router = m.hf.constant "softmax", shared = 0, capacity = 0.0, balance = 0.0,
    { "MixtralForCausalLM", "mixtral", qk_norm = false, experts = { "num_local_experts", absent = 8 }, ffn = "intermediate_size", normalize = m.hf.constant "yes",
      window = m.hf.window, rope_base = { "rope_theta", absent = 1000000.0 } },
    { "Qwen3MoeForCausalLM", "qwen3_moe", qk_norm = true, experts = { "num_experts", "num_local_experts", absent = 128 }, ffn = "moe_intermediate_size", window = m.hf.window_if_used,
      normalize = { "norm_topk_prob", values = { [true] = "yes", [false] = "no" }, absent = "no" }, unused = { "intermediate_size", "max_window_layers" }, also = function(c) return { intermediate_size = c.ffn } end,
      must = { attention_bias = false, decoder_sparse_step = 1, mlp_only_layers = { {} } } },
  },
}
if cfg.normalize == "auto" then cfg.normalize = cfg.top_k > 1 and "yes" or "no" end -- whether a token's weights sum to 1
local A = m.axes {
  embed = cfg.embed, heads = cfg.heads, kv_heads = cfg.kv_heads, head_dim = cfg.head_dim > 0 and cfg.head_dim or m.quotient(cfg, "embed", "heads"), ffn = cfg.ffn,
  experts = cfg.experts, vocab = cfg.vocab, seq = cfg.seq, batch = cfg.batch,
}

local Block = m.module("Block", function(self)
  self.norm1, self.norm2 = m.rms_norm { A.embed, eps = cfg.eps }, m.rms_norm { A.embed, eps = cfg.eps }
  self.wq = m.param { A.embed, A.heads, A.head_dim }
  self.wk = m.param { A.embed, A.kv_heads, A.head_dim }
  self.wv = m.param { A.embed, A.kv_heads, A.head_dim }
  self.wo = m.param { A.heads, A.head_dim, A.embed }
  if cfg.qk_norm then self.q_norm, self.k_norm = m.rms_norm { A.head_dim, eps = cfg.eps }, m.rms_norm { A.head_dim, eps = cfg.eps } end
  self.moe = m.moe {
    A.embed, experts = A.experts, ffn = A.ffn, top_k = cfg.top_k, shared = cfg.shared, router = cfg.router, normalize = cfg.normalize == "yes",
    capacity = cfg.capacity ~= 0 and cfg.capacity or nil, aux_loss = cfg.aux, z_loss = cfg.z, bias_balance = cfg.balance,
  }
end)

function Block:forward(x)
  local h, rope = self.norm1(x), { base = cfg.rope_base, scaling = cfg.rope_scaling }
  local q, k, v = h:dot(self.wq, "embed"), h:dot(self.wk, "embed"), h:dot(self.wv, "embed")
  if cfg.qk_norm then q, k = self.q_norm(q), self.k_norm(k) end
  x = x + m.attention(m.rope(q, rope), m.rope(k, rope), v, { causal = true, window = cfg.window > 0 and cfg.window or nil }):dot(self.wo, "heads", "head_dim")
  return x + self.moe(self.norm2(x))
end

local GPT = m.module("GPT", function(self)
  self.embedding = m.param { A.vocab, A.embed }
  self.blocks = m.stack(cfg.layers, Block)
  self.norm = m.rms_norm { A.embed, eps = cfg.eps }
  if not cfg.tied then self.head = m.param { A.vocab, A.embed } end
end)

function GPT:forward(tokens)
  local x = self.embedding:gather(tokens, "vocab")
  for _, block in ipairs(self.blocks) do x = block(x) end
  return self.norm(x):dot(cfg.tied and self.embedding or self.head, "embed")
end

local moe = cfg.qk_norm and "model.layers.*.mlp." or "model.layers.*.block_sparse_moe."
local function expert(mixtral, qwen, dims, stacked, part) -- one by one on disk; stacked as transformers 5 has them
  return { { moe .. "experts.{experts}." .. (cfg.qk_norm and qwen or mixtral) .. ".weight", dims }, { "model.layers.*.mlp.experts." .. stacked, part } }
end
GPT.hf = { -- parameters and tensors (stdlib/hf_views.lua)
  ignore = { "rotary_emb%.inv_freq$", cfg.tied and "^lm_head%.weight$" or nil },
  embedding = { "model.embed_tokens.weight", "vocab embed" }, head = { "lm_head.weight", "vocab embed" }, ["norm.gain"] = { "model.norm.weight", "embed" },
  ["blocks.*.norm1.gain"] = { "model.layers.*.input_layernorm.weight", "embed" }, ["blocks.*.norm2.gain"] = { "model.layers.*.post_attention_layernorm.weight", "embed" },
  ["blocks.*.wq"] = { "model.layers.*.self_attn.q_proj.weight", "(heads head_dim) embed" }, ["blocks.*.wk"] = { "model.layers.*.self_attn.k_proj.weight", "(kv_heads head_dim) embed" },
  ["blocks.*.wv"] = { "model.layers.*.self_attn.v_proj.weight", "(kv_heads head_dim) embed" }, ["blocks.*.wo"] = { "model.layers.*.self_attn.o_proj.weight", "embed (heads head_dim)" },
  ["blocks.*.q_norm.gain"] = { "model.layers.*.self_attn.q_norm.weight", "head_dim" }, ["blocks.*.k_norm.gain"] = { "model.layers.*.self_attn.k_norm.weight", "head_dim" },
  ["blocks.*.moe.router"] = { { moe .. "gate.weight", "experts embed" }, { "model.layers.*.mlp.gate.weight", "experts embed" } },
  ["blocks.*.moe.gate"] = expert("w1", "gate_proj", "ffn embed", "gate_up_proj", "experts ([ffn] | ffn) embed"),
  ["blocks.*.moe.up"] = expert("w3", "up_proj", "ffn embed", "gate_up_proj", "experts (ffn | [ffn]) embed"),
  ["blocks.*.moe.down"] = expert("w2", "down_proj", "embed ffn", "down_proj", "experts embed ffn"),
}

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
