-- args: check --device h200 --memory 6.22GiB SCRIPT </dev/null 2>&1 | sed -n -e "/^peak memory/p" -e "/^host memory/p"
-- Values of the first layer wait for the backward pass in host memory.
local m = require "mlua"
local A = m.axes { embed = 1024, ffn = 4096, vocab = 512, batch = 64, seq = 512 }
local Block = m.module("Block", function(self)
  self.norm = m.rms_norm { A.embed }
  self.up, self.down = m.param { A.embed, A.ffn }, m.param { A.ffn, A.embed }
end)
function Block:forward(x) return x + m.gelu(self.norm(x):dot(self.up, "embed")):dot(self.down, "ffn") end
local Model = m.module("Model", function(self) self.wte, self.blocks = m.param { A.vocab, A.embed }, m.stack(8, Block) end)
function Model:forward(tokens)
  local x = self.wte:gather(tokens, "vocab")
  for _, block in ipairs(self.blocks) do x = block(x) end
  return x:dot(self.wte, "embed")
end
m.train { model = Model(), batch = A.batch, seq = A.seq, steps = 1, optimizer = m.adamw { lr = 1e-3 } }
