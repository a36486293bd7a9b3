-- Recurrences and attention in one model. `pattern` lists what each layer has, one word a layer, repeated as often as it takes:
-- * attention, M Mamba-2, D Gated DeltaNet, - a feed-forward network, E a mixture of experts; each letter adds to the residual stream.
-- "DE DE DE *E" is Qwen3-Next (Qwen Team 2025): gated attention with rotary positions on a part of each head, zero-centred norms, a gated
-- shared expert; "M- M- M *-" is like Nemotron-H (NVIDIA 2025, arXiv:2504.03624).
--   mlua run models/hybrid.lua                          a small model on the text built into mlua, as bytes
--   mlua run models/hybrid.lua pattern="M- *-" rope_part=0
--   mlua run models/hybrid.lua --from Qwen3-Next/ data=mine.jsonl      (a Hugging Face folder)
local m = require "mlua"

local cfg = m.config {
  pattern = "DE DE DE *E", layers = 4, embed = 256, heads = 4, kv_heads = 2, head_dim = 64, rope_part = 0.25, rope_base = 1e7, rope_scaling = "", gated = true, zero_centered = true,
  key_heads = 4, value_heads = 8, key_dim = 32, value_dim = 32, ssm_heads = 8, ssm_dim = 64, ssm_groups = 2, state = 32, width = 4, -- of D; of M; of both
  ffn = 704, expert_ffn = 128, shared_ffn = 128, experts = 16, top_k = 4, normalize = true, aux = 1e-3, exchange = 0.0, tied = true, positions = 0, eps = 1e-6,
  vocab = 256, seq = 256, batch = 16, accum = 1, steps = 300, lr = 1e-3, warmup = 20, decay = 0.1, clip = 1.0, seed = 1, schedule = "1f1b", data = "", sample = 300,
  presets = {
    demo = { embed = 192, expert_ffn = 96, shared_ffn = 96, experts = 8, top_k = 2, seq = 128, steps = 200, lr = 2e-3, warmup = 40 },
    ["next-1.3b"] = {
      layers = 16, embed = 1024, heads = 8, kv_heads = 2, head_dim = 128, key_heads = 8, value_heads = 16, key_dim = 128, value_dim = 128, expert_ffn = 352, shared_ffn = 352,
      experts = 64, top_k = 6, vocab = 50304, seq = 4096, batch = 4, lr = 4e-4, warmup = 2000, steps = 400000, sample = 0,
    },
    ["ssm-1.3b"] = {
      pattern = "M- M- M *-", layers = 24, embed = 2048, heads = 16, kv_heads = 4, head_dim = 128, rope_part = 0.0, gated = false, zero_centered = false, ssm_heads = 64,
      ssm_groups = 8, state = 128, ffn = 5632, vocab = 50304, seq = 4096, batch = 4, lr = 3e-4, warmup = 2000, steps = 1600000, sample = 0,
    },
  },
  hf = { -- settings and fields of config.json (stdlib/hf_config.lua)
    { "Qwen3NextForCausalLM", "qwen3_next" },
    layers = { "num_hidden_layers", absent = 48 }, embed = { "hidden_size", absent = 2048 }, heads = { "num_attention_heads", absent = 16 }, vocab = { "vocab_size", absent = 151936 },
    kv_heads = { "num_key_value_heads", absent = 2 }, head_dim = { "head_dim", absent = 256 }, rope_part = { "partial_rotary_factor", absent = 0.25 },
    key_heads = { "linear_num_key_heads", absent = 16 }, value_heads = { "linear_num_value_heads", absent = 32 }, key_dim = { "linear_key_head_dim", absent = 128 },
    value_dim = { "linear_value_head_dim", absent = 128 }, width = { "linear_conv_kernel_dim", absent = 4 }, ffn = { "intermediate_size", absent = 5632 },
    expert_ffn = { "moe_intermediate_size", absent = 512 }, shared_ffn = { "shared_expert_intermediate_size", absent = 512 }, experts = { "num_experts", absent = 512 },
    top_k = { "num_experts_per_tok", absent = 10 }, normalize = { "norm_topk_prob", absent = true }, tied = { "tie_word_embeddings", absent = false },
    rope_base = { "rope_theta", absent = 10000.0 }, rope_scaling = m.hf.rope_scaling, eps = { "rms_norm_eps", absent = 1e-6 }, gated = true, zero_centered = true,
    positions = { "max_position_embeddings", absent = 32768, write = function(c) return c.positions > 0 and c.positions or c.seq end }, pattern = m.hf.next_pattern,
    must = { hidden_act = { "silu", "swish" }, attention_bias = false },
  },
}
local A = m.axes {
  embed = cfg.embed, heads = cfg.heads, kv_heads = cfg.kv_heads, head_dim = cfg.head_dim, groups = cfg.key_heads, per_group = m.quotient(cfg, "value_heads", "key_heads"),
  key_dim = cfg.key_dim, value_dim = cfg.value_dim, ffn = cfg.ffn, experts = cfg.experts, vocab = cfg.vocab, seq = cfg.seq, batch = cfg.batch,
}
local M = m.axes { groups = cfg.ssm_groups, per_group = m.quotient(cfg, "ssm_heads", "ssm_groups"), state = cfg.state, head_dim = cfg.ssm_dim }
local function norm(...) return m.rms_norm { eps = cfg.eps, zero_centered = cfg.zero_centered, ... } end
local steps, rates = m.init.time_step(1e-3, 0.1), m.init.log_uniform(1, 16)

local Attention = m.module("Attention", function(self)
  self.wq, self.wk = m.param { A.embed, A.heads, A.head_dim }, m.param { A.embed, A.kv_heads, A.head_dim }
  self.wv, self.wo = m.param { A.embed, A.kv_heads, A.head_dim }, m.param { A.heads, A.head_dim, A.embed }
  self.q_norm, self.k_norm = norm(A.head_dim), norm(A.head_dim)
  if cfg.gated then self.wg = m.param { A.embed, A.heads, A.head_dim } end
end)
local function rope(x) -- of a part of each head
  local turned = math.tointeger(cfg.head_dim * cfg.rope_part)
  if turned == 0 then return x end
  local y = m.rope(x:slice("head_dim", 0, turned), { base = cfg.rope_base, scaling = cfg.rope_scaling })
  return turned == cfg.head_dim and y or m.concat({ y, x:slice("head_dim", turned, cfg.head_dim) }, "head_dim")
end
function Attention:forward(x)
  local q, k, v = self.q_norm(x:dot(self.wq, "embed")), self.k_norm(x:dot(self.wk, "embed")), x:dot(self.wv, "embed")
  local y = m.attention(rope(q), rope(k), v, { causal = true })
  if cfg.gated then y = y * m.sigmoid(x:dot(self.wg, "embed")) end
  return y:dot(self.wo, "heads", "head_dim")
end

local Delta = m.module("Delta", function(self) -- deltanet.lua's, whose value heads share keys
  local keys, values = { A.groups, A.key_dim, width = cfg.width }, { A.groups, A.per_group, A.value_dim, width = cfg.width }
  self.wq, self.wk = m.param { A.embed, A.groups, A.key_dim }, m.param { A.embed, A.groups, A.key_dim }
  self.wv, self.wz = m.param { A.embed, A.groups, A.per_group, A.value_dim }, m.param { A.embed, A.groups, A.per_group, A.value_dim }
  self.wbeta, self.wa = m.param { A.embed, A.groups, A.per_group }, m.param { A.embed, A.groups, A.per_group }
  self.A_log, self.dt_bias = m.param { A.groups, A.per_group, init = rates, decay = false }, m.param { A.groups, A.per_group, init = steps, decay = false }
  self.conv_q, self.conv_k, self.conv_v = m.short_conv(keys), m.short_conv(keys), m.short_conv(values)
  self.norm, self.wo = m.gated_norm { A.value_dim, eps = cfg.eps }, m.param { A.groups, A.per_group, A.value_dim, A.embed }
end)
function Delta:forward(x)
  local q, k, v = self.conv_q(x:dot(self.wq, "embed")), self.conv_k(x:dot(self.wk, "embed")), self.conv_v(x:dot(self.wv, "embed"))
  local decay = m.exp(-m.exp(self.A_log:read()) * m.softplus(x:dot(self.wa, "embed"):cast "f32" + self.dt_bias:read()))
  local function token(s, t) -- one position: S {groups, per_group, key_dim, value_dim}
    local S = s.S * t.decay
    S = S + m.outer(t.k, t.beta * (t.v - S:dot(t.k, "key_dim")))
    return { S = S }, S:dot(t.q, "key_dim")
  end
  local y = m.scan(token, {
    axis = "seq", state = { S = m.zero_state(x, { A.groups, A.per_group, A.key_dim, A.value_dim }) }, resets = m.document_starts(x),
    inputs = { q = m.l2_norm(q, "key_dim") * cfg.key_dim ^ -0.5, k = m.l2_norm(k, "key_dim"), v = v, decay = decay, beta = m.sigmoid(x:dot(self.wbeta, "embed")) },
  })
  return self.norm(y, x:dot(self.wz, "embed")):dot(self.wo, "groups", "per_group", "value_dim")
end

local Mamba = m.module("Mamba", function(self) -- mamba.lua's
  local wide, narrow = { M.groups, M.per_group, M.head_dim, width = cfg.width, bias = true }, { M.groups, M.state, width = cfg.width, bias = true }
  self.wz, self.wx = m.param { A.embed, M.groups, M.per_group, M.head_dim }, m.param { A.embed, M.groups, M.per_group, M.head_dim }
  self.wB, self.wC, self.wdt = m.param { A.embed, M.groups, M.state }, m.param { A.embed, M.groups, M.state }, m.param { A.embed, M.groups, M.per_group }
  self.A_log, self.dt_bias = m.param { M.groups, M.per_group, init = rates, decay = false }, m.param { M.groups, M.per_group, init = steps, decay = false }
  self.D, self.conv_x, self.conv_B, self.conv_C = m.param { M.groups, M.per_group, init = "ones", decay = false }, m.short_conv(wide), m.short_conv(narrow), m.short_conv(narrow)
  self.norm, self.wo = m.gated_norm { M.groups, M.per_group, M.head_dim, first = "gate", eps = cfg.eps }, m.param { M.groups, M.per_group, M.head_dim, A.embed }
end)
function Mamba:forward(x)
  local u, B, C = self.conv_x(x:dot(self.wx, "embed")), self.conv_B(x:dot(self.wB, "embed")), self.conv_C(x:dot(self.wC, "embed"))
  local dt = m.softplus(x:dot(self.wdt, "embed"):cast "f32" + self.dt_bias:read())
  local function token(s, t) -- one position: S {groups, per_group, state, head_dim}
    local S = s.S * m.exp(-t.dt * m.exp(self.A_log:read())) + m.outer(t.B, t.u)
    return { S = S }, S:dot(t.C, "state")
  end
  local y = m.scan(token, {
    axis = "seq", state = { S = m.zero_state(x, { M.groups, M.per_group, M.state, M.head_dim }) }, resets = m.document_starts(x),
    inputs = { u = (dt * u):cast(u:dtype()), B = B, C = C, dt = dt },
  })
  return self.norm(y + self.D * u, x:dot(self.wz, "embed")):dot(self.wo, "groups", "per_group", "head_dim")
end

local MLP = m.module("MLP", function(self, size)
  local ffn = m.axis("ffn", size)
  self.gate, self.up, self.down = m.param { A.embed, ffn }, m.param { A.embed, ffn }, m.param { ffn, A.embed }
end)
function MLP:forward(x) return m.swiglu(x:dot(self.gate, "embed"), x:dot(self.up, "embed")):dot(self.down, "ffn") end

local Experts = m.module("Experts", function(self)
  self.moe = m.moe { A.embed, experts = A.experts, ffn = m.axis("ffn", cfg.expert_ffn), top_k = cfg.top_k, normalize = cfg.normalize, aux_loss = cfg.aux }
  self.shared, self.open = MLP(cfg.shared_ffn), m.param { A.embed, init = 0.02 }
end)
function Experts:forward(x) return self.moe(x) + self.shared(x) * m.sigmoid(x:dot(self.open, "embed")) end

local words = {}
for word in cfg.pattern:gmatch "%S+" do words[#words + 1] = word end
local PARTS = { ["*"] = Attention, M = Mamba, D = Delta, E = Experts, ["-"] = function() return MLP(cfg.ffn) end }
local Block = m.module("Block", function(self, i)
  self.norms, self.parts = {}, {}
  for letter in words[(i - 1) % #words + 1]:gmatch "." do
    if not PARTS[letter] then error(("pattern: %q is none of * M D E -"):format(letter)) end
    self.norms[#self.norms + 1], self.parts[#self.parts + 1] = norm(A.embed), PARTS[letter]()
  end
end)
function Block:forward(x)
  for k, part in ipairs(self.parts) do x = x + part(self.norms[k](x)) end
  return x
end

local Hybrid = m.module("Hybrid", function(self)
  self.embedding, self.blocks, self.norm = m.param { A.vocab, A.embed }, m.stack(cfg.layers, Block), norm(A.embed)
  if not cfg.tied then self.head = m.param { A.vocab, A.embed } end
end)
function Hybrid:forward(tokens)
  local x = self.embedding:gather(tokens, "vocab")
  for _, block in ipairs(self.blocks) do x = block(x) end
  return self.norm(x):dot(cfg.tied and self.embedding or self.head, "embed")
end

local layer, one, two = "model.layers.*.", "blocks.*.parts.1.", "blocks.*.parts.2."
local function chosen(k, ...) -- "a | [b] | c": the k-th part of a tensor
  local parts = { ... }
  parts[k] = ("[%s]"):format(parts[k])
  return table.concat(parts, " | ")
end
local function qkvz(k) return { layer .. "linear_attn.in_proj_qkvz.weight", ("(groups (%s)) embed"):format(chosen(k, "key_dim", "key_dim", "per_group value_dim", "per_group value_dim")) } end
local function ba(k) return { layer .. "linear_attn.in_proj_ba.weight", ("(groups (%s)) embed"):format(chosen(k, "per_group", "per_group")) } end
local function channels(k) return { layer .. "linear_attn.conv1d.weight", ("(%s) 1 width"):format(chosen(k, "groups key_dim", "groups key_dim", "groups per_group value_dim")) } end
local function attention(name, dims) return { layer .. "self_attn." .. name .. ".weight", dims } end
Hybrid.hf = { -- parameters and tensors (stdlib/hf_views.lua); mtp.* predicts one token more, and is not used
  axes = A, ignore = { "rotary_emb%.inv_freq$", "^mtp%.", cfg.tied and "^lm_head%.weight$" or nil },
  embedding = { "model.embed_tokens.weight", "vocab embed" }, head = { "lm_head.weight", "vocab embed" }, ["norm.gain"] = { "model.norm.weight", "embed" },
  ["blocks.*.norms.1.gain"] = { layer .. "input_layernorm.weight", "embed" }, ["blocks.*.norms.2.gain"] = { layer .. "post_attention_layernorm.weight", "embed" },
  [one .. "wq"] = { attention("q_proj", "(heads ([head_dim] | head_dim)) embed"), qkvz(1) }, [one .. "wg"] = attention("q_proj", "(heads (head_dim | [head_dim])) embed"),
  [one .. "wk"] = { attention("k_proj", "(kv_heads head_dim) embed"), qkvz(2) }, [one .. "wv"] = { attention("v_proj", "(kv_heads head_dim) embed"), qkvz(3) },
  [one .. "wz"] = qkvz(4), [one .. "wbeta"] = ba(1), [one .. "wa"] = ba(2),
  [one .. "wo"] = { attention("o_proj", "embed (heads head_dim)"), { layer .. "linear_attn.out_proj.weight", "embed (groups per_group value_dim)" } },
  [one .. "q_norm.gain"] = attention("q_norm", "head_dim"), [one .. "k_norm.gain"] = attention("k_norm", "head_dim"),
  [one .. "A_log"] = { layer .. "linear_attn.A_log", "(groups per_group)" }, [one .. "dt_bias"] = { layer .. "linear_attn.dt_bias", "(groups per_group)" },
  [one .. "conv_q.filter"] = channels(1), [one .. "conv_k.filter"] = channels(2), [one .. "conv_v.filter"] = channels(3),
  [one .. "norm.gain"] = { layer .. "linear_attn.norm.weight", "value_dim" }, [two .. "moe.router"] = { layer .. "mlp.gate.weight", "experts embed" },
  [two .. "open"] = { layer .. "mlp.shared_expert_gate.weight", "1 embed" },
}
local stacked = { gate = { "gate_up_proj", "experts ([ffn] | ffn) embed" }, up = { "gate_up_proj", "experts (ffn | [ffn]) embed" }, down = { "down_proj", "experts embed ffn" } }
for _, name in ipairs { "gate", "up", "down" } do -- of a dense layer, of the shared expert, of experts one by one or as transformers 5 has them
  local dims, file = name == "down" and "embed ffn" or "ffn embed", name .. "_proj.weight"
  Hybrid.hf[two .. name], Hybrid.hf[two .. "shared." .. name] = { layer .. "mlp." .. file, dims }, { layer .. "mlp.shared_expert." .. file, dims }
  Hybrid.hf[two .. "moe." .. name] = { { layer .. "mlp.experts.{experts}." .. file, dims }, { layer .. "mlp.experts." .. stacked[name][1], stacked[name][2] } }
end

local model = Hybrid()
local split = { "groups", "heads", "kv_heads", "ffn", "vocab" }
m.train {
  model = model, batch = A.batch, seq = A.seq, vocab = cfg.vocab, steps = cfg.steps, accum = cfg.accum, clip = cfg.clip, data = cfg.data,
  optimizer = m.adamw { lr = cfg.lr, weight_decay = cfg.decay }, schedule = m.cosine { warmup = cfg.warmup },
  layout = m.layout { -- mesh axes are 1 unless --mesh sizes them; "ep" splits experts, elsewhere the batch
    mesh = { { "pp", 1 }, { "dp", 1 }, { "ep", 1 }, { "cp", 1 }, { "tp", 1 } }, params = { tp = split, ep = { "experts" } },
    acts = { tp = { "groups", "heads", "kv_heads", "ffn", "vocab", "seq" }, cp = { "seq", "kv_seq" }, dp = { "batch" }, ep = { "batch", "experts" } },
    stages = { pp = "layers", schedule = cfg.schedule }, exchange = cfg.exchange,
  },
}
if cfg.sample > 0 then m.generate(model, { prompt = "local function ", tokens = cfg.sample, seq = A.seq }) end
