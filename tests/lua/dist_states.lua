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

-- A sum over microbatches lies with the ranks in parts; get gives the sum, set replaces it.
local sums = core.state { name = "sums", axes = { A.batch }, kind = "gradient", init = core.iota(A.batch):cast "f32" }
local counts = core.state { name = "counts", axes = {}, dtype = "f32", kind = "gradient", init = m.zeros {} }
local add = m.compile(function(feeds)
  local g = core.grad((feeds.x:sum "width" * sums:read()):sum(), { sums })[1]
  sums:assign(core.where(feeds.first, 0, sums:read()) + g)
  counts:assign(core.where(feeds.first, 0, counts:read()) + feeds.x:sum())
end, { x = { A.batch, A.width }, first = { dtype = "bool" } }, { layout = layout })
local rows, all = {}, 0
for b = 1, 8 do
  rows[b] = 0
  for k = 1, 6 do rows[b] = rows[b] + x[(b - 1) * 6 + k] end
  all = all + rows[b]
end
local function expect_sums(start, times, what)
  local now = sums:get()
  for b = 1, 8 do check.equal(now[b], start(b) + times * rows[b], what) end
end
expect_sums(function(b) return b - 1 end, 0, "its first value")
add { x = x, first = false }
expect_sums(function(b) return b - 1 end, 1, "one part")
add { x = x, first = true }
add { x = x, first = false }
expect_sums(function() return 0 end, 2, "two parts")
-- What ranks gather lies in its order also where a movement of their parts costs nothing.
local H, D, S = core.axis("h", 4), core.axis("d", 4), core.axis("s", 2)
local merged = m.compile(function(feeds)
  local z = feeds.z + 1
  return { parts = z:on { dp = { "h" }, tp = { "h" } }:merge("h", "s", "hs") }
end, { z = { H, D, S } }, { layout = layout })
local z = fill(core.host("f32", 4, 4, 2), 32, function(i) return i end)
local parts = merged { z = z }.parts
for h = 0, 3 do
  for d = 0, 3 do
    for s = 0, 1 do check.equal(parts[(h * 2 + s) * 4 + d + 1], h * 8 + d * 2 + s + 2, "merged parts") end
  end
end

check.equal(counts:get()[1], 2 * all, "a sum without axes")
sums:set(fill(core.host("f32", 8), 8, function(b) return 10 * b end))
add { x = x, first = false }
expect_sums(function(b) return 10 * b end, 1, "one part more than what was set")
check.done()
