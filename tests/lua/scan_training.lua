-- args: run --device cpu -n 4
-- A recurrent model in m.train, by m.scan and written out, over dp=2, tp=2 and with accumulation: the same losses.
local m, core = require "mlua", require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")
local A = m.axes { seq = 5, batch = 4, embed = 8, hidden = 6, out = 6, gates = 3, vocab = 16 }
local layout = m.layout {
  mesh = { { "dp", 2 }, { "tp", 2 } }, params = { tp = { "hidden", "vocab" } }, acts = { dp = { "batch" }, tp = { "hidden", "vocab" } },
  state = { dp = "flat" },
}
local function model(run)
  local Lstm = m.module("Lstm", function(self)
    self.table = m.param { A.vocab, A.embed, init = 0.5 }
    self.wx, self.wh = m.param { A.embed, A.hidden, A.gates, init = 0.5 }, m.param { A.hidden, A.out, A.gates, init = 0.5 }
    self.b, self.up = m.param { A.hidden, A.gates }, m.param { A.hidden, A.vocab, init = 0.5 }
  end)
  local function at(x, axis, i) return x:slice(axis, i, i + 1):sum(axis) end
  function Lstm:forward(tokens)
    local x = self.table:gather(tokens, "vocab")
    local function step(s, t)
      local z = t.x:dot(self.wx, "embed") + s.h:dot(self.wh, "hidden"):rename("out", "hidden") + self.b
      local c = s.c * m.sigmoid(at(z, "gates", 0)) + m.sigmoid(at(z, "gates", 1)) * m.tanh(at(z, "gates", 2))
      return { h = m.tanh(c), c = c }, m.tanh(c)
    end
    return run(step, x, at):dot(self.up, "hidden")
  end
  return Lstm()
end
local function losses(net)
  local list = {}
  m.train {
    model = net, batch = A.batch, seq = A.seq, steps = 3, accum = 2, optimizer = m.sgd { lr = 0.1 }, layout = layout,
    inputs = { tokens = { A.batch, A.seq, dtype = "i32" }, targets = { A.batch, A.seq, dtype = "i32" } },
    sample = function(_, random)
      local t, u = {}, {}
      for k = 1, A.seq.size do t[k] = random:integer(0, 15); u[k] = (t[k] + 3) % 16 end
      return { tokens = t, targets = u }
    end,
    on_step = function(_, out) list[#list + 1] = out.loss end,
  }
  return list
end
local by_scan = model(function(step, x)
  local zeros = m.zeros { A.batch, A.hidden }
  return (m.scan(step, { axis = "seq", state = { h = zeros, c = zeros }, inputs = { x = x } }))
end)
local by_hand = model(function(step, x, at)
  local batch = core.axis("batch", x:size "batch")
  local zeros, ys = m.zeros { batch, A.hidden }, {}
  local s = { h = zeros, c = zeros }
  for k = 0, A.seq.size - 1 do
    local y
    s, y = step(s, { x = at(x, "seq", k) })
    ys[k + 1] = y:broadcast { core.axis("seq", 1), batch, A.hidden }
  end
  return m.concat(ys, "seq")
end)
m.use_layout(layout)
local first, second = m.parameters(by_scan), m.parameters(by_hand)
for i, p in ipairs(first) do second[i]:set(p:get()) end
local scanned, written = losses(by_scan), losses(by_hand)
check.equal(#scanned, 3, "steps")
check.all(scanned, written, 1e-5, "losses")
check.done()
