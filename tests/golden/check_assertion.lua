-- args: check --device h200 SCRIPT </dev/null 2>&1 | grep -E "^(device|steps|stopped|tests)"
-- A script that checks values: in a check they are zeros, so it ends there, with the report.
local m = require "mlua"
local f = m.compile(function(i) return { y = i.x:sum() } end, { x = { m.axis("n", 4) } })
assert(not pcall(error, "what the script catches does not end it"))
local y = f { x = { 1, 2, 3, 4 } }.y
assert(y == 10, "the sum is not 10")
