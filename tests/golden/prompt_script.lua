-- args: repl --device cpu SCRIPT heads=4 < tests/golden/prompt_script.in
-- The script of the prompt trains nothing; its variables are known afterwards, with their last values.
local m = require "mlua"
local cfg = m.config { embed = 16, heads = 2, steps = 1000000 }
local A = m.axes { batch = 2, seq = 4, embed = cfg.embed, heads = cfg.heads, head_dim = cfg.embed // cfg.heads, vocab = 256 }
local type, shadowed, nothing = "a script's own name", 1, nil

-- Adds what heads see.
local Block = m.module("Block", function(self)
  self.wq = m.param { A.embed, A.heads, A.head_dim }
  self.wo = m.param { A.heads, A.head_dim, A.embed, init = 0.5 }
end)
function Block:forward(x)
  return x + x:dot(self.wq, "embed"):dot(self.wo, "heads", "head_dim")
end

local Net = m.module("Net", function(self)
  self.wte, self.block = m.param { A.vocab, A.embed }, Block()
end)
function Net:forward(tokens) return self.block(self.wte:gather(tokens, "vocab")):dot(self.wte, "embed") end

local model = Net()
local result = m.train { model = model, batch = A.batch, seq = A.seq, steps = cfg.steps }
m.generate(model, { prompt = "nothing is written", seq = A.seq })
local double = m.compile(function(i) return { y = i.x * 2 } end, { x = { A.heads } })
local shadowed = 2
count = 0
repeat
  local out = double { x = { 1, 2, 3, 4 } }
  print("not shown", out.y[1])
  count = count + 1
  shadowed = 3
until out.y[1] == 2
local after = "never reached"
