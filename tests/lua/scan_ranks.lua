-- args: run --device cpu -n 4
-- scan.lua's comparisons where the batch and the hidden axis (of 5) are cut over ranks: collectives in the step.
local m, core = require "mlua", require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local layout = m.layout { mesh = { { "dp", 2 }, { "tp", 2 } }, acts = { dp = { "batch" }, tp = { "h" } } }
loadfile(root .. "tests/lua/scan.lua")(layout)
