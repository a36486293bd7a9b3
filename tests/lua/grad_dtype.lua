-- m.train{grad_dtype = "bf16"}: what the optimizer gets is the gradient, rounded; of each microbatch, whose sums are not rounded.
local m = require "mlua"
local core = require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")

local A = m.axes { batch = 4, row = 3, col = 5 }
local count = 0
-- The weights after a step of the rate 1 from 0: the gradient, negated.
local function step(grad_dtype, accum)
  count = count + 1
  local Net = m.module("Net" .. count, function(self) self.w = m.param { A.row, A.col, init = function(axes) return m.uniform(axes, 1) * 0 end } end)
  function Net:forward(x) return x:dot(self.w, "row") end
  local net = Net()
  m.train {
    model = net, batch = A.batch, steps = 1, accum = accum, clip = 0, grad_dtype = grad_dtype, optimizer = m.sgd { lr = 1 }, log_every = 100,
    eval_every = 0, inputs = { x = { A.batch, A.row }, c = { A.batch, A.col } },
    sample = function(index)
      local x, c = {}, {}
      for i = 1, 3 do x[i] = math.sin(7 * index + i) end
      for i = 1, 5 do c[i] = math.cos(5 * index + i) end
      return { x = x, c = c }
    end,
    loss = function(i) return (net(i.x):cast "f32" * i.c):sum(), 1 end,
  }
  return net.w:get():table()
end

local function bf16(x) -- ties, which these numbers have none of, away from 0
  local _, exponent = math.frexp(x)
  local unit = 2.0 ^ (exponent - 8)
  return x < 0 and -math.floor(-x / unit + 0.5) * unit or math.floor(x / unit + 0.5) * unit
end
local exact, rounded = step("f32"), step("bf16")
local off = 0
for i = 1, 15 do
  check.equal(rounded[i], bf16(exact[i]), "element " .. i)
  off = math.max(off, math.abs(exact[i] - rounded[i]))
end
check.equal(off > 0, true, "rounding changes something")
local sums, once, parts = step("bf16", 4), step("f32", 4), 0
for i = 1, 15 do
  check.near(sums[i], once[i], 4 * 2.0 ^ -8, "a sum of four rounded gradients")
  parts = parts + (sums[i] ~= bf16(sums[i]) and 1 or 0)
end
check.equal(parts > 0, true, "the sum of microbatches is not rounded")
check.done()
