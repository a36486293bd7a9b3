-- args: run --device cpu --dtype fp8
-- Products by groups of rows in 8 bits: rows picked of tokens, gate and up with one scale, a hidden tensor with its own, an expert without
-- rows, and one whose weights are kept; forward and gradients beside their definition. dist_fp8_experts: experts of two ranks.
local m = require "mlua"
local core = require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")
local eight = dofile(root .. "tests/lua/lib/eight.lua")
local bf16, rounded, at = eight.bf16, eight.rounded, eight.at
local function same(...) eight.same(check, ...) end
m.config { fp8_except = "*.kept" }
local T, R, K, N, E = 12, 24, 64, 80, 4
local A = m.axes { tokens = T, rows = R, embed = K, ffn = N, experts = E }
local starts, ends = { 0, 7, 7, 20 }, { 7, 7, 20, 24 }

local Block = m.module("Block", function(self)
  self.up, self.gate = m.param { A.experts, A.embed, A.ffn }, m.param { A.experts, A.embed, A.ffn }
  self.down, self.kept = m.param { A.experts, A.ffn, A.embed }, m.param { A.experts, A.ffn, A.embed }
end)
local Net = m.module("Net", function(self) self.blocks = { Block() } end)
local net = Net()
local b = net.blocks[1]
function Net:forward(x, i)
  local rows = x:gather(i.token, "tokens")
  local function by(y, w, over) return y:ragged_dot(w, over, i.starts, i.ends) end
  local u, g = by(rows, b.up, "embed"), by(rows, b.gate, "embed")
  local h = u * g
  return u, g, h, by(h, b.down, "ffn"), by(h, b.kept, "ffn")
end
local layout = core.options().ranks > 1 and m.layout { mesh = { { "ep", 2 } }, params = { ep = { "experts" } }, acts = { ep = { "experts" } } } or nil

local run = m.compile(function(i)
  local x = i.x
  local u, g, h, y, k = net(x, i)
  local grads = core.grad((y:cast "f32" * i.c):sum(), { b.up, b.gate, b.down, u, g, h, x })
  return { u = u:cast "f32", g = g:cast "f32", h = h:cast "f32", y = y:cast "f32", k = k:cast "f32", dup = grads[1], dgate = grads[2],
    ddown = grads[3], du = grads[4]:cast "f32", dg = grads[5]:cast "f32", dh = grads[6]:cast "f32", dx = grads[7] }
end, { x = { A.tokens, A.embed }, c = { A.rows, A.embed }, token = { A.rows, dtype = "i32" }, starts = { A.experts, dtype = "i32" },
  ends = { A.experts, dtype = "i32" } }, { layout = layout })

local x, c, token = m.host("f32", T, K), m.host("f32", R, K), m.host("i32", R)
for i = 1, T * K do x[i] = bf16(math.sin(1.7 * i) * 2.0 ^ (i % 7)) end
for i = 1, R * K do c[i] = bf16(math.sin(0.3 * i) * 1e-3 * 2.0 ^ -(i % 5)) end
for i = 1, R do token[i] = (5 * i) % T end
local function bounds(values)
  local out = m.host("i32", E)
  for e = 1, E do out[e] = values[e] end
  return out
end
local out = run { x = x, c = c, token = token, starts = bounds(starts), ends = bounds(ends) }

-- Row r times the matrix of its group; `w(e)` gives its element by (depth, column).
local function dot(depth, columns, a, w, share)
  local sum, size = {}, {}
  for e = 1, E do
    local s, z = eight.product(ends[e] - starts[e], depth, columns, function(i, k) return a(starts[e] + i, k) end, w(e - 1), share)
    table.move(s, 1, #s, #sum + 1, sum)
    table.move(z, 1, #z, #size + 1, size)
  end
  return sum, size, share
end
-- The sum over the rows of each group of a(r, i) d(r, j).
local function outer(lines, columns, a, d, share)
  local sum, size = {}, {}
  for e = 1, E do
    local function left(i, k) return a(starts[e] + k, i) end
    local function right(k, j) return d(starts[e] + k, j) end
    local s, z = eight.product(lines, ends[e] - starts[e], columns, left, right, share)
    table.move(s, 1, #s, #sum + 1, sum)
    table.move(z, 1, #z, #size + 1, size)
  end
  return sum, size, share
end
local function natural(values, lines, columns) return function(e) return function(i, j) return values[(e * lines + i) * columns + j + 1] end end end
local function across(values, lines, columns) return function(e) return function(i, j) return values[(e * lines + j) * columns + i + 1] end end end

-- Hopper adds products of 8 bits with 13 fractional bits of the largest, until the sum is promoted to f32.
local adder = core.options().device:match "^cuda" and 2.0 ^ -13 or nil
local x8 = rounded({ x }, "e4m3")
local function rows8(r, k) return x8[token[r + 1] * K + k + 1] end
local up, gate, down = b.up:get():table(), b.gate:get():table(), b.down:get():table()
local up8, gate8 = rounded({ up, gate }, "e4m3")
local down8, h8 = rounded({ down }, "e4m3"), rounded({ out.h:table() }, "e4m3")
same(out.u, "a product", 2.0 ^ -8, dot(K, N, rows8, natural(up8, K, N), adder))
same(out.g, "a product", 2.0 ^ -8, dot(K, N, rows8, natural(gate8, K, N), adder))
same(out.y, "of a hidden tensor", 2.0 ^ -8, dot(N, K, at(h8, N), natural(down8, N, K), adder))
local c8 = rounded({ c }, "e5m2")
same(out.dh, "a hidden tensor's gradient", 2.0 ^ -8, dot(K, N, at(c8, K), across(down8, N, K), adder))
same(out.ddown, "a weight's gradient", 0, outer(N, K, at(h8, N), at(c8, K), adder))
local du8, dg8 = rounded({ out.du:table(), out.dg:table() }, "e5m2")
same(out.dup, "a weight's gradient", 0, outer(K, N, rows8, at(du8, N), adder))
same(out.dgate, "a weight's gradient", 0, outer(K, N, rows8, at(dg8, N), adder))
local du, size_du = dot(N, K, at(du8, N), across(up8, K, N))
local dg, size_dg = dot(N, K, at(dg8, N), across(gate8, K, N))
local dx, size_dx = {}, {}
for i = 1, T * K do dx[i], size_dx[i] = 0, 0 end
for r = 0, R - 1 do -- of two experts each, rounded to bf16 before they are added up
  for k = 1, K do
    local to, from = token[r + 1] * K + k, r * K + k
    dx[to], size_dx[to] = dx[to] + du[from] + dg[from], size_dx[to] + size_du[from] + size_dg[from]
  end
end
same(out.dx, "the tokens' gradient", 2.0 ^ -7, dx, size_dx, 2.0 ^ -8)

local kept = b.kept:get():table()
for i, value in ipairs(kept) do kept[i] = bf16(value) end
same(out.k, "a product in bf16", 2.0 ^ -8, dot(N, K, at(out.h, N), natural(kept, N, K)))
check.done()
