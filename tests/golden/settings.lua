-- args: run --device cpu SCRIPT preset=small rate=2 verbose=true name=x=y depth=-3
local m = require "mlua"
local cfg = m.config {
  width = 8, depth = 2, rate = 0.5, decay = 1.5, verbose = false, name = "", shape = { 1 },
  presets = { small = { width = 4, depth = 1, decay = 3 } },
}
for key, value in pairs(cfg) do print(key, math.type(value) or type(value), type(value) == "table" and "" or value) end
m.config { depth = 2, presets = { small = { depth = 1 }, tiny = { dept = 1 } } }
