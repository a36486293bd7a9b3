-- args: check --device cpu
-- Logits with an axis that the targets lack: a forgotten contraction, or named.
local m = require "mlua"
local A = m.axes { embed = 8, heads = 2, head_dim = 4, vocab = 16, seq = 8, batch = 2, samples = 3 }
local function try(fn)
  local _, message = pcall(fn)
  print(message)
end
local Block = m.module("Block", function(self)
  self.norm = m.rms_norm { A.embed }
  self.wq, self.wk = m.param { A.embed, A.heads, A.head_dim }, m.param { A.embed, A.heads, A.head_dim }
  self.wv, self.wo = m.param { A.embed, A.heads, A.head_dim }, m.param { A.heads, A.head_dim, A.embed }
end)
function Block:forward(x, forgets)
  local h = self.norm(x)
  local q, k, v = h:dot(self.wq, "embed"), h:dot(self.wk, "embed"), h:dot(self.wv, "embed")
  local y = m.attention(m.rope(q), m.rope(k), v, { causal = true })
  if forgets then return x + y:dot(self.wo, "head_dim") end
  return x + y:dot(self.wo, "heads", "head_dim")
end
local GPT = m.module("GPT", function(self)
  self.wte, self.blocks, self.norm = m.param { A.vocab, A.embed }, m.stack(3, Block), m.rms_norm { A.embed }
end)
function GPT:forward(tokens)
  local x = self.wte:gather(tokens, "vocab")
  for i, block in ipairs(self.blocks) do x = block(x, i == 2) end
  return self.norm(x):dot(self.wte, "embed")
end
try(function() return m.train({ model = GPT(), batch = A.batch, seq = A.seq }) end)

-- Where no skip connection spreads it: the first activation that has it.
local Flat = m.module("Flat", function(self) self.wte, self.out = m.param { A.vocab, A.embed }, m.param { A.heads, A.embed, A.vocab } end)
function Flat:forward(tokens)
  local x = self.wte:gather(tokens, "vocab")
  local y = x:dot(self.out, "embed")
  return y
end
try(function() return m.train({ model = Flat(), batch = A.batch, seq = A.seq }) end)

-- In a loss of one's own.
local logits = m.input("logits", { A.samples, A.batch, A.seq, A.vocab })
local targets = m.input("targets", { A.batch, A.seq }, "i32")
try(function() return m.cross_entropy(logits, targets) end)
try(function() return m.cross_entropy(logits, targets, { broadcast = { "samples" } }) end)
try(function() return m.cross_entropy(logits, targets, { broadcast = A.samples, axis = A.vocab }) end)
try(function() return m.cross_entropy(logits, targets, { broadcast = { "samples", "heads" } }) end)
try(function() return m.cross_entropy(logits, targets, { broadcast = { 3 } }) end)
try(function() return m.cross_entropy(nil, targets) end)
try(function() return m.cross_entropy(logits, GPT) end)
