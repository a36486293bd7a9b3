-- Low-rank adapters (Hu et al. 2022): a language model of Llama's kind keeps its given weights, and narrow products beside them learn
-- to answer: of a chat the assistant's words alone count.
--   mlua run models/lora.lua                        learns the text built into mlua first, then to answer sums and riddles
--   mlua run models/lora.lua --from Qwen3-0.6B/ data=chats.jsonl seq=512
--     whose lines are {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
--   mlua check models/lora.lua preset=llama-1b --device h200
local m = require "mlua"

local cfg = m.config {
  rank = 8, alpha = 16.0, adapted = "wq wk wv wo gate up down", pretrain = 60, -- steps on text, where no weights are given
  layers = 4, embed = 256, heads = 4, kv_heads = 2, ffn = 704, vocab = 256, seq = 128, batch = 16, accum = 1, steps = 60, eps = 1e-5, tied = true,
  qk_norm = false, head_dim = 0, rope_base = 500000.0, rope_scaling = "", lr = 4e-3, warmup = 10, clip = 1.0, dropout = 0.0, seed = 1, layout = "megatron", schedule = "1f1b",
  positions = 0, data = "", tokenizer = "",
  presets = {
    demo = { layers = 2, embed = 128, ffn = 352, pretrain = 100, steps = 100 },
    ["llama-1b"] = { layers = 16, embed = 2048, heads = 32, kv_heads = 8, ffn = 8192, vocab = 128256, seq = 2048, batch = 16, accum = 4, steps = 1000, pretrain = 0, lr = 2e-4, warmup = 30, dropout = 0.05 },
  },
  hf = { -- settings and fields of config.json (stdlib/hf_config.lua)
    layers = "num_hidden_layers", embed = "hidden_size", heads = "num_attention_heads", ffn = "intermediate_size", vocab = "vocab_size",
    kv_heads = { "num_key_value_heads", absent = "heads", null = "heads" }, 
    head_dim = { "head_dim", absent = 0, null = 0, write = function(c) return c.head_dim > 0 and c.head_dim or c.embed // c.heads end },
    positions = { "max_position_embeddings", absent = 2048, write = function(c) return c.positions > 0 and c.positions or c.seq end },
   
    eps = { "rms_norm_eps", absent = 1e-6 }, tied = { "tie_word_embeddings", absent = false }, rope_base = { "rope_theta", absent = 10000.0 },
    rope_scaling = m.hf.rope_scaling, must = { hidden_act = { "silu", "swish" }, attention_bias = false, mlp_bias = false },
    { "LlamaForCausalLM", "llama", qk_norm = false }, { "Qwen3ForCausalLM", "qwen3", qk_norm = true, must = { use_sliding_window = false }, unused = { "sliding_window", "max_window_layers" } },
  },
}
local A = m.axes {
  embed = cfg.embed, heads = cfg.heads, kv_heads = cfg.kv_heads, head_dim = cfg.head_dim > 0 and cfg.head_dim or m.quotient(cfg, "embed", "heads"),
  ffn = cfg.ffn, vocab = cfg.vocab, seq = cfg.seq, batch = cfg.batch,
}

local Block = m.module("Block", function(self)
  self.norm1, self.norm2 = m.rms_norm { A.embed, eps = cfg.eps }, m.rms_norm { A.embed, eps = cfg.eps }
  self.wq, self.wo = m.param { A.embed, A.heads, A.head_dim }, m.param { A.heads, A.head_dim, A.embed }
  self.wk, self.wv = m.param { A.embed, A.kv_heads, A.head_dim }, m.param { A.embed, A.kv_heads, A.head_dim }
  if cfg.qk_norm then self.q_norm, self.k_norm = m.rms_norm { A.head_dim, eps = cfg.eps }, m.rms_norm { A.head_dim, eps = cfg.eps } end
  self.gate, self.up, self.down = m.param { A.embed, A.ffn }, m.param { A.embed, A.ffn }, m.param { A.ffn, A.embed }
end)

function Block:forward(x)
  local h, rope = self.norm1(x), { base = cfg.rope_base, scaling = cfg.rope_scaling }
  local q, k, v = h:dot(self.wq, "embed"), h:dot(self.wk, "embed"), h:dot(self.wv, "embed")
  if cfg.qk_norm then q, k = self.q_norm(q), self.k_norm(k) end
  x = x + m.attention(m.rope(q, rope), m.rope(k, rope), v, { causal = true }):dot(self.wo, "heads", "head_dim")
  h = self.norm2(x)
  return x + m.swiglu(h:dot(self.gate, "embed"), h:dot(self.up, "embed")):dot(self.down, "ffn")
end

local Llama = m.module("Llama", function(self)
  self.embedding, self.blocks = m.param { A.vocab, A.embed }, m.stack(cfg.layers, Block)
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
}
for name, tensor in pairs {
  ["norm1.gain"] = { "input_layernorm", "embed" }, ["norm2.gain"] = { "post_attention_layernorm", "embed" }, wq = { "self_attn.q_proj", "(heads head_dim) embed" },
  wk = { "self_attn.k_proj", "(kv_heads head_dim) embed" }, wv = { "self_attn.v_proj", "(kv_heads head_dim) embed" }, wo = { "self_attn.o_proj", "embed (heads head_dim)" },
  ["q_norm.gain"] = { "self_attn.q_norm", "head_dim" }, ["k_norm.gain"] = { "self_attn.k_norm", "head_dim" },
  gate = { "mlp.gate_proj", "ffn embed" }, up = { "mlp.up_proj", "ffn embed" }, down = { "mlp.down_proj", "embed ffn" },
} do Llama.hf["blocks.*." .. name] = { "model.layers.*." .. tensor[1] .. ".weight", tensor[2] } end

-- Chats of the file, or made ones: what is 12 + 7, and words the other way round.
local chats = {}
for line in (cfg.data ~= "" and io.lines(cfg.data) or function() end) do chats[#chats + 1] = m.json(line, cfg.data).messages end
local function made(random)
  if random:integer(0, 1) == 0 then
    local a, b = random:integer(0, 20), random:integer(0, 20)
    return { { role = "user", content = ("What is %d + %d?"):format(a, b) }, { role = "assistant", content = ("It is %d."):format(a + b) } }
  end
  local word = ""
  for _ = 1, random:integer(3, 6) do word = word .. string.char(random:integer(97, 122)) end
  return { { role = "user", content = "Turn round: " .. word }, { role = "assistant", content = word:reverse() } }
end

local _, given = m.from() -- that of the weights
local file = cfg.tokenizer ~= "" and cfg.tokenizer or given
local tokenizer = file and m.tokenizer(file) -- else bytes
local function encode(text) return tokenizer and tokenizer:encode(text) or text end

local function sample(_, random)
  local parts = {}
  for _, message in ipairs(#chats > 0 and chats[random:integer(1, #chats)] or made(random)) do
    local words = encode(message.content .. "\n")
    parts[#parts + 1] = encode(message.role .. ": ")
    parts[#parts + 1] = message.role == "assistant" and { learn = words } or words
  end
  local tokens, targets = m.labelled(cfg.seq, parts)
  return { tokens = tokens, targets = targets }
end

local model = Llama()
local function train(o)
  o.model, o.batch, o.seq, o.accum, o.clip, o.schedule = model, A.batch, A.seq, cfg.accum, cfg.clip, m.cosine { warmup = cfg.warmup }
  o.layout = m.layout[cfg.layout] { sp = true, zero = true, schedule = cfg.schedule } -- mesh axes are 1 unless --mesh sizes them
  return m.train(o)
end
if not m.from() and cfg.pretrain > 0 then train { vocab = cfg.vocab, data = "", steps = cfg.pretrain, optimizer = m.adamw { lr = 2e-3 } } end

local adapted = {}
for name in cfg.adapted:gmatch "%S+" do adapted[#adapted + 1] = name end
m.lora(model, { rank = cfg.rank, alpha = cfg.alpha, dropout = cfg.dropout, match = adapted })
train {
  inputs = { tokens = { A.batch, A.seq, dtype = "i32" }, targets = { A.batch, A.seq, dtype = "i32" } }, sample = sample, steps = cfg.steps,
  loss = function(i)
    local logits = model(i.tokens)
    local sum, count = m.cross_entropy(logits, i.targets)
    return sum, count, { accuracy = m.accuracy(logits, i.targets) }
  end,
  optimizer = m.adamw { lr = cfg.lr, weight_decay = 0 },
}
