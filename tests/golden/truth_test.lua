local m = require "mlua"
local x = m.input("x", { m.axis("seq", 8) })

local function clip(x, limit)
  if m.gt(x, limit) then return limit end
  return x
end

clip(x, 1.0)
