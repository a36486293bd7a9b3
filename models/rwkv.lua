-- RWKV-7 (Peng et al. 2025, arXiv:2503.14456): each token is mixed with the one before it; a memory of heads x key x value, whose decay w,
-- removal key, replacement rate a and gate are made of it by products of low rank; values mix with those of the first layer.
--   mlua run models/rwkv.lua                       a small model on the text built into mlua, as bytes
--   mlua check models/rwkv.lua preset=rwkv7-1.5b   "scan over seq" says what the recurrence became
-- The preset of a published size warms up over 2,000 steps and lasts for 20 tokens a parameter (Hoffmann et al. 2022).
local m = require "mlua"

local cfg = m.config {
  layers = 6, embed = 384, heads = 6, ffn = 1536, rank_w = 32, rank_a = 32, rank_v = 16, rank_g = 64, eps = 1e-5,
  vocab = 256, seq = 256, batch = 16, accum = 1, steps = 300, lr = 1e-3, warmup = 20, decay = 0.1, clip = 1.0, seed = 1, layout = "megatron", schedule = "1f1b",
  data = "", sample = 300,
  presets = {
    demo = { layers = 4, embed = 256, heads = 4, ffn = 1024, seq = 128, steps = 200, lr = 2e-3, warmup = 40 },
    ["rwkv7-1.5b"] = {
      layers = 24, embed = 2048, heads = 32, ffn = 8192, rank_w = 96, rank_a = 96, rank_v = 64, rank_g = 256, vocab = 65536, seq = 4096, batch = 4, accum = 4, lr = 4e-4, warmup = 2000,
      steps = 1860000, sample = 0,
    },
  },
}
local A = m.axes {
  embed = cfg.embed, heads = cfg.heads, key = m.quotient(cfg, "embed", "heads"), value = cfg.embed // cfg.heads, ffn = cfg.ffn, vocab = cfg.vocab, seq = cfg.seq, batch = cfg.batch,
}

-- The token before, zeros at the first of a document.
local function before(x)
  local starts, y = m.document_starts(x), x:pad("seq", 1, 0):slice("seq", 0, x:size "seq")
  if starts ~= nil then y = m.where(starts, 0, y) end
  return y
end

-- bias + act(x a) b: x through a matrix of low rank.
local LowRank = m.module("LowRank", function(self, rank, into, bias, act)
  local axis = m.axis("rank", rank)
  self.a, self.b, self.act = m.param { A.embed, axis }, m.param { axis, table.unpack(into) }, act
  if bias then self.bias = m.bias { init = bias, table.unpack(into) } end
end)
function LowRank:forward(x)
  local y = x:dot(self.a, "embed")
  y = (self.act and self.act(y) or y):dot(self.b, "rank"):cast "f32"
  return self.bias and y + self.bias:read() or y
end

-- Slow to fast decays over a head's channels.
local function ramp(axes) return (m.iota(axes[2], "f32") * (5 / axes[2].size) - 6):broadcast(axes) end

local TimeMix = m.module("TimeMix", function(self, first)
  local keys, values = { A.heads, A.key }, { A.heads, A.value }
  for _, name in ipairs { "r", "w", "k", "v", "a", "g" } do self["mix_" .. name] = m.bias { A.embed, init = m.init.constant(0.5) } end
  self.wr, self.wk, self.wv = m.param { A.embed, A.heads, A.key }, m.param { A.embed, A.heads, A.key }, m.param { A.embed, A.heads, A.value }
  self.w, self.a = LowRank(cfg.rank_w, keys, ramp, m.tanh), LowRank(cfg.rank_a, keys, "zeros")
  self.g = LowRank(cfg.rank_g, values, nil, m.sigmoid)
  if not first then self.v = LowRank(cfg.rank_v, values, "ones") end
  self.removal, self.replace = m.bias { A.heads, A.key, init = m.init.constant(0.85) }, m.bias { A.heads, A.key, init = "ones" }
  self.bonus = m.bias { A.heads, A.key }
  self.norm_gain, self.norm_bias = m.param { A.heads, A.value, init = "ones", decay = false }, m.bias { A.heads, A.value }
  self.wo = m.param { A.heads, A.value, A.embed }
end)

function TimeMix:forward(x, v_first)
  local last = before(x)
  local function mixed(name) return x + (last - x) * self["mix_" .. name] end
  local r, k, v = mixed "r":dot(self.wr, "embed"), mixed "k":dot(self.wk, "embed"), mixed "v":dot(self.wv, "embed")
  local w = m.exp(-math.exp(-0.5) * m.sigmoid(self.w(mixed "w")))
  local a, g = m.sigmoid(self.a(mixed "a")), self.g(mixed "g")
  if v_first ~= nil then v = v + (v_first - v) * m.sigmoid(self.v(mixed "v")):cast(v:dtype()) end
  local removal = m.l2_norm(k * self.removal, "key", 1e-24)
  a = a:cast(k:dtype())
  k = k * (1 + (a - 1) * self.replace)
  local function token(s, t) -- one position: S {heads, key, value}
    local S = s.S * t.w - m.outer(t.a * t.removal, s.S:dot(t.removal, "key")) + m.outer(t.k, t.v)
    return { S = S }, S:dot(t.r, "key")
  end
  local y = m.scan(token, {
    axis = "seq", state = { S = m.zero_state(x, { A.heads, A.key, A.value }) }, resets = m.document_starts(x),
    inputs = { r = r, w = w, k = k, v = v, a = a, removal = removal },
  })
  y = y - y:mean "value"
  y = y * m.rsqrt((y * y):mean "value" + 64 * cfg.eps) * self.norm_gain:read() + self.norm_bias:read() -- a norm for each head
  y = y + (r * k * self.bonus):sum "key" * v
  y = (y * g):cast(x:dtype()):dot(self.wo, "heads", "value")
  if v_first == nil then v_first = v end
  return y, v_first
end

local Block = m.module("Block", function(self, i)
  self.norm1, self.norm2 = m.layer_norm { A.embed, eps = cfg.eps }, m.layer_norm { A.embed, eps = cfg.eps }
  self.time, self.mix = TimeMix(i == 1), m.bias { A.embed, init = m.init.constant(0.5) }
  self.up, self.down = m.param { A.embed, A.ffn }, m.param { A.ffn, A.embed }
end)

function Block:forward(x, v_first)
  local y, v = self.time(self.norm1(x), v_first)
  x = x + y
  local h = self.norm2(x)
  h = h + (before(h) - h) * self.mix
  return x + (m.relu(h:dot(self.up, "embed")) ^ 2):dot(self.down, "ffn"), v
end

local RWKV = m.module("RWKV", function(self)
  self.embedding, self.norm_in = m.param { A.vocab, A.embed }, m.layer_norm { A.embed, eps = cfg.eps }
  self.blocks = m.stack(cfg.layers, Block)
  self.norm, self.head = m.layer_norm { A.embed, eps = cfg.eps }, m.param { A.vocab, A.embed }
end)

function RWKV:forward(tokens)
  local x, v_first = self.norm_in(self.embedding:gather(tokens, "vocab")), nil
  for _, block in ipairs(self.blocks) do x, v_first = block(x, v_first) end
  return self.norm(x):dot(self.head, "embed")
end

local model = RWKV()
m.train {
  model = model, batch = A.batch, seq = A.seq, vocab = cfg.vocab, steps = cfg.steps, accum = cfg.accum, clip = cfg.clip,
  data = cfg.data, optimizer = m.adamw { lr = cfg.lr, weight_decay = cfg.decay }, schedule = m.cosine { warmup = cfg.warmup },
  layout = m.layout[cfg.layout] { sp = true, zero = true, schedule = cfg.schedule }, -- mesh axes are 1 unless --mesh sizes them
}
if cfg.sample > 0 then m.generate(model, { prompt = "local function ", tokens = cfg.sample, seq = A.seq }) end
