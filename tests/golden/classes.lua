-- args: check --device cpu
-- Classes where instances are meant, and functions that return nothing.
local m = require "mlua"
local A = m.axes { embed = 8, vocab = 16, seq = 8, batch = 2 }
local tokens = m.input("tokens", { A.batch, A.seq }, "i32")
local function try(fn)
  local _, message = pcall(fn)
  print(message)
end
local Block = m.module("Block", function(self) self.w = m.param { A.embed } end)
function Block:forward(x) return x * self.w end
local function net(build, forward)
  local Net = m.module("Net", function(self)
    self.wte = m.param { A.vocab, A.embed }
    build(self)
  end)
  function Net:forward(ids)
    local x = self.wte:gather(ids, "vocab")
    return forward(self, x)
  end
  return Net
end

-- In the tree.
try(net(function(self) self.block = Block end))
try(net(function(self) self.blocks = { Block(), Block } end))
try(net(function(self) self.blocks = m.stack(2, function() return Block end) end))
try(function() m.parameters(net(function(self) self.blocks, self.options = {}, { block = Block } self.blocks[1] = Block end)()) end)
-- Called.
local Parts = net(function(self) self.parts = { block = Block } end, function(self, x) return self.parts.block(x) end)
try(function() Parts()(tokens) end)
try(function() m.compile(function(feeds) return Parts(feeds.tokens) end, { tokens = { A.batch, A.seq, dtype = "i32" } }) end)
try(function() m.compile(Parts(), { tokens = { A.batch, A.seq, dtype = "i32" } }) end)
-- Handed over.
try(function() m.train { model = Parts, batch = A.batch, seq = A.seq } end)
try(function() m.generate(Parts, { seq = A.seq }) end)
try(function() m.parameters(Parts) end)
try(function() m.parameters(nil) end)

-- What returns nothing: a block, a submodule, a model, and what a norm is given then.
local Silent = m.module("Silent", function(self) self.w = m.param { A.embed } end)
function Silent:forward(x)
  x = x * self.w
end
local function add(x) x = x + 1 end
try(function()
  net(function(self) self.blocks = m.stack(2, Silent) end, function(self, x)
    for _, block in ipairs(self.blocks) do x = block(x) end
    return x
  end)()(tokens)
end)
try(function() net(function(self) self.inner = Silent() end, function(self, x) return x + self.inner(x) end)()(tokens) end)
local Model = net(function() end, function(_, x) x = x + 1 end)
try(function() m.train { model = Model(), batch = A.batch, seq = A.seq } end)
try(function() net(function(self) self.norm = m.rms_norm { A.embed } end, function(self, x) return self.norm(add(x)) end)()(tokens) end)
try(function() net(function(self) self.norm = m.layer_norm { A.embed } end, function(self) return self.norm(self.zzz) end)()(tokens) end)
try(function() net(function(self) self.moe = m.moe { A.embed, experts = A.seq, ffn = A.batch } end, function(self) return self.moe(self.zzz) end)()(tokens) end)
try(function() m.train { model = Parts(), loss = function() end, batch = A.batch, seq = A.seq } end)

-- Axes that are asked for.
local x = m.input("x", { A.batch, A.seq, A.vocab })
try(function() return x:softmax() end)
try(function() return m.log_softmax(x) end)
try(function() return m.logsumexp(x) end)
try(function() return m.rms_norm {} end)
try(function() return m.layer_norm { bias = false } end)
try(function() return m.layer_norm { "embed" } end)
