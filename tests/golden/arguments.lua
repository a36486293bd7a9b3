-- Arguments of the wrong kind, and options that would have no effect.
local m = require "mlua"
local A = m.axes { batch = 2, seq = 8, heads = 2, head_dim = 4, embed = 8, vocab = 16 }
local q = m.input("q", { A.batch, A.seq, A.heads, A.head_dim })
local logits = m.input("logits", { A.batch, A.seq, A.vocab })
local function try(fn, ...)
  local _, message = pcall(fn, ...)
  print(message)
end

try(function() m.param(A.embed) end)
try(function() m.rms_norm(A.embed) end)
try(function() m.param { A.embed, init = m.init.xavier } end)
try(function() m.adamw { 1e-3 } end)
try(function() m.adamw { lr = "1e-3" } end)
try(function() m.constant { final = 0.1 } end)
try(function() m.cosine { warmup = -1 } end)
try(function() m.dropout(q, 1.5) end)
try(function() m.attention(q, q, q, { causal = true, window = 0 }) end)
try(function() m.cross_entropy(logits, m.zeros { A.batch, A.seq }) end)
try(function() m.cross_entropy(logits, m.zeros({ A.batch, A.heads }, "i32")) end)
try(function() m.compile(function(feeds) return feeds.token end, { tokens = { A.seq, dtype = "i32" } }) end)
try(function() m.train { model = m.rms_norm { A.embed }, batch = 32, seq = A.seq } end)
try(function() m.generate(m.rms_norm { A.embed }, { prompt = "a" }) end)

local model = m.rms_norm { A.embed }
local function train(o)
  o.model, o.batch, o.seq = o.model or model, o.batch or A.batch, A.seq
  m.train(o)
end
try(train, { model = m.module("Net", function() end) })
try(train, { optimizer = 1e-3 })
try(train, { schedule = 0.5 })
try(train, { accum = 0 })
try(train, { eval_share = 1 })
try(train, { model = m.module("Net", function() end)(), loss = function() return m.zeros {} end })
try(train, { model = m.module("Net", function() end)() })
try(function() m.train(model) end)
try(function() m.zeros { A.seq, m.axis("seq", 5) } end)
try(function() m.one_hot(m.zeros { A.seq }, A.vocab) end)
local k = m.input("k", { A.batch, A.seq, m.axis("kv_heads", 3), A.head_dim })
try(function() m.attention(q, k, k) end)
local Short = m.module("Short", function(self) self.w = m.param { A.vocab, A.embed } end)
function Short:forward(tokens) return self.w:gather(tokens, "vocab"):dot(self.w, "embed") end
try(train, { model = Short(), steps = 1, data = "tests/golden/nil_index.lua" })
function Short:forward(tokens) return self.w:gather(tokens, "vocab") end
try(train, { model = Short(), steps = 1 })
function Short:forward(tokens) return self.w:gather(tokens, "vocab"):dot(self.w, "embed") end
try(train, { model = Short(), steps = 1, optimizer = m.adamw })
try(train, { model = Short(), steps = 1, optimizer = m.optimizer("mine", { lr = 0.1 }, function(p, g, o) return p - o.lr * g end) {} })
try(train, { model = Short(), steps = 1, optimizer = m.optimizer("mine", { lr = 0.1 }, function() end) {} })
try(function() return q:get() end)
try(function() return q.shape end)
try(function() m.uniform(A.embed) end)
try(function() m.compile(function(feeds) return feeds.x, feeds.x:max() end, { x = { A.seq } }) end)
function Short:forward(tokens) self.w = self.w:gather(tokens, "vocab") end
try(train, { model = Short(), steps = 1 })
try(function() m.softmax(m.iota(A.seq), "seq") end)
try(function() m.train(Short) end)
