local m = require "mlua"
local model = {}

local function forward(x)
  return x:dot(model.block.wq, "embed")
end

forward(m.input("x", { m.axis("embed", 8) }))
