-- Halves of one tensor of block 2 go to blocks 3 and 4, so that their gradients come back from one
-- stage after the other; each is a product's operand besides. Prints what was learned, which is to
-- be the same in any schedule (tests/process/pipeline.c).
local m = require "mlua"
local cfg = m.config { seq = 8, batch = 8, steps = 2, accum = 4, schedule = "1f1b" }
local A = m.axes { embed = 16, inner = 8, half = 8, both = 16, vocab = 256, seq = cfg.seq, batch = cfg.batch }

local Block = m.module("Block", function(self)
  self.norm = m.rms_norm { A.embed }
  self.up, self.down = m.param { A.embed, A.both }, m.param { A.both, A.embed }
  self.left, self.right = m.param { A.inner, A.half }, m.param { A.inner, A.half }
  self.back = m.param { A.half, A.embed }
end)

local function half(y, i, name)
  return y:slice("both", 8 * i, 8 * i + 8):rename { both = name }
end

function Block:forward(x, i, crossing)
  local y = m.gelu(self.norm(x):dot(self.up, "embed"))
  if i == 1 then
    crossing.early = { half(y, 0, "inner"), half(m.gelu(y), 1, "inner") }
  elseif i == 2 then
    crossing[3] = half(y, 0, "half") + crossing.early[1]:dot(self.left, "inner")
    crossing[4] = half(y, 1, "half") + crossing.early[2]:dot(self.right, "inner")
    return x
  else
    x = x + m.gelu(crossing[i]):dot(self.back, "half")
  end
  return x + y:dot(self.down, "both")
end

local Net = m.module("Net", function(self)
  self.embedding = m.param { A.vocab, A.embed }
  self.blocks = m.stack(4, Block)
  self.norm = m.rms_norm { A.embed }
end)

function Net:forward(tokens)
  local x, crossing = self.embedding:gather(tokens, "vocab"), {}
  for i, block in ipairs(self.blocks) do x = block(x, i, crossing) end
  return self.norm(x):dot(self.embedding, "embed")
end

local model = Net()
m.train {
  model = model, batch = A.batch, seq = A.seq, vocab = 256, steps = cfg.steps, accum = cfg.accum, clip = 1.0,
  optimizer = m.adamw { lr = 0.01 },
  layout = m.layout { mesh = { { "pp", 1 } }, stages = { pp = "blocks", schedule = cfg.schedule } },
}
for _, p in ipairs(m.parameters(model)) do
  local value, sum = p:get(), 0
  for i = 1, #value do sum = sum + value[i] * ((i * 7) % 13 - 6) end
  print(("%s %.9f"):format(p:name(), sum))
end
