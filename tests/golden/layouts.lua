-- args: check --device cpu
local m = require "mlua"
local A = m.axes { batch = 6, embed = 8, width = 16 }
local function try(...)
  local ok, message = pcall(...)
  print(ok or message)
end
print(m.layout { mesh = { { "dp", 2 }, { "tp", 4 } }, acts = { dp = { "batch" } } })
print(m.layout.megatron { dp = 2, sp = true })
try(m.layout, { mesh = {} })
try(m.layout, { mesh = { { "dp", 0 } } })
try(m.layout, { mesh = { { "dp", 2 }, { "dp", 2 } } })
try(m.layout, { mesh = { { "dp", 2 } }, param = {} })
try(m.layout, { mesh = { { "dp", 2 } }, params = { db = { "embed" } } })
try(m.layout, { mesh = { { "dp", 2 } }, acts = { dp = "batch" } })
try(m.layout, { mesh = { { "dp", 2 } }, acts = { dp = { A.batch } } })
try(m.layout, { mesh = { { "dp", 2 } }, state = { dp = "flat", tp = "flat" } })
try(m.layout, { mesh = { { "dp", 2 } }, state = { dp = "round" } })
try(m.layout, { mesh = { { "pp", 2 } }, stages = { pp = "layers", schedule = "1f2b" } })
try(m.layout, { mesh = { { "pp", 2 } }, stages = { pp = "layers", schedule = "1f1b", microbatches = 4 } })
try(m.layout.megatron, { context = "star" })
try(m.layout.fsdp, { zer = true })
try(m.layout.ddp, { tp = 2 })
try(function() return m.layout.fdsp {} end)
local function compile(layout)
  return m.compile(function(feeds) return feeds.x * 2 end, { x = { A.batch, A.width } }, { layout = layout })
end
try(compile, { dp = 2 })
try(compile, m.layout { mesh = { { "dp", 2 } }, acts = { dp = { "widht" } } })
