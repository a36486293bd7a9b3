-- args: run --device cpu --json SCRIPT > /dev/null
-- A second training of a model says where in the data it goes on; that of another model, and one that is told, say nothing.
local m = require "mlua"
local A = m.axes { vocab = 256, embed = 4, seq = 4, batch = 6 }
local Model = m.module("Model", function(self) self.table = m.param { A.vocab, A.embed } end)
function Model:forward(tokens) return self.table:gather(tokens, "vocab"):dot(self.table, "embed") end
local function train(model, more)
  local options = { model = model, batch = A.batch, seq = A.seq, steps = 3, optimizer = m.sgd { lr = 0 }, log_every = 1000, data = "README.md" }
  for key, value in pairs(more or {}) do options[key] = value end
  local ok, message = pcall(m.train, options)
  if not ok then io.stderr:write((tostring(message):gsub("\n *%d+ | [^\n]*", "")), "\n") end
end
local first, second = Model(), Model()
train(first)
train(second)
io.stderr:write "-- the first again\n"
train(first)
train(first, { batch = m.axis("batch", 2) })
train(first, { skip = 0 })
train(first, { data = "Makefile" })
train(first)
io.stderr:write "-- mistakes\n"
train(first, { skip = -1 })
train(first, { data = 7 })
train(first, { data = m.host("i32", 4) })
