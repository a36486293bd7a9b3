-- Gated DeltaNet (Yang, Kautz and Hatamizadeh 2024, arXiv:2412.06464): a memory of heads x key_dim x value_dim that decays, and in which
-- each token replaces what its key reads by its value, as far as beta says. With decay_per=key it is Kimi Delta Attention (Kimi Team
-- 2025, arXiv:2510.26692): each channel of the keys has a decay of its own, and a sigmoid gates the output.
--   mlua run models/deltanet.lua                       a small model on the text built into mlua, as bytes
--   mlua run models/deltanet.lua decay_per=key
--   mlua check models/deltanet.lua preset=gdn-1.3b     "scan over seq" says what the recurrence became
-- The presets of 1.3 B have the embeddings and, within 2 %, the parameters of llama.lua's llama-1b; they warm up over 2,000 steps and
-- last for 20 tokens a parameter (Hoffmann et al. 2022).
local m = require "mlua"

local cfg = m.config {
  layers = 6, embed = 384, heads = 6, key_dim = 64, value_dim = 64, ffn = 1024, width = 4, decay_per = "head", rank = 64, eps = 1e-5,
  vocab = 256, seq = 256, batch = 16, accum = 1, steps = 300, lr = 1e-3, warmup = 20, decay = 0.1, clip = 1.0, seed = 1, layout = "megatron", schedule = "1f1b",
  data = "", sample = 300,
  presets = {
    demo = { layers = 4, embed = 256, heads = 4, ffn = 704, seq = 128, steps = 200, lr = 2e-3, warmup = 40 },
    ["gdn-1.3b"] = {
      layers = 16, embed = 2048, heads = 16, key_dim = 128, value_dim = 128, ffn = 6784, vocab = 128256, seq = 4096, batch = 4, lr = 3e-4, warmup = 2000, steps = 1550000, sample = 0,
    },
    ["kda-1.3b"] = {
      layers = 16, embed = 2048, heads = 16, key_dim = 128, value_dim = 128, rank = 128, ffn = 7168, decay_per = "key", vocab = 128256, seq = 4096, batch = 4, accum = 4, lr = 3e-4,
      warmup = 2000, steps = 1550000, sample = 0,
    },
  },
}
local A = m.axes {
  embed = cfg.embed, heads = cfg.heads, key_dim = cfg.key_dim, value_dim = cfg.value_dim, rank = cfg.rank, ffn = cfg.ffn, vocab = cfg.vocab, seq = cfg.seq, batch = cfg.batch,
}
local per_key = cfg.decay_per == "key"
assert(per_key or cfg.decay_per == "head", "decay_per is head or key")

local Delta = m.module("Delta", function(self)
  self.wq, self.wk, self.wv = m.param { A.embed, A.heads, A.key_dim }, m.param { A.embed, A.heads, A.key_dim }, m.param { A.embed, A.heads, A.value_dim }
  self.conv_q, self.conv_k = m.short_conv { A.heads, A.key_dim, width = cfg.width }, m.short_conv { A.heads, A.key_dim, width = cfg.width }
  self.conv_v = m.short_conv { A.heads, A.value_dim, width = cfg.width }
  self.wbeta, self.A_log = m.param { A.embed, A.heads }, m.param { A.heads, init = m.init.log_uniform(1, 16), decay = false }
  if per_key then -- decays and gates by products of low rank
    self.wa_in, self.wa, self.wg_in, self.wg = m.param { A.embed, A.rank }, m.param { A.rank, A.heads, A.key_dim }, m.param { A.embed, A.rank }, m.param { A.rank, A.heads, A.value_dim }
    self.dt_bias = m.param { A.heads, A.key_dim, init = m.init.time_step(1e-3, 0.1), decay = false }
  else
    self.wa, self.wg = m.param { A.embed, A.heads }, m.param { A.embed, A.heads, A.value_dim }
    self.dt_bias = m.param { A.heads, init = m.init.time_step(1e-3, 0.1), decay = false }
  end
  self.norm = m.gated_norm { A.value_dim, activation = per_key and "sigmoid" or "silu", eps = cfg.eps }
  self.wo = m.param { A.heads, A.value_dim, A.embed }
end)

function Delta:forward(x)
  local q, k, v = self.conv_q(x:dot(self.wq, "embed")), self.conv_k(x:dot(self.wk, "embed")), self.conv_v(x:dot(self.wv, "embed"))
  local a = per_key and x:dot(self.wa_in, "embed"):dot(self.wa, "rank") or x:dot(self.wa, "embed")
  local gate = per_key and x:dot(self.wg_in, "embed"):dot(self.wg, "rank") or x:dot(self.wg, "embed")
  local decay = m.exp(-m.exp(self.A_log:read()) * m.softplus(a:cast "f32" + self.dt_bias:read()))
  local beta = m.sigmoid(x:dot(self.wbeta, "embed"))
  local function token(s, t) -- one position: S {heads, key_dim, value_dim}
    local S = s.S * t.decay
    S = S + m.outer(t.k, t.beta * (t.v - S:dot(t.k, "key_dim")))
    return { S = S }, S:dot(t.q, "key_dim")
  end
  local y = m.scan(token, {
    axis = "seq", state = { S = m.zero_state(x, { A.heads, A.key_dim, A.value_dim }) }, resets = m.document_starts(x),
    inputs = { q = m.l2_norm(q, "key_dim") * cfg.key_dim ^ -0.5, k = m.l2_norm(k, "key_dim"), v = v, decay = decay, beta = beta },
  })
  return self.norm(y, gate):dot(self.wo, "heads", "value_dim")
end

local Block = m.module("Block", function(self)
  self.norm1, self.delta, self.norm2 = m.rms_norm { A.embed, eps = cfg.eps }, Delta(), m.rms_norm { A.embed, eps = cfg.eps }
  self.gate, self.up, self.down = m.param { A.embed, A.ffn }, m.param { A.embed, A.ffn }, m.param { A.ffn, A.embed }
end)

function Block:forward(x)
  x = x + self.delta(self.norm1(x))
  local h = self.norm2(x)
  return x + m.swiglu(h:dot(self.gate, "embed"), h:dot(self.up, "embed")):dot(self.down, "ffn")
end

local DeltaNet = m.module("DeltaNet", function(self)
  self.embedding = m.param { A.vocab, A.embed }
  self.blocks = m.stack(cfg.layers, Block)
  self.norm = m.rms_norm { A.embed, eps = cfg.eps }
end)

function DeltaNet:forward(tokens)
  local x = self.embedding:gather(tokens, "vocab")
  for _, block in ipairs(self.blocks) do x = block(x) end
  return self.norm(x):dot(self.embedding, "embed")
end

local model = DeltaNet()
m.train {
  model = model, batch = A.batch, seq = A.seq, vocab = cfg.vocab, steps = cfg.steps, accum = cfg.accum, clip = cfg.clip,
  data = cfg.data, optimizer = m.adamw { lr = cfg.lr, weight_decay = cfg.decay }, schedule = m.cosine { warmup = cfg.warmup },
  layout = m.layout[cfg.layout] { sp = true, zero = true, schedule = cfg.schedule }, -- mesh axes are 1 unless --mesh sizes them
}
if cfg.sample > 0 then m.generate(model, { prompt = "local function ", tokens = cfg.sample, seq = A.seq }) end
