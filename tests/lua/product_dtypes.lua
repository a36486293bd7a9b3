-- args: run --device cpu --dtype bf16
-- Products run in the compute dtype unless the script says f32; all else keeps the dtype that it has.
local m = require "mlua"
local A = m.axes { batch = 4, embed = 8, ffn = 16, seq = 4, heads = 2, head_dim = 4, experts = 2, rows = 4, choices = 8 }
local w = m.param { A.embed, A.ffn, name = "w" }
local buffer = m.buffer { A.embed, name = "mean" }
local norm, layer_norm = m.rms_norm { A.embed }, m.layer_norm { A.embed }

local function is(dtype, tensor, what)
  if tensor:dtype() ~= dtype then error(("%s is %s, not %s"):format(what, tensor:dtype(), dtype), 2) end
end

local function forward(i)
  local x = i.x
  is("f32", x, "the input")
  is("f32", (x - 0.5) * 2, "what is computed of it")
  is("bf16", x:dot(w, "embed"), "a product of an input")
  is("bf16", ((x - 0.5) * m.exp(x)):dot(w, "embed"), "a product of what is computed of an input")
  is("bf16", x:dot(x:rename("batch", "other"), "embed"), "a product of two inputs")
  is("bf16", norm(x):dot(w, "embed"), "a product of a norm")
  is("bf16", layer_norm(x):dot(w, "embed"), "a product of a norm with a bias")
  is("bf16", (x - buffer:read()):dot(w, "embed"), "a product of an input less a state")
  is("bf16", (x + m.normal({ A.batch, A.embed }, 1)):dot(w, "embed"), "a product with noise")
  is("bf16", m.uniform({ A.batch, A.embed }, 2):dot(w, "embed"), "a product of a draw")
  is("bf16", m.one_hot(i.index, A.embed):dot(w, "embed"), "a product of one_hot")
  is("bf16", m.ones { A.embed }:dot(w, "embed"), "a product of ones")
  is("bf16", x:rename("batch", "seq"):slice("seq", 0, 2):dot(w, "embed"), "a product of a part")
  -- what the script says
  is("f32", i.said:dot(w, "embed"), "a product of an input with dtype = f32")
  is("f32", (i.said * 2):dot(w, "embed"), "a product of what is computed of one")
  is("f32", x:cast("f32"):dot(w, "embed"), "a product of a cast")
  is("f32", (x:cast "f32" + 1):dot(w, "embed"), "a product of what is computed of a cast")
  is("f32", w:cast("f32"):dot(x, "embed"), "a product of a cast parameter")
  is("f32", x:dot(w, "embed", { dtype = "f32" }), "a product that is to be f32")
  is("f32", x:dot(w, "embed", { dtype = "f32" }):dot(w, "ffn"), "a product of one that is to be f32")
  is("f32", x:dot(w:read(), "embed"), "a product of what is stored")
  local gradient = m.grad(x:dot(w, "embed"):sum(), { w })[1]
  is("f32", gradient, "a gradient")
  is("f32", gradient:dot(gradient:rename("embed", "other"), "ffn"), "a product of gradients")
  is("f32", gradient:dot(m.normal({ A.ffn, A.choices }, 3), "ffn"), "a product of a gradient and noise")
  is("f64", x:cast("f64"):dot(w, "embed"), "a product in f64")
  -- attention and products by groups
  local q = m.normal({ A.batch, A.seq, A.heads, A.head_dim }, 4)
  is("bf16", m.attention(q, q, q, { causal = true }), "attention of f32 operands")
  is("f32", m.attention(q:cast "f32", q, q, { score = function(s) return s * 2 end }), "attention of a cast operand")
  local rows, bounds = m.normal({ A.batch, A.rows, A.embed }, 5), m.zeros({ A.batch, A.experts }, "i32")
  local experts = m.normal({ A.experts, A.embed, A.ffn }, 6)
  is("bf16", rows:ragged_dot(experts, "embed", bounds, bounds), "a product by groups")
  is("f32", rows:cast("f32"):ragged_dot(experts, "embed", bounds, bounds), "a product by groups of a cast")
  -- operands are rounded, sums of products are not
  local rounded = x:cast("bf16"):dot(w, "embed", { dtype = "f32" })
  return { same = m.abs(x:dot(w, "embed"):cast "f32" - rounded:cast("bf16"):cast "f32"):max(),
    exact = m.abs(x:cast("f32"):dot(w:read(), "embed") - x:dot(w:read(), "embed")):max() }
end

local run = m.compile(forward, { x = { A.batch, A.embed }, said = { A.batch, A.embed, dtype = "f32" }, index = { A.batch, dtype = "i32" } })
local x = m.host("f32", 4, 8)
for i = 1, 32 do x[i] = 1 + i / 1024 end
local out = run { x = x, said = x, index = { 1, 2, 3, 4 } }
assert(out.same == 0, out.same)
assert(out.exact == 0, out.exact)

-- Initial values are the same whatever products run in.
local function product(axes, key)
  local left, right = m.normal({ A.embed, A.seq }, key), m.normal({ A.seq, A.ffn }, key + 1)
  return left:dot(right, "seq"), left, right
end
local p = m.param { A.embed, A.ffn, name = "p", init = function(axes, key) return (product(axes, key)) end }
local key
local probe = m.param { A.embed, name = "probe", init = function(_, k) key = k return m.zeros { A.embed } end }
assert(probe:get()[1] == 0 and key)
local values = p:get()
local wide = m.compile(function()
  local _, left, right = product({}, m.hash "0 parameter p")
  return left:cast("f32"):dot(right:cast "f32", "seq")
end)()
for i = 1, #values do assert(values[i] == wide[i], i) end
