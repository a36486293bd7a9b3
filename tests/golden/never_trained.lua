-- args: check --device cpu SCRIPT < /dev/null 2>&1 | sed '/^device/,$d'
-- Parameters that no training changes.
local m = require "mlua"
require("mlua.core").report = function() end -- it shows times
local A = m.axes { embed = 8, vocab = 16, seq = 8, batch = 2 }
local function train(forward, o)
  local Net = m.module("Net", function(self) self.wte, self.norm = m.param { A.vocab, A.embed }, m.rms_norm { A.embed } end)
  Net.forward = forward
  o = o or {}
  o.model, o.batch, o.seq = Net(), A.batch, A.seq
  local ok, message = pcall(m.train, o)
  print(ok and "trained" or message)
  return o.model
end
local function embed(self, tokens) return self.wte:gather(tokens, "vocab") end
local function logits(self, x) return self.norm(x):dot(self.wte, "embed") end

-- Made in forward.
train(function(self, tokens)
  local x = m.rms_norm { A.embed }(embed(self, tokens))
  return logits(self, x)
end)
train(function(self, tokens)
  self.w = m.param { A.embed }
  return logits(self, embed(self, tokens) + self.w)
end)
train(function(self, tokens)
  self.gain = self.gain or m.rms_norm { A.embed } -- kept by a field
  return logits(self, self.gain(embed(self, tokens)))
end)

-- Outside of the model's tree.
local bias = m.param { A.embed, name = "bias" }
train(function(self, tokens) return logits(self, embed(self, tokens) + bias) end)
train(function(self, tokens) return logits(self, (embed(self, tokens) + bias):detach()) end)
local Outer = m.module("Outer", function(self) self.scale = m.param { A.embed, init = "ones" } end)
function Outer:forward(x) return x * self.scale end
local outer = Outer()
train(function(self, tokens) return logits(self, outer(embed(self, tokens))) end)
m.freeze(outer)
train(function(self, tokens) return logits(self, outer(embed(self, tokens))) end)
m.freeze(outer, false)

-- In a loss of one's own other models may be meant.
local judged
local function loss(tokens, targets)
  local total, count = m.cross_entropy(judged(tokens), targets)
  return total + outer(m.ones { A.embed }):sum(), count
end
local Judged = m.module("Judged", function(self) self.w = m.param { A.vocab, A.embed } end)
function Judged:forward(tokens)
  if not self.late then self.late = m.param { A.embed, init = "ones" } end -- while the loss runs for the first time
  return (self.w:gather(tokens, "vocab") * self.late):dot(self.w, "embed")
end
judged = Judged()
m.train { model = judged, batch = A.batch, seq = A.seq, loss = loss }
m.train { model = judged, batch = A.batch, seq = A.seq, loss = loss, accum = 2 }

-- That the loss does not reach.
local unused = train(function(self, tokens)
  self.spare = self.spare or { m.param { A.embed }, m.param { A.embed }, m.rms_norm { A.embed } }
  return logits(self, embed(self, tokens) + 0 * m.sign(self.spare[1]))
end)
train(function(self, tokens) return logits(self, embed(self, tokens)):detach() end)
train(function(self, tokens) return embed(self, tokens):rename("embed", "vocab"):detach() end, {
  loss = function(tokens) return m.ones { A.batch }:sum(), 1 end,
})

-- Loops of one's own.
local function try(fn)
  local ok, message = pcall(fn)
  print(ok and "compiled" or message)
end
local function gradient(fn, model)
  try(function()
    m.compile(function(feeds) return m.grad(fn(feeds.tokens):sum(), m.parameters(model))[1] end, { tokens = { A.batch, dtype = "i32" } })
  end)
end
gradient(function(tokens) return unused.wte:gather(tokens, "vocab") end, unused)
gradient(function(tokens) return unused.wte:gather(tokens, "vocab"):detach() end, unused)
gradient(function(tokens) return outer(unused.wte:gather(tokens, "vocab")) end, unused)
local Maker = m.module("Maker", function(self) self.w = m.param { A.vocab, A.embed } end)
function Maker:forward(tokens)
  return Outer()(self.w:gather(tokens, "vocab"))
end
local maker = Maker()
gradient(maker, maker)

-- What is listed.
print(table.concat(select(2, m.parameters(unused)), " "))
m.freeze(unused.wte)
print(table.concat(select(2, m.parameters(unused)), " "))
print(table.concat(select(2, m.parameters(unused, { frozen = true })), " "))
try(function() m.freeze(Maker) end)
try(function() m.parameters(unused, { frozn = true }) end)

local update = m.adamw {}.update
try(function()
  m.compile(function()
    local parameters = m.parameters(maker)
    parameters[2] = bias
    update(parameters, m.grad(parameters[1]:read():sum(), parameters), { rate = 1, step = 1 })
  end)
end)
