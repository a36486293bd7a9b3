-- models/bert.lua reads to both sides: its increment is refused at the line of its attention.
local m = require "mlua"
local core = require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")

local options, axes, A, bert, of_attention = core.options, m.axes, nil, nil, nil
function core.options()
  local o = options()
  for key, value in pairs { batch = "1", seq = "16", embed = "16", ffn = "32", heads = "2" } do table.insert(o.overrides, { key, value }) end
  return o
end
function m.axes(sizes)
  A = axes(sizes)
  return A
end
function m.train(o) bert = o.model end
dofile(root .. "models/bert.lua")
core.options = options

local at = 0
for line in io.lines(root .. "models/bert.lua") do
  at = at + 1
  if line:find("m.attention(", 1, true) then of_attention = at end
end

local whole = core.input("whole", { A.batch, A.seq }, "i32")
local places = m.iota(A.hidden, "i32"):broadcast { A.batch, A.hidden }
local logits = bert(whole, m.zeros({ A.batch, A.seq }, "i32"), places)
local row, new, columns = m.axis("row", 1), m.axis("new", 1), m.axis("columns", 1)
check.raises(("bert.lua:%d: attention without causal = true"):format(of_attention), m.compile, function(f)
  return core.increment(logits, {
    tokens = whole, seq = "seq", kept = core.increment_states(), new = f.tokens, start = f.start, count = f.count, table = f.table, pool = 16, block = 16,
  })
end, { tokens = { row, new, dtype = "i32" }, start = { row, dtype = "i32" }, count = { row, dtype = "i32" }, table = { row, columns, dtype = "i32" } })
check.done()
