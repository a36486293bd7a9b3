-- A model with nonlinear scans, whose states at all positions are most of a step's memory: with less of it their segments' states are computed
-- again. tests/process/segments.c compares runs in budgets. kind=test_time: each head's matrix learns by a nonlinear rule while it reads, a loop of
-- kernels; kind=lstm: one cooperative kernel of a segment.
local m = require "mlua"
local cfg = m.config {
  kind = "test_time", layers = 1, embed = 64, heads = 2, width = 16, vocab = 256, seq = 96, batch = 4, steps = 4, lr = 1e-2, data = "", sample = 0, seed = 1,
}
local A = m.axes {
  embed = cfg.embed, heads = cfg.heads, k = cfg.width, v = cfg.width, hidden = cfg.embed, out = cfg.embed, gates = 4, vocab = cfg.vocab,
  seq = cfg.seq, batch = cfg.batch,
}

local TestTime = m.module("TestTime", function(self)
  self.wk, self.wv = m.param { A.embed, A.heads, A.k }, m.param { A.embed, A.heads, A.v }
  self.wo = m.param { A.heads, A.v, A.embed }
end)

function TestTime:forward(x)
  local k = m.l2_norm(x:dot(self.wk, "embed"), "k"):cast "f32"
  local v = x:dot(self.wv, "embed"):cast "f32"
  local y = m.scan(function(S, t)
    local missed = m.tanh(S:dot(t.k, "k")) - t.v
    S = S - m.outer(t.k, missed) * 0.5
    return S, S:dot(t.k, "k")
  end, { axis = "seq", state = m.zero_state(x, { A.heads, A.k, A.v }), inputs = { k = k, v = v } })
  return y:cast(x:dtype()):dot(self.wo, "heads", "v")
end

local Lstm = m.module("Lstm", function(self)
  self.wx, self.wh = m.param { A.embed, A.hidden, A.gates }, m.param { A.out, A.hidden, A.gates }
  self.wo = m.param { A.hidden, A.embed }
end)

function Lstm:forward(x)
  local function gate(z, i) return z:slice("gates", i, i + 1):sum "gates" end
  local y = m.scan(function(s, t)
    local z = (t.z + s.h:rename("hidden", "out"):dot(self.wh, "out")):cast "f32"
    local c = s.c * m.sigmoid(gate(z, 0) + 1) + m.sigmoid(gate(z, 1)) * m.tanh(gate(z, 2))
    local h = (m.sigmoid(gate(z, 3)) * m.tanh(c)):cast(x:dtype())
    return { h = h, c = c }, h
  end, {
    axis = "seq", state = { h = m.zero_state(x, { A.hidden }):cast(x:dtype()), c = m.zero_state(x, { A.hidden }) }, inputs = { z = x:dot(self.wx, "embed") },
  })
  return y:dot(self.wo, "hidden")
end

local Model = m.module("Model", function(self)
  self.embedding, self.norm = m.param { A.vocab, A.embed, init = 0.3 }, m.rms_norm { A.embed }
  self.blocks = m.stack(cfg.layers, cfg.kind == "lstm" and Lstm or TestTime)
end)

function Model:forward(tokens)
  local x = self.embedding:gather(tokens, "vocab")
  for _, block in ipairs(self.blocks) do x = x + block(self.norm(x)) end
  return x:dot(self.embedding, "embed")
end

m.train { model = Model(), batch = A.batch, seq = A.seq, vocab = cfg.vocab, steps = cfg.steps, data = cfg.data, optimizer = m.adamw { lr = cfg.lr } }
