-- args: check --device h200 --mesh cp=4 SCRIPT < /dev/null 2>&1 | grep -A1 ^ranks
-- Two patches and the class token are fewer positions than there are ranks: each does all of the work.
local m = require "mlua"
local A = m.axes { batch = 8, patch = 2, seq = 3, embed = 64, ffn = 256, pixels = 48, classes = 16, cls = 1, heads = 4, head_dim = 16 }
local Block = m.module("Block", function(self)
  self.norm = m.layer_norm { A.embed }
  self.q, self.k, self.v = m.param { A.embed, A.heads, A.head_dim }, m.param { A.embed, A.heads, A.head_dim }, m.param { A.embed, A.heads, A.head_dim }
  self.o = m.param { A.heads, A.head_dim, A.embed }
  self.up, self.down = m.param { A.embed, A.ffn }, m.param { A.ffn, A.embed }
end)
function Block:forward(x)
  local h = self.norm(x)
  x = x + m.attention(h:dot(self.q, "embed"), h:dot(self.k, "embed"), h:dot(self.v, "embed")):dot(self.o, "heads", "head_dim")
  return x + m.gelu(x:dot(self.up, "embed")):dot(self.down, "ffn")
end
local ViT = m.module("ViT", function(self)
  self.patch = m.param { A.pixels, A.embed }
  self.cls = m.param { A.embed, init = "zeros" }
  self.blocks = m.stack(2, Block)
  self.head = m.param { A.embed, A.classes }
end)
function ViT:forward(image)
  local x = image:dot(self.patch, "pixels"):rename("patch", "seq")
  x = m.concat({ self.cls:broadcast { A.batch, m.axis("seq", 1), A.embed }, x }, "seq")
  for _, b in ipairs(self.blocks) do x = b(x) end
  return x:mean("seq"):dot(self.head, "embed")
end
local model = ViT()
local layout = m.layout { mesh = { { "dp", 1 }, { "cp", 1 } }, acts = { dp = { "batch" }, cp = { "seq", "patch" } } }
local step = m.compile(function(i)
  local total, count = m.cross_entropy(model(i.image), i.label, { axis = "classes" })
  local loss = total / count
  local ps = m.parameters(model)
  for k, g in ipairs(m.grad(loss, ps)) do ps[k]:assign(ps[k]:read() - 0.1 * g) end
  return { loss = loss }
end, { image = { A.batch, A.patch, A.pixels }, label = { A.batch, dtype = "i32" } }, { layout = layout, name = "step" })
