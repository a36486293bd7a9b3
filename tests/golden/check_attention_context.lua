-- args: MLUA_DEBUG=3 check --device h200 SCRIPT --mesh cp=2 </dev/null 2>&1 | sed -nE 's/^step [0-9]+: (attention|kernel|gemm|collective) ([a-z_]*)[^(]*(\([0-9.]* MB).* reads .* writes .* in temporary.*/\1 \2 \3)/p' | grep -e attention -e copy | sort | uniq -c
-- Sequences cut over two ranks: a layer has one attention call a direction, whose queries are two pieces. Ranks trade halves of the tokens (0.01 MB)
-- once. Attention reads keys and values as they are gathered, in the order of ranks, and writes their gradients so: copied are gradients of parameters
-- alone (0.52 MB).
local m = require "mlua"
local A = m.axes { batch = 1, seq = 4096, embed = 256, heads = 2, head_dim = 128, vocab = 512 }
local Block = m.module("Block", function(self)
  self.wq, self.wk = m.param { A.embed, A.heads, A.head_dim }, m.param { A.embed, A.heads, A.head_dim }
  self.wv, self.wo = m.param { A.embed, A.heads, A.head_dim }, m.param { A.heads, A.head_dim, A.embed }
end)
function Block:forward(x)
  local q, k, v = x:dot(self.wq, "embed"), x:dot(self.wk, "embed"), x:dot(self.wv, "embed")
  return x + m.attention(q, k, v, { causal = true }):dot(self.wo, "heads", "head_dim")
end
local Model = m.module("Model", function(self)
  self.wte, self.blocks = m.param { A.vocab, A.embed }, m.stack(2, Block)
end)
function Model:forward(tokens)
  local x = self.wte:gather(tokens, "vocab")
  for _, block in ipairs(self.blocks) do x = block(x) end
  return x:dot(self.wte, "embed")
end
m.train { layout = m.layout.megatron {}, model = Model(), batch = A.batch, seq = A.seq, steps = 1, optimizer = m.adamw { lr = 1e-3 } }
