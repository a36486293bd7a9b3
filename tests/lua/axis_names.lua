-- A model whose axes have names of its own: rope, attention, cross-entropy, training, generation.
local m = require "mlua"
local core = require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")

-- The losses of three steps of the same model under other names.
local function train(names)
  local A = {}
  for key, size in pairs { embed = 16, heads = 2, head_dim = 8, seq = 12, batch = 4, vocab = 256 } do
    A[key] = m.axis(names[key] or key, size)
  end
  local Net = m.module("Net", function(self)
    -- Under given names, so that both models start alike.
    self.embedding = m.param { A.vocab, A.embed, init = function(axes) return m.normal(axes, 1) * 0.1 end }
    self.wq = m.param { A.embed, A.heads, A.head_dim, init = function(axes) return m.normal(axes, 2) * 0.1 end }
    self.wo = m.param { A.heads, A.head_dim, A.embed, init = function(axes) return m.normal(axes, 3) * 0.1 end }
  end)
  function Net:forward(tokens)
    local x = self.embedding:gather(tokens, A.vocab)
    local q = m.rope(x:dot(self.wq, A.embed), { seq = A.seq.name, head_dim = A.head_dim.name })
    local options = { causal = true, seq = A.seq.name, heads = A.heads.name, head_dim = A.head_dim.name }
    x = x + m.attention(q, q, q, options):dot(self.wo, A.heads, A.head_dim)
    return x:dot(self.embedding, A.embed)
  end
  local net, losses = Net(), {}
  m.train {
    model = net, batch = A.batch, seq = A.seq, steps = 3, log_every = 100, seed = 1,
    loss = function(tokens, targets) return m.cross_entropy(net(tokens), targets, { axis = A.vocab.name }) end,
    on_step = function(step, out) losses[step] = out.loss end,
  }
  local ids = m.generate(net, { prompt = "ab", tokens = 4, seq = A.seq, quiet = true })
  return losses, table.concat(ids, " ")
end

local losses, ids = train {}
local renamed, renamed_ids = train { embed = "width", heads = "h", head_dim = "dh", seq = "time", batch = "b", vocab = "symbols" }
check.all(renamed, losses, 1e-6, "losses under other names")
check.equal(renamed_ids, ids, "text under other names")
check.done()
