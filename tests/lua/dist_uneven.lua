-- args: run --device cpu -n 4
-- ZeRO-1 of a state that no part of the ranks divides: 7 elements over 4 ranks, in parts of 2. What the last part is filled up with
-- counts nowhere.
local m, core = require "mlua", require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")
local A = m.axes { batch = 8, width = 3, embed = 7 }
local layout = m.layout { mesh = { { "dp", 4 } }, acts = { dp = { "batch" } }, state = { dp = "flat" } }
local slot = core.state {
  name = "slot", axes = { A.width, A.embed }, kind = "optimizer", init = core.iota(A.embed):cast("f32") + m.zeros { A.width, A.embed },
}
local weight = core.state { name = "weight", axes = { A.width, A.embed }, kind = "parameter", init = m.zeros { A.width, A.embed } }
local step = m.compile(function(feeds)
  local total = (feeds.x:dot(weight:read(), "width") * feeds.y):sum()
  local gradient = core.grad(total, { weight })[1] -- of each rank's rows, to be added up
  local new = slot:read() * 0.5 + gradient
  slot:assign(new)
  return { ones = (new * 0 + 1):sum(), rows = m.exp(new * 0.01):sum "embed", columns = new:sum "width", most = (-new):max "embed" }
end, { x = { A.batch, A.width }, y = { A.batch, A.embed } }, { layout = layout })

local held, x, y = {}, {}, {}
for i = 1, 8 * 3 do x[i] = (i * 5) % 7 - 3 end
for i = 1, 8 * 7 do y[i] = (i * 3) % 11 - 5 end
for i = 1, 21 do held[i] = (i - 1) % 7 end
local function expect()
  local out = step { x = x, y = y }
  local rows, columns, most = {}, {}, {}
  for w = 1, 3 do
    for e = 1, 7 do
      local sum, at = 0, (w - 1) * 7 + e
      for b = 1, 8 do sum = sum + x[(b - 1) * 3 + w] * y[(b - 1) * 7 + e] end
      held[at] = held[at] * 0.5 + sum
      rows[w] = (rows[w] or 0) + math.exp(held[at] * 0.01)
      columns[e] = (columns[e] or 0) + held[at]
      most[w] = math.max(most[w] or -math.huge, -held[at])
    end
  end
  check.equal(out.ones, 21, "how many there are")
  check.all(out.rows, rows, 1e-6, "sums of rows")
  check.all(out.columns, columns, 1e-6, "sums of columns")
  check.all(out.most, most, 1e-6, "the largest")
  check.all(slot:get(), held, 1e-6, "the state")
end
expect()
expect()
local set = core.host("f32", 3, 7)
for i = 1, 21 do
  set[i] = i % 5
  held[i] = i % 5
end
slot:set(set)
check.all(slot:get(), held, 0, "the state as it was set")
expect()
check.done()
