-- args: run --device cpu -n 2
-- Mixtures of experts on two ranks, each with half of them and of the sequences: what moe.lua
-- checks for that. Values, gradients, the router's losses, loads and drops are those of one rank.
local m, core = require "mlua", require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
m.use_layout(m.layout {
  mesh = { { "ep", 2 } }, params = { ep = { "experts" } }, acts = { ep = { "batch", "experts" } }, exchange = 2,
})
assert(loadfile(root .. "tests/lua/moe.lua"))(2)
