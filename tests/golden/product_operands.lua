-- args: run --device cpu --dtype bf16
-- Operands that a product would round are shown as the script has them.
local m = require "mlua"
local A = m.axes { batch = 4, embed = 8, ffn = 16 }
local w = m.param { m.axis("embed", 12), A.ffn, name = "w" }
local function try(fn, inputs)
  print(select(2, pcall(m.compile, fn, inputs)))
end
try(function(i)
  local shifted = i.x - 0.5
  return shifted:dot(w, "embed")
end, { x = { A.batch, A.embed } })
try(function(i) return m.attention(i.q, i.k, i.k) end, {
  q = { A.batch, m.axis("seq", 2), m.axis("heads", 2), m.axis("head_dim", 4) },
  k = { A.batch, m.axis("seq", 2), m.axis("heads", 2), m.axis("head_dim", 8) },
})
