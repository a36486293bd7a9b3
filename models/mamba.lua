-- Mamba-2 (Dao and Gu 2024, arXiv:2405.21060): a state of heads x state x head_dim that decays by exp(-dt exp(A_log)) at each token and
-- takes in the outer product of B and dt x; C reads it. B and C are shared by the heads of a group.
--   mlua run models/mamba.lua                       a small model on the text built into mlua, as bytes
--   mlua check models/mamba.lua preset=mamba2-1.3b  "scan over seq" says what the recurrence became
--   mlua run models/mamba.lua --from mamba2-hf/ data=mine.jsonl     (a Hugging Face folder)
-- The preset of a published size warms up over 2,000 steps and lasts for 20 tokens a parameter (Hoffmann et al. 2022).
local m = require "mlua"

local cfg = m.config {
  layers = 8, embed = 384, heads = 12, head_dim = 64, state = 64, groups = 1, width = 4, tied = true, conv_bias = true, dt_limit = "", eps = 1e-5,
  vocab = 256, seq = 256, batch = 16, accum = 1, steps = 300, lr = 1e-3, warmup = 20, decay = 0.1, clip = 1.0, seed = 1, schedule = "1f1b", data = "", sample = 300,
  presets = {
    demo = { layers = 4, embed = 192, heads = 6, state = 32, seq = 128, steps = 200, lr = 2e-3, warmup = 40 },
    ["mamba2-1.3b"] = {
      layers = 48, embed = 2048, heads = 64, state = 128, vocab = 50288, seq = 4096, batch = 4, lr = 6e-4, warmup = 2000, steps = 1640000, sample = 0,
    },
  },
  hf = { -- settings and fields of config.json (stdlib/hf_config.lua)
    { "Mamba2ForCausalLM", "mamba2" },
    layers = { "num_hidden_layers", absent = 64 }, embed = { "hidden_size", absent = 4096 }, heads = { "num_heads", absent = 128 }, head_dim = { "head_dim", absent = 64 },
    state = { "state_size", absent = 128 }, groups = { "n_groups", absent = 8 }, width = { "conv_kernel", absent = 4 }, vocab = { "vocab_size", absent = 32768 },
    tied = { "tie_word_embeddings", absent = false }, conv_bias = { "use_conv_bias", absent = true },
    eps = { "layer_norm_epsilon", absent = 1e-5 }, dt_limit = m.hf.time_step_limit, must = { hidden_act = { "silu", "swish" }, use_bias = false },
    also = function(c) return { expand = c.heads * c.head_dim // c.embed } end,
    unused = { -- transformers computes with none of these: initial values, its chunks, dtypes
      "expand", "intermediate_size", "chunk_size", "rms_norm", "residual_in_fp32", "rescale_prenorm_residual", "norm_before_gate", "time_step_rank", "time_step_min",
      "time_step_max", "time_step_floor", "time_step_scale", "time_step_init_scheme", "layer_types",
    },
  },
}
local A = m.axes {
  embed = cfg.embed, groups = cfg.groups, heads = m.quotient(cfg, "heads", "groups"), head_dim = cfg.head_dim, state = cfg.state, vocab = cfg.vocab, seq = cfg.seq, batch = cfg.batch,
}
local low, high = cfg.dt_limit:match "^(%S+) (%S+)$"

local Block = m.module("Block", function(self)
  self.norm = m.rms_norm { A.embed, eps = cfg.eps }
  self.wz, self.wx = m.param { A.embed, A.groups, A.heads, A.head_dim }, m.param { A.embed, A.groups, A.heads, A.head_dim }
  self.wB, self.wC = m.param { A.embed, A.groups, A.state }, m.param { A.embed, A.groups, A.state }
  self.wdt = m.param { A.embed, A.groups, A.heads }
  self.dt_bias = m.param { A.groups, A.heads, init = m.init.time_step(1e-3, 0.1), decay = false }
  self.A_log = m.param { A.groups, A.heads, init = m.init.log_uniform(1, 16), decay = false }
  self.D = m.param { A.groups, A.heads, init = "ones", decay = false }
  self.conv_x = m.short_conv { A.groups, A.heads, A.head_dim, width = cfg.width, bias = cfg.conv_bias }
  self.conv_B = m.short_conv { A.groups, A.state, width = cfg.width, bias = cfg.conv_bias }
  self.conv_C = m.short_conv { A.groups, A.state, width = cfg.width, bias = cfg.conv_bias }
  self.gated = m.gated_norm { A.groups, A.heads, A.head_dim, first = "gate", eps = cfg.eps }
  self.wo = m.param { A.groups, A.heads, A.head_dim, A.embed }
end)

function Block:forward(input)
  local h = self.norm(input)
  local z, x, B, C, dt = h:dot(self.wz, "embed"), h:dot(self.wx, "embed"), h:dot(self.wB, "embed"), h:dot(self.wC, "embed"), h:dot(self.wdt, "embed")
  x, B, C, dt = self.conv_x(x), self.conv_B(B), self.conv_C(C), m.softplus(dt:cast "f32" + self.dt_bias:read())
  if low then dt = m.clamp(dt, tonumber(low), tonumber(high)) end
  local function token(s, t) -- one position: S {groups, heads, state, head_dim}
    local S = s.S * m.exp(-t.dt * m.exp(self.A_log:read())) + m.outer(t.B, t.x)
    return { S = S }, S:dot(t.C, "state")
  end
  local y = m.scan(token, {
    axis = "seq", state = { S = m.zero_state(input, { A.groups, A.heads, A.state, A.head_dim }) }, resets = m.document_starts(input),
    inputs = { x = (dt * x):cast(x:dtype()), B = B, C = C, dt = dt },
  })
  return input + self.gated(y + self.D * x, z):dot(self.wo, "groups", "heads", "head_dim")
end

local Mamba = m.module("Mamba", function(self)
  self.embedding = m.param { A.vocab, A.embed }
  self.blocks = m.stack(cfg.layers, Block)
  self.norm = m.rms_norm { A.embed, eps = cfg.eps }
  if not cfg.tied then self.head = m.param { A.vocab, A.embed } end
end)

function Mamba:forward(tokens)
  local x = self.embedding:gather(tokens, "vocab")
  for _, block in ipairs(self.blocks) do x = block(x) end
  return self.norm(x):dot(cfg.tied and self.embedding or self.head, "embed")
end

local mixer, wide, narrow = "backbone.layers.*.mixer.", "groups heads head_dim", "groups state"
local function chosen(k, ...) -- "(a | [b] | c)": the k-th part of a tensor
  local parts = { ... }
  parts[k] = ("[%s]"):format(parts[k])
  return ("(%s)"):format(table.concat(parts, " | "))
end
local function projected(k) return { mixer .. "in_proj.weight", chosen(k, wide, wide, narrow, narrow, "groups heads") .. " embed" } end
Mamba.hf = { -- parameters and tensors (stdlib/hf_views.lua)
  axes = A, ignore = { cfg.tied and "^lm_head%.weight$" or nil },
  embedding = { { "backbone.embeddings.weight", "vocab embed" }, { "backbone.embedding.weight", "vocab embed" } }, head = { "lm_head.weight", "vocab embed" },
  ["norm.gain"] = { "backbone.norm_f.weight", "embed" }, ["blocks.*.norm.gain"] = { "backbone.layers.*.norm.weight", "embed" },
  ["blocks.*.wz"] = projected(1), ["blocks.*.wx"] = projected(2), ["blocks.*.wB"] = projected(3), ["blocks.*.wC"] = projected(4), ["blocks.*.wdt"] = projected(5),
  ["blocks.*.dt_bias"] = { mixer .. "dt_bias", "(groups heads)" }, ["blocks.*.A_log"] = { mixer .. "A_log", "(groups heads)" }, ["blocks.*.D"] = { mixer .. "D", "(groups heads)" },
  ["blocks.*.gated.gain"] = { mixer .. "norm.weight", "(groups heads head_dim)" }, ["blocks.*.wo"] = { mixer .. "out_proj.weight", "embed (groups heads head_dim)" },
}
for k, name in ipairs { "x", "B", "C" } do
  local part, path = chosen(k, wide, narrow, narrow), "blocks.*.conv_" .. name
  Mamba.hf[path .. ".filter"], Mamba.hf[path .. ".bias"] = { mixer .. "conv1d.weight", part .. " 1 width" }, { mixer .. "conv1d.bias", part }
end

local model = Mamba()
local split = cfg.groups > 1 and "groups" or "heads"
m.train {
  model = model, batch = A.batch, seq = A.seq, vocab = cfg.vocab, steps = cfg.steps, accum = cfg.accum, clip = cfg.clip,
  data = cfg.data, optimizer = m.adamw { lr = cfg.lr, weight_decay = cfg.decay }, schedule = m.cosine { warmup = cfg.warmup },
  layout = m.layout { -- mesh axes are 1 unless --mesh sizes them
    mesh = { { "pp", 1 }, { "dp", 1 }, { "cp", 1 }, { "tp", 1 } }, params = { tp = { split, "vocab" } },
    acts = { tp = { split, "vocab", "seq" }, cp = { "seq" }, dp = { "batch" } }, state = { dp = "flat" }, stages = { pp = "layers", schedule = cfg.schedule },
  },
}
if cfg.sample > 0 then m.generate(model, { prompt = "local function ", tokens = cfg.sample, seq = A.seq }) end
