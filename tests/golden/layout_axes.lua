-- Axes that a forward function makes or renames are known to the layout, however much they look like others.
local m = require "mlua"
local A = m.axes { batch = 4, embed = 8, ffn = 8, group = 2 }
local w = m.param { A.embed, A.ffn, name = "w", init = "ones" }
local layout = m.layout { mesh = { { "tp", 1 } }, acts = { tp = { "groups", "embeds" } } }
local program = m.compile(function(i)
  local h = i.x:dot(w, "embed"):split("ffn", m.axis("groups", 4), m.axis("inner", 2))
  return h:sum() + i.x:rename("embed", "embeds"):sum()
end, { x = { A.batch, A.embed } }, { layout = layout })
print(program { x = 1 })
