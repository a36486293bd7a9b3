-- What a first script gets wrong around models, training, own loops and host arrays.
local m = require "mlua"
local cfg = m.config { embed = 16, seq = 8, batch = 4, vocab = 256 }
local A = m.axes { embed = cfg.embed, ffn = 4 * cfg.embed, vocab = cfg.vocab, seq = cfg.seq, batch = cfg.batch, heads = 2 }
local Net = m.module("Net", function(self) self.wte, self.norm = m.param { A.vocab, A.embed }, m.rms_norm { A.embed } end)
function Net:forward(tokens)
  return self.norm(self.wte:gather(tokens, "vocab")):dot(self.wte, "embed")
end
local model = Net()
local tokens, x = m.input("tokens", { A.batch, A.seq }, "i32"), m.input("x", { A.batch, A.ffn })
local function try(fn) print((tostring(select(2, pcall(fn))):gsub("\n *%d+ | [^\n]*", "", 1))) end
local function train(o)
  o.model, o.batch, o.seq, o.steps = o.model or model, o.batch or A.batch, o.seq or A.seq, o.steps or 2
  try(function() return m.train(o) end)
end

train { batch = A.seq }
train { steps = "10" }
train { schedule = 0.1 }
train { schedule = m.cosine }
train { layout = "fsdp" }
train { layout = m.layout.fsdp }
train { loss = function(logits, targets) return m.cross_entropy(logits, targets) end }
try(function() return model:parameters() end)
try(function() return model:to "cuda" end)
try(function() return model.wte.weight end)
try(function() return model(m.host("i32", 4, 8)) end)
try(function() return model { 1, 2, 3 } end)
try(function() return model.norm(x) end)
try(function() return m.moe { A.embed, experts = m.axis("experts", 4), ffn = A.ffn }(x) end)
try(function() return m.rope(x) end)
try(function() return m.attention(x, nil, nil) end)
try(function() return m.one_hot(tokens, 256) end)
try(function() return m.clamp(x, 0) end)
try(function() return m.dropout(x) end)
try(function() return m.dropout(nil, 0.1) end)
try(function() return m.quotient(16, 4) end)
try(function() return m.state { A.embed } end)
try(function() return m.corpus():next() end)
try(function() return m.host("i32", A.batch, A.seq) end)
try(function() return m.host("i32", { 4, 8 }) end)
try(function() return x[{ 1, 2 }] end)
try(function() return m.generate { model = model, seq = A.seq } end)
try(function() return m.generate(model, { seq = A.seq, prompt = 5 }) end)
try(function() cfg.embed = "wide" end)
try(function() return cfg.d_model end)
try(function() return A.dim end)
try(function() return m.axes { seq = "long" } end)
try(function() return m.layout { mesh = { dp = 2 } } end)
try(function() return m.layout { mesh = { { "dp", "2" } } } end)
try(function() return m.layout.megatron { sp = 2 } end)
try(function() return m.optimizer(function(p, g) return p - g end) end)
local function step(fn)
  try(function()
    return m.compile(function(i) return fn(model(i.tokens):sum(), m.parameters(model), m.adamw { lr = 1e-3 }) end, {
      tokens = { A.batch, A.seq, dtype = "i32" },
    })
  end)
end
step(function(loss) return m.grad(loss, model)[1] end)
step(function(loss, ps, adam) return adam.update(model, m.grad(loss, ps), { rate = 1, step = 1 }) end)
step(function(loss, ps, adam) return adam.update(ps, { loss }, { rate = 1, step = 1 }) end)
step(function(loss, ps, adam) return adam.update(ps, m.grad(loss, ps)) end)
step(function(loss, ps, adam) return adam.update(ps, m.grad(loss, ps), { lr = 1e-3 }) end)
step(function(loss, ps) ps[1]:set(ps[1] - m.grad(loss, ps)[1]) end)
try(function() return m.add_loss(x, 1) end)
try(function() return m.add_loss(x:sum()) end)
try(function() return m.add_loss(5, 1) end)
try(function() return m.attention(x, x, x, { causal = "yes" }) end)
