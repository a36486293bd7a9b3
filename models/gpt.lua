-- GPT-2 (Radford et al. 2019): learned positions, pre-norm blocks, GELU, tied embeddings.
--   mlua run models/gpt.lua                         a small model on the text built into mlua, as bytes
--   mlua run models/gpt.lua data=book.txt steps=500
--   mlua run models/gpt.lua preset=gpt2-124m data=tokens.bin      (uint16 tokens)
--   mlua check models/gpt.lua preset=gpt2-124m
--   mlua run models/gpt.lua --from gpt2/ data=book.txt             (a Hugging Face folder of GPT-2)
-- The presets of published sizes warm up over 2,000 steps, as nanoGPT does (gpt2-124m's loss leaps when it warms up
-- over 20), and last for 20 tokens a parameter (Hoffmann et al. 2022).
local m = require "mlua"

local cfg = m.config {
  layers = 6, embed = 384, heads = 6, ffn = 0, vocab = 256, positions = 0, eps = 1e-5, seq = 256, batch = 16, accum = 1, steps = 300,
  lr = 1e-3, warmup = 20, decay = 0.1, clip = 1.0, grad_dtype = "f32", dropout = 0.0, seed = 1, layout = "megatron", reshard = true, schedule = "1f1b", data = "", sample = 300,
  presets = {
    demo = { layers = 4, embed = 256, heads = 4, seq = 128, batch = 16, steps = 200, lr = 2e-3, warmup = 40 },
    ["gpt2-124m"] = { layers = 12, embed = 768, heads = 12, vocab = 50304, seq = 1024, batch = 64, lr = 6e-4, warmup = 2000, steps = 38000, sample = 0 },
    ["gpt2-1.5b"] = { layers = 48, embed = 1600, heads = 25, vocab = 50304, seq = 1024, batch = 16, lr = 2e-4, warmup = 2000, steps = 1900000, sample = 0 },
    ["gpt-1.3b"] = { layers = 24, embed = 2048, heads = 16, vocab = 50304, seq = 2048, batch = 8, lr = 2e-4, warmup = 2000, steps = 1600000, sample = 0 },
  },
  hf = { -- settings and fields of config.json (stdlib/hf_config.lua)
    { "GPT2LMHeadModel", "gpt2" },
    layers = "n_layer", embed = "n_embd", heads = "n_head", vocab = "vocab_size", eps = { "layer_norm_epsilon", absent = 1e-5 },
    ffn = { "n_inner", absent = 0, null = 0 },
    positions = { "n_positions", "n_ctx", absent = 1024, write = function(c) return c.positions > 0 and c.positions or c.seq end },
    must = { activation_function = { "gelu_new", "gelu_pytorch_tanh" }, scale_attn_weights = true, scale_attn_by_inverse_layer_idx = false, tie_word_embeddings = true },
  },
}
local A = m.axes {
  embed = cfg.embed, heads = cfg.heads, head_dim = m.quotient(cfg, "embed", "heads"), vocab = cfg.vocab, seq = cfg.seq,
  ffn = cfg.ffn > 0 and cfg.ffn or 4 * cfg.embed, batch = cfg.batch,
}
local longer = cfg.positions > 0 and cfg.positions ~= cfg.seq -- a table of more positions than the batch has
local residual = 0.02 / math.sqrt(2 * cfg.layers) -- projections into the residual stream start smaller

local Attention = m.module("Attention", function(self)
  self.wq, self.bq = m.param { A.embed, A.heads, A.head_dim }, m.bias { A.heads, A.head_dim }
  self.wk, self.bk = m.param { A.embed, A.heads, A.head_dim }, m.bias { A.heads, A.head_dim }
  self.wv, self.bv = m.param { A.embed, A.heads, A.head_dim }, m.bias { A.heads, A.head_dim }
  self.wo, self.bo = m.param { A.heads, A.head_dim, A.embed, init = residual }, m.bias { A.embed }
end)

function Attention:forward(x)
  local q = x:dot(self.wq, "embed") + self.bq
  local k = x:dot(self.wk, "embed") + self.bk
  local v = x:dot(self.wv, "embed") + self.bv
  return m.attention(q, k, v, { causal = true }):dot(self.wo, "heads", "head_dim") + self.bo
end

local MLP = m.module("MLP", function(self)
  self.up, self.up_bias = m.param { A.embed, A.ffn }, m.bias { A.ffn }
  self.down, self.down_bias = m.param { A.ffn, A.embed, init = residual }, m.bias { A.embed }
end)

function MLP:forward(x)
  return m.gelu(x:dot(self.up, "embed") + self.up_bias):dot(self.down, "ffn") + self.down_bias
end

local Block = m.module("Block", function(self)
  self.norm1, self.attention = m.layer_norm { A.embed, eps = cfg.eps }, Attention()
  self.norm2, self.mlp = m.layer_norm { A.embed, eps = cfg.eps }, MLP()
end)

function Block:forward(x)
  x = x + m.dropout(self.attention(self.norm1(x)), cfg.dropout)
  return x + m.dropout(self.mlp(self.norm2(x)), cfg.dropout)
end

local GPT = m.module("GPT", function(self)
  self.wte, self.wpe = m.param { A.vocab, A.embed }, m.param { longer and m.axis("positions", cfg.positions) or A.seq, A.embed }
  self.blocks = m.stack(cfg.layers, Block)
  self.norm = m.layer_norm { A.embed, eps = cfg.eps }
end)

function GPT:forward(tokens)
  local wpe = longer and self.wpe:slice("positions", 0, cfg.seq):rename("positions", "seq") or self.wpe
  local x = self.wte:gather(tokens, "vocab") + wpe
  for _, block in ipairs(self.blocks) do x = block(x) end
  return self.norm(x):dot(self.wte, "embed")
end

local function joined(i) -- q, k or v of three
  local parts = { "heads head_dim", "heads head_dim", "heads head_dim" }
  parts[i] = "[heads head_dim]"
  return "(" .. table.concat(parts, " | ") .. ")"
end
GPT.hf = { -- parameters and tensors (stdlib/hf_views.lua)
  fan_in_fan_out = true, prefixes = { ["transformer."] = { "" } }, ignore = { "attn%.bias$", "attn%.masked_bias$", "^lm_head%.weight$" },
  wte = { "transformer.wte.weight", "vocab embed" }, wpe = { { "transformer.wpe.weight", "positions embed" }, { "transformer.wpe.weight", "seq embed" } },
  ["norm.gain"] = { "transformer.ln_f.weight", "embed" }, ["norm.bias"] = { "transformer.ln_f.bias", "embed" },
  ["blocks.*.attention.wo"] = { "transformer.h.*.attn.c_proj.weight", "(heads head_dim) embed" },
  ["blocks.*.attention.bo"] = { "transformer.h.*.attn.c_proj.bias", "embed" },
  ["blocks.*.mlp.up"] = { "transformer.h.*.mlp.c_fc.weight", "embed ffn" }, ["blocks.*.mlp.up_bias"] = { "transformer.h.*.mlp.c_fc.bias", "ffn" },
  ["blocks.*.mlp.down"] = { "transformer.h.*.mlp.c_proj.weight", "ffn embed" }, ["blocks.*.mlp.down_bias"] = { "transformer.h.*.mlp.c_proj.bias", "embed" },
}
for i, x in ipairs { "q", "k", "v" } do
  GPT.hf["blocks.*.attention.w" .. x] = { "transformer.h.*.attn.c_attn.weight", "embed " .. joined(i) }
  GPT.hf["blocks.*.attention.b" .. x] = { "transformer.h.*.attn.c_attn.bias", joined(i) }
end
for i = 1, 2 do
  GPT.hf[("blocks.*.norm%d.gain"):format(i)] = { ("transformer.h.*.ln_%d.weight"):format(i), "embed" }
  GPT.hf[("blocks.*.norm%d.bias"):format(i)] = { ("transformer.h.*.ln_%d.bias"):format(i), "embed" }
end

local model = GPT()
m.train {
  model = model, batch = A.batch, seq = A.seq, vocab = cfg.vocab, steps = cfg.steps, accum = cfg.accum, clip = cfg.clip, grad_dtype = cfg.grad_dtype,
  data = cfg.data, optimizer = m.adamw { lr = cfg.lr, weight_decay = cfg.decay }, schedule = m.cosine { warmup = cfg.warmup },
  layout = m.layout[cfg.layout] { sp = true, zero = true, reshard = cfg.reshard, schedule = cfg.schedule }, -- mesh axes are 1 unless --mesh sizes them
}
if cfg.sample > 0 then m.generate(model, { prompt = "local function ", tokens = cfg.sample, seq = A.seq }) end
