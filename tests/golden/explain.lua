-- args: check --device h200 --mesh dp=2 --explain SCRIPT </dev/null 2>&1 | sed -E -e 's/[[:space:]]+[0-9]+[.][0-9]+[[:space:]]ms/_ms/' -e /^device/Q
local m = require "mlua"
local A = m.axes { embed = 256, ffn = 1024, vocab = 512, batch = 8, seq = 128 }
local Model = m.module("Model", function(self)
  self.wte = m.param { A.vocab, A.embed }
  self.norm = m.rms_norm { A.embed }
  self.up, self.down = m.param { A.embed, A.ffn }, m.param { A.ffn, A.embed }
end)
function Model:forward(tokens)
  local x = self.wte:gather(tokens, "vocab")
  x = x + m.gelu(self.norm(x):dot(self.up, "embed")):dot(self.down, "ffn")
  return x:dot(self.wte, "embed")
end
m.train { model = Model(), batch = A.batch, seq = A.seq, steps = 1, optimizer = m.adamw { lr = 1e-3 },
          layout = m.layout.megatron {} }
