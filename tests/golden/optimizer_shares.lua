-- Shares of averages that are none.
local m = require "mlua"
local A = m.axes { embed = 8 }
local function try(fn, ...)
  local _, message = pcall(fn, ...)
  print(message)
end
try(function() m.adamw { beta2 = 1 } end)
try(function() m.lion { beta1 = -0.1 } end)
local w = m.param { A.embed, name = "w" }
local optimizer = m.muon { groups = function() return { beta1 = 1.5 } end }
try(function() m.compile(function() optimizer.update({ w }, { w:read() }, { rate = m.zeros {}, step = m.ones {} }) end) end)
