-- args: run --device cpu --dtype fp8
-- Products of blocks in 8 bits: forward and both gradients beside their definition, which products they are, and refusals.
local m = require "mlua"
local core = require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")
m.config { fp8_except = "head,*.skipped" }
local T, K, N = 32, 64, 80
local A = m.axes { tokens = T, embed = K, out = N, wide = 100 }

local eight = dofile(root .. "tests/lua/lib/eight.lua")
local bf16, rounded, product, at, turned = eight.bf16, eight.rounded, eight.product, eight.at, eight.turned
local function same(...) eight.same(check, ...) end

local Block = m.module("Block", function(self)
  self.w, self.v = m.param { A.embed, A.out }, m.param { A.embed, A.out }
  self.skipped, self.kept = m.param { A.embed, A.out }, m.param { A.embed, A.out, fp8 = false }
end)
local Net = m.module("Net", function(self) self.blocks, self.head = { Block() }, m.param { A.embed, A.out } end)
function Net:forward(x, y)
  local b = self.blocks[1]
  return x:dot(b.w, "embed"), x:dot(b.v, "embed"), y:dot(b.skipped, "embed"), y:dot(b.kept, "embed"), y:dot(self.head, "embed")
end
local net = Net()
local names = { "w", "v", "skipped", "kept" }
local x, y, c, d = m.host("f32", T, K), m.host("f32", T, K), m.host("f32", T, N), m.host("f32", T, N)
for i = 1, T * K do
  x[i], y[i] = bf16(math.sin(1.7 * i) * 2.0 ^ (i % 7)), bf16(math.cos(0.9 * i))
end
for i = 1, T * N do c[i], d[i] = bf16(math.sin(0.3 * i) * 1e-3), bf16(math.cos(2.1 * i) * 3e-3 * 2.0 ^ -(i % 5)) end

-- Over ranks, where there are several: tokens in halves, results of weights too.
local ranks = core.options().ranks
local layout = ranks > 1 and m.layout {
  mesh = { { "dp", 2 }, { "tp", 2 } }, params = { tp = { "out" } }, acts = { dp = { "tokens" }, tp = { "out" } },
} or nil

local run = m.compile(function(i)
  local a, b, s, k, h = net(i.x, i.y)
  local x_node = i.x
  local total = (a:cast "f32" * i.c):sum() + (b:cast "f32" * i.d):sum() + ((s + k + h):cast "f32" * i.c):sum()
  local block = net.blocks[1]
  local grads = core.grad(total, { block.w, block.v, block.skipped, x_node })
  return { a = a:cast "f32", b = b:cast "f32", s = s:cast "f32", k = k:cast "f32", h = h:cast "f32",
    dw = grads[1], dv = grads[2], dskipped = grads[3], dx = grads[4] }
end, { x = { A.tokens, A.embed }, y = { A.tokens, A.embed }, c = { A.tokens, A.out }, d = { A.tokens, A.out } }, { layout = layout })
local out = run { x = x, y = y, c = c, d = d }
local w, v = net.blocks[1].w:get(), net.blocks[1].v:get()

local x8 = rounded({ x }, "e4m3")
local w8, v8 = rounded({ w, v }, "e4m3") -- of one block, for one operand: one scale; so have the gradients of their results
local c8, d8 = rounded({ c, d }, "e5m2")
-- Hopper adds products of 8 bits with 13 fractional bits of the largest, until the sum is promoted to f32.
local adder = core.options().device:match "^cuda" and 2.0 ^ -13 or nil
same(out.a, "a product", 2.0 ^ -8, product(T, K, N, at(x8, K), at(w8, N), adder))
same(out.b, "a product", 2.0 ^ -8, product(T, K, N, at(x8, K), at(v8, N), adder))
same(out.dw, "a weight's gradient", 0, product(K, T, N, turned(x8, K), at(c8, N), adder))
same(out.dv, "a weight's gradient", 0, product(K, T, N, turned(x8, K), at(d8, N), adder))
local by_w, size_w = product(T, N, K, at(c8, N), turned(w8, N))
local by_v, size_v = product(T, N, K, at(d8, N), turned(v8, N))
for i = 1, T * K do by_w[i], size_w[i] = by_w[i] + by_v[i], size_w[i] + size_v[i] end
same(out.dx, "an operand's gradient", 2.0 ^ -7, by_w, size_w, 2.0 ^ -8)

-- Not in 8 bits: by name, by fp8 = false, outside of blocks.
local function in_bf16(p)
  local values = p:get():table()
  for i, value in ipairs(values) do values[i] = bf16(value) end
  return values
end
for key, p in pairs { s = net.blocks[1].skipped, k = net.blocks[1].kept, h = net.head } do
  same(out[key], "a product in bf16", 2.0 ^ -8, product(T, K, N, at(y, K), at(in_bf16(p), N)))
end
same(out.dskipped, "its gradient", 0, product(K, T, N, turned(y, K), at(c, N)))

-- Zeros have a scale; what is not finite stays so.
for i = 1, T * K do x[i] = 0 end
out = run { x = x, y = y, c = c, d = d }
for i = 1, T * N do check.equal(out.a[i], 0.0, "a product of zeros") end
x[3] = math.huge
out = run { x = x, y = y, c = c, d = d }
check.equal(out.a[1] ~= out.a[1], true, "a product of infinity is not a number")

local Odd = m.module("Odd", function(self) self.blocks = { m.module("In", function(b) b.w = m.param { A.embed, A.wide } end)() } end)
function Odd:forward(x_node) return x_node:dot(self.blocks[1].w, "embed") end
local odd = Odd()
check.raises("--dtype fp8 needs sizes that 16 divides, and this product with Odd2.blocks.1.w has a result of 100", function()
  m.compile(function(i) return odd(i.x) end, { x = { A.tokens, A.embed } })
end)
check.done()
