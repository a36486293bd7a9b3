-- args: run --device cpu -n 4
-- Programs and states on four ranks: inputs are cut, outputs and states whole on every rank.
local m, core = require "mlua", require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")
local A = m.axes { batch = 8, heads = 4, width = 6 }
local layout = m.layout {
  mesh = { { "dp", 2 }, { "tp", 2 } },
  params = { dp = { "width" }, tp = { "heads" } },
  acts = { dp = { "batch" }, tp = { "heads", "width" } },
}
local function fill(host, count, f)
  for i = 1, count do host[i] = f(i) end
  return host
end
local w = core.state { name = "w", axes = { A.heads, A.width }, kind = "parameter", init = core.iota(A.width):cast("f32") + m.zeros { A.heads, A.width } }
local program = m.compile(function(feeds)
  local y = feeds.x:dot(w:read(), "width")
  w:assign(w:read() + feeds.x:sum "batch" * feeds.rate)
  return { y = y, total = y:sum(), most = y:max "batch", rows = feeds.x:sum "width", pick = w:read():sum "heads" }
end, { x = { A.batch, A.width }, rate = {} }, { layout = layout })

local x = fill(core.host("f32", 8, 6), 48, function(i) return (i * 7) % 11 - 5 end)
local held = {}
for i = 1, 24 do held[i] = (i - 1) % 6 end
local function expect(rate)
  local out = program { x = x, rate = rate }
  local total = 0
  for b = 1, 8 do
    local row = 0
    for k = 1, 6 do row = row + x[(b - 1) * 6 + k] end
    check.equal(out.rows[b], row, "a row's sum")
    for h = 1, 4 do
      local y = 0
      for k = 1, 6 do y = y + x[(b - 1) * 6 + k] * held[(h - 1) * 6 + k] end
      check.equal(out.y[(b - 1) * 4 + h], y, "a product")
      total = total + y
    end
  end
  check.equal(out.total, total, "the sum of all")
  for h = 1, 4 do
    local most = -math.huge
    for b = 1, 8 do most = math.max(most, out.y[(b - 1) * 4 + h]) end
    check.equal(out.most[h], most, "the largest")
  end
  for h = 1, 4 do
    for k = 1, 6 do
      local sum = 0
      for b = 1, 8 do sum = sum + x[(b - 1) * 6 + k] end
      held[(h - 1) * 6 + k] = held[(h - 1) * 6 + k] + sum * rate
    end
  end
  local now = w:get()
  for i = 1, 24 do check.equal(now[i], held[i], "the state") end
end
expect(1)
expect(2)
w:set(fill(core.host("f32", 4, 6), 24, function(i) return i % 5 end))
for i = 1, 24 do held[i] = i % 5 end
expect(1)
check.done()
