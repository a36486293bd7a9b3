-- args: run --device cpu -n 3 --mesh dp=3
-- One flipped bit in one rank's copy of a state: core.replica_check names the rank and the state.
local m, core = require "mlua", require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")
local A = m.axes { batch = 6, width = 50 }
m.use_layout(m.layout { mesh = { { "dp", 1 } }, acts = { dp = { "batch" } }, state = { dp = "flat" } }, "the script")
local w = core.state { name = "w", axes = { A.batch, A.width }, kind = "parameter", init = m.iota(A.width):cast "f32" + m.zeros { A.batch, A.width } }
local moment = core.state { name = "w.m", axes = { A.batch, A.width }, kind = "optimizer", init = m.zeros { A.batch, A.width } }
local count = core.state { name = "count", axes = {}, dtype = "i64", kind = "other", init = 3 }
local whole = w:get()
moment:get() -- makes them
count:get()
check.equal(core.replica_check(1), nil, "equal replicas")

local held = whole[77]
if core.options().rank == 1 then whole[77] = held + held * 2 ^ -23 end -- the lowest bit
w:set(whole)
check.equal(core.replica_check(2), 'rank 1 (state "w")', "a flipped bit")
whole[77] = held
w:set(whole)
check.equal(core.replica_check(3), nil, "mended")

moment:set(m.host("f32", 6, 50):fill(core.options().rank)) -- each rank holds a part of its own
check.equal(core.replica_check(4), nil, "parts without replicas")
count:set(core.options().rank == 2 and 4 or 3)
check.equal(core.replica_check(5), 'rank 2 (state "count")', "a number")
check.done()
