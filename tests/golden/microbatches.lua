-- args: check --device cpu --mesh pp=2,dp=2,ep=1
-- Batches that microbatches, or the ranks that share one, cannot divide: what cut them, and what would do.
local m = require "mlua"
local Layer = m.module("Layer", function(self) self.w = m.param { m.axis("embed", 8), m.axis("inner", 8) } end)
function Layer:forward(x) return x:dot(self.w, "embed"):rename("inner", "embed") end
local Net = m.module("Net", function(self)
  self.wte, self.layers = m.param { m.axis("vocab", 16), m.axis("embed", 8) }, m.stack(2, Layer)
end)
function Net:forward(tokens)
  local x = self.wte:gather(tokens, "vocab")
  for _, layer in ipairs(self.layers) do x = layer(x) end
  return x:dot(self.wte, "embed")
end
local model = Net()
local function try(batch, accum, options)
  options.ep = 1
  local _, message = pcall(m.train, {
    model = model, batch = m.axis("batch", batch), seq = m.axis("seq", 4), accum = accum, layout = m.layout.megatron(options),
  })
  print((tostring(message):gsub("\n *%d+ | [^\n]*", "")))
end
try(12, 1, {})
try(10, 1, {})
try(12, 4, {})
