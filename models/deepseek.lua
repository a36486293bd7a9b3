-- DeepSeek-V3 (DeepSeek-AI 2024): latent attention, whose keys and values are made of a narrow latent beside one rotary key for all
-- heads; experts chosen by sigmoid scores plus a bias, within the best groups; a shared expert; dense layers first.
--   mlua run models/deepseek.lua                    a small model on the text built into mlua, as bytes
--   mlua check models/deepseek.lua --from DeepSeek-V3/ seq=4096 batch=64 --device h200 --mesh ep=64,pp=16
local m = require "mlua"

local cfg = m.config {
  layers = 4, dense = 1, embed = 256, heads = 4, q_latent = 0, latent = 64, nope = 48, rope_dim = 16, v_dim = 48, ffn = 704, expert_ffn = 176,
  experts = 16, top_k = 4, shared = 1, groups = 1, top_groups = 1, route_scale = 1.0, normalize = true, balance = 1e-3, aux = 0.0, exchange = 0.0, -- q_latent 0: none
  vocab = 256, seq = 256, batch = 16, accum = 1, steps = 300, rope_base = 10000.0, rope_scaling = "", interleaved = true, positions = 0, eps = 1e-6,
  lr = 1e-3, warmup = 20, decay = 0.1, clip = 1.0, seed = 1, schedule = "1f1b", data = "", sample = 300,
  presets = {
    demo = { layers = 3, embed = 192, ffn = 512, expert_ffn = 128, seq = 128, steps = 200, lr = 2e-3, warmup = 40 },
    ["deepseek-v3"] = {
      layers = 61, dense = 3, embed = 7168, heads = 128, q_latent = 1536, latent = 512, nope = 128, rope_dim = 64, v_dim = 128, ffn = 18432, expert_ffn = 2048,
      experts = 256, top_k = 8, groups = 8, top_groups = 4, route_scale = 2.5, vocab = 129280, seq = 4096, batch = 3840, lr = 2.2e-4, warmup = 2000, steps = 940000, sample = 0,
    },
  },
  hf = { -- settings and fields of config.json (stdlib/hf_config.lua)
    { "DeepseekV3ForCausalLM", "deepseek_v3" },
    layers = "num_hidden_layers", dense = { "first_k_dense_replace", absent = 3 }, embed = "hidden_size", heads = "num_attention_heads", vocab = "vocab_size",
    q_latent = { "q_lora_rank", absent = 1536, null = 0 }, latent = { "kv_lora_rank", absent = 512 }, nope = { "qk_nope_head_dim", absent = 128 },
    rope_dim = { "qk_rope_head_dim", absent = 64 }, v_dim = { "v_head_dim", absent = 128 }, ffn = "intermediate_size", expert_ffn = "moe_intermediate_size",
    experts = { "n_routed_experts", absent = 256 }, top_k = { "num_experts_per_tok", absent = 8 }, shared = { "n_shared_experts", absent = 1 },
    groups = { "n_group", absent = 8 }, top_groups = { "topk_group", absent = 4 }, route_scale = { "routed_scaling_factor", absent = 2.5 },
    normalize = { "norm_topk_prob", absent = true }, rope_base = { "rope_theta", absent = 10000.0 }, rope_scaling = m.hf.rope_scaling,
    interleaved = { "rope_interleave", absent = true }, eps = { "rms_norm_eps", absent = 1e-6 },
    positions = { "max_position_embeddings", absent = 4096, write = function(c) return c.positions > 0 and c.positions or c.seq end },
    must = { hidden_act = { "silu", "swish" }, scoring_func = "sigmoid", topk_method = "noaux_tc", attention_bias = false, moe_layer_freq = 1, tie_word_embeddings = false },
    also = function(c) return { num_key_value_heads = c.heads } end, unused = { "num_key_value_heads", "head_dim", "qk_head_dim", "num_nextn_predict_layers" },
  },
}
local A = m.axes {
  embed = cfg.embed, heads = cfg.heads, head_dim = cfg.nope + cfg.rope_dim, kv_dim = cfg.nope + cfg.v_dim, v_dim = cfg.v_dim, latent = cfg.latent,
  latent_key = cfg.latent + cfg.rope_dim, ffn = cfg.ffn, experts = cfg.experts, vocab = cfg.vocab, seq = cfg.seq, batch = cfg.batch,
}
local q_latent = cfg.q_latent > 0 and m.axis("q_latent", cfg.q_latent)
local rope = { base = cfg.rope_base, scaling = cfg.rope_scaling, interleaved = cfg.interleaved }
local factor, by = tonumber(cfg.rope_scaling:match " factor=(%S+)"), tonumber(cfg.rope_scaling:match "mscale_all=(%S+)")
local sharper = factor and by and factor > 1 and 0.1 * by * math.log(factor) + 1 or 1 -- of yarn
local function norm(axis, eps) return m.rms_norm { axis, eps = eps or cfg.eps } end

local Attention = m.module("Attention", function(self)
  if q_latent then self.wq_a, self.q_norm = m.param { A.embed, q_latent }, norm(q_latent, 1e-6) end
  self.wq = m.param { q_latent or A.embed, A.heads, A.head_dim }
  self.wkv_a, self.kv_norm, self.wkv = m.param { A.embed, A.latent_key }, norm(A.latent, 1e-6), m.param { A.latent, A.heads, A.kv_dim }
  self.wo = m.param { A.heads, A.v_dim, A.embed }
end)

function Attention:forward(x)
  local q = q_latent and self.q_norm(x:dot(self.wq_a, "embed")):dot(self.wq, "q_latent") or x:dot(self.wq, "embed")
  local latent = x:dot(self.wkv_a, "embed")
  local k_rot = m.rope(latent:slice("latent_key", cfg.latent, cfg.latent + cfg.rope_dim):rename("latent_key", "head_dim"), rope)
  local kv = self.kv_norm(latent:slice("latent_key", 0, cfg.latent):rename("latent_key", "latent")):dot(self.wkv, "latent")
  local k_pass, v = kv:slice("kv_dim", 0, cfg.nope):rename("kv_dim", "head_dim"), kv:slice("kv_dim", cfg.nope, A.kv_dim.size):rename("kv_dim", "head_dim")
  q = m.concat({ q:slice("head_dim", 0, cfg.nope), m.rope(q:slice("head_dim", cfg.nope, A.head_dim.size), rope) }, "head_dim")
  local of_heads = {} -- the rotary key is that of all heads
  for i, name in ipairs(k_pass:axes()) do of_heads[i] = m.axis(name, name == "head_dim" and cfg.rope_dim or k_pass:size(name)) end
  local k = m.concat({ k_pass, k_rot:broadcast(of_heads) }, "head_dim")
  local wider = A.head_dim.size - cfg.v_dim -- values are as wide as keys for the kernel
  local a = m.attention(q, k, wider > 0 and v:pad("head_dim", 0, wider) or v, { causal = true, scale = A.head_dim.size ^ -0.5 * sharper ^ 2 })
  return (wider > 0 and a:slice("head_dim", 0, cfg.v_dim) or a):rename("head_dim", "v_dim"):dot(self.wo, "heads", "v_dim")
end

local MLP = m.module("MLP", function(self)
  self.gate, self.up, self.down = m.param { A.embed, A.ffn }, m.param { A.embed, A.ffn }, m.param { A.ffn, A.embed }
end)
function MLP:forward(x) return m.swiglu(x:dot(self.gate, "embed"), x:dot(self.up, "embed")):dot(self.down, "ffn") end

local Block = m.module("Block", function(self, i)
  self.norm1, self.attention, self.norm2 = norm(A.embed), Attention(), norm(A.embed)
  if i <= cfg.dense then self.mlp = MLP() else
    self.mlp = m.moe {
      A.embed, experts = A.experts, ffn = m.axis("ffn", cfg.expert_ffn), top_k = cfg.top_k, router = "sigmoid", normalize = cfg.normalize, scale = cfg.route_scale,
      shared = cfg.shared, groups = cfg.groups, top_groups = cfg.top_groups, bias = true, bias_balance = cfg.balance, aux_loss = cfg.aux,
    }
  end
end)
function Block:forward(x)
  x = x + self.attention(self.norm1(x))
  return x + self.mlp(self.norm2(x))
end

local DeepSeek = m.module("DeepSeek", function(self)
  self.embedding, self.blocks = m.param { A.vocab, A.embed }, m.stack(cfg.layers, Block)
  self.norm, self.head = norm(A.embed), m.param { A.vocab, A.embed }
end)
function DeepSeek:forward(tokens)
  local x = self.embedding:gather(tokens, "vocab")
  for _, block in ipairs(self.blocks) do x = block(x) end
  return self.norm(x):dot(self.head, "embed")
end

local attention, mlp = "model.layers.*.self_attn.", "model.layers.*.mlp."
DeepSeek.hf = { -- parameters and tensors (stdlib/hf_views.lua); the layer after the last predicts one token more, and is not used
  ignore = { "rotary_emb%.inv_freq$", ("^model%%.layers%%.%d%%."):format(cfg.layers) },
  embedding = { "model.embed_tokens.weight", "vocab embed" }, head = { "lm_head.weight", "vocab embed" }, ["norm.gain"] = { "model.norm.weight", "embed" },
  ["blocks.*.norm1.gain"] = { "model.layers.*.input_layernorm.weight", "embed" }, ["blocks.*.norm2.gain"] = { "model.layers.*.post_attention_layernorm.weight", "embed" },
  ["blocks.*.attention.wq_a"] = { attention .. "q_a_proj.weight", "q_latent embed" }, ["blocks.*.attention.q_norm.gain"] = { attention .. "q_a_layernorm.weight", "q_latent" },
  ["blocks.*.attention.wq"] = q_latent and { attention .. "q_b_proj.weight", "(heads head_dim) q_latent" } or { attention .. "q_proj.weight", "(heads head_dim) embed" },
  ["blocks.*.attention.wkv_a"] = { attention .. "kv_a_proj_with_mqa.weight", "latent_key embed" }, ["blocks.*.attention.kv_norm.gain"] = { attention .. "kv_a_layernorm.weight", "latent" },
  ["blocks.*.attention.wkv"] = { attention .. "kv_b_proj.weight", "(heads kv_dim) latent" }, ["blocks.*.attention.wo"] = { attention .. "o_proj.weight", "embed (heads v_dim)" },
  ["blocks.*.mlp.router"] = { mlp .. "gate.weight", "experts embed" }, ["blocks.*.mlp.bias"] = { mlp .. "gate.e_score_correction_bias", "experts" },
}
local stacked = { gate = { "gate_up_proj", "experts ([ffn] | ffn) embed" }, up = { "gate_up_proj", "experts (ffn | [ffn]) embed" }, down = { "down_proj", "experts embed ffn" } }
for _, name in ipairs { "gate", "up", "down" } do -- of a dense layer, of experts one by one or as transformers 5 has them, of the shared one
  local dims, file = name == "down" and "embed ffn" or "ffn embed", name .. "_proj.weight"
  DeepSeek.hf["blocks.*.mlp." .. name] = { { mlp .. file, dims }, { mlp .. "experts.{experts}." .. file, dims }, { mlp .. "experts." .. stacked[name][1], stacked[name][2] } }
  DeepSeek.hf["blocks.*.mlp.shared_" .. name] = { mlp .. "shared_experts." .. file, dims }
end

local model = DeepSeek()
m.train {
  model = model, batch = A.batch, seq = A.seq, vocab = cfg.vocab, steps = cfg.steps, accum = cfg.accum, clip = cfg.clip, data = cfg.data,
  optimizer = m.adamw { lr = cfg.lr, weight_decay = cfg.decay }, schedule = m.cosine { warmup = cfg.warmup },
  layout = m.layout { -- mesh axes are 1 unless --mesh sizes them; "ep" splits experts, elsewhere the batch
    mesh = { { "pp", 1 }, { "dp", 1 }, { "ep", 1 }, { "cp", 1 }, { "tp", 1 } }, params = { tp = { "heads", "ffn", "vocab" }, ep = { "experts" } },
    acts = { tp = { "heads", "ffn", "vocab", "seq" }, cp = { "seq", "kv_seq" }, dp = { "batch" }, ep = { "batch", "experts" } },
    stages = { pp = "layers", schedule = cfg.schedule }, exchange = cfg.exchange,
  },
}
if cfg.sample > 0 then m.generate(model, { prompt = "local function ", tokens = cfg.sample, seq = A.seq }) end
