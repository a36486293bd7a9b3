-- Host arrays, states, programs' feeds and results, corpora.
local m = require "mlua"
local core = require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")

-- Host arrays.
for _, dtype in ipairs { "i32", "i64", "f32", "f64", "bf16" } do
  local h = core.host(dtype, 2, 3)
  check.equal(#h, 6, dtype)
  check.equal(h:dtype(), dtype)
  h[1], h[6] = 7, -2
  check.all(h, { 7, 0, 0, 0, 0, -2 }, 0, dtype)
  check.all(h:fill(3):table(), { 3, 3, 3, 3, 3, 3 }, 0, dtype)
  check.all(h:fill { { 1, 2, 3 }, { 4, 5, 6 } }, { 1, 2, 3, 4, 5, 6 }, 0, dtype)
end
local h = core.host("bf16", 3):fill { 1.00390625, 3.3895313892515355e38, 0.1 }
check.equal(h[1], 1.0, "ties to even")
check.equal(h[2], 3.3895313892515355e38, "the largest")
check.near(h[3], 0.1, 4e-3)
check.equal(core.host("bf16", 1):fill { 1.00390625 + 2 ^ -40 }[1], 1.0078125, "a number is rounded once")
local bools = core.host("bool", 2):fill { true, false }
check.equal(bools[1], true)
check.equal(tostring(core.host("i32", 2):fill { 1, 2 }), "host i32[2] {1, 2}")
check.raises("element 5 of a host array of 3", function() return h[5] end)
local sum = 0
for _, value in ipairs(core.host("i32", 2):fill { 1, 2 }) do sum = sum + value end
check.equal(sum, 3, "elements by ipairs")
local matrix, loop = core.host("f32", 2, 3), {}
loop[1] = loop
check.raises("a table inside has 2 elements where 3 are wanted", function() matrix:fill { { 1, 2 }, { 3, 4 } } end)
check.raises("the table has 3 elements where 2 are wanted", function() matrix:fill { { 1, 2 }, { 3, 4 }, { 5, 6 } } end)
check.raises("a table inside has 4 elements where 3 are wanted", function() matrix:fill { { 1, 2, 3, 4 }, { 5, 6 } } end)
check.raises("the table has both tables and number", function() matrix:fill { { 1, 2, 3 }, 4 } end)
check.raises("the table has 1 elements where 2", function() matrix:fill(loop) end)
loop = { 1 }
loop[2] = loop
check.raises("element 2 must be a number, got table", function() matrix:fill(loop) end)
loop = {}
loop[1] = loop
check.raises("to a depth of more than 1", function() core.host("f32", 1):fill(loop) end)
check.raises("element 0 of a host array of 3", function() h[0] = 1 end)
check.raises("which i32 cannot hold", function() core.host("i32", 1)[1] = 2 ^ 40 end)
check.raises("which i32 cannot hold", function() core.host("i32", 1)[1] = 0.5 end)
check.raises("must be a number, got string", function() core.host("f32", 1)[1] = "x" end)
check.raises("takes bf16[3], 3 elements; the table has 2", function() h:fill { 1, 2 } end)
check.raises("takes bf16[3], 3 elements; the table has more", function() h:fill { 1, 2, 3, 4 } end)

-- States.
local a, b = m.axis("a", 2), m.axis("b", 3)
local s = core.state { name = "s", axes = { a, b }, init = 1.5 }
check.all(s:get(), { 1.5, 1.5, 1.5, 1.5, 1.5, 1.5 }, 0, "initial")
s:set(core.host("f32", 2, 3):fill { 1, 2, 3, 4, 5, 6 })
check.all(s:get(), { 1, 2, 3, 4, 5, 6 }, 0, "set")
check.equal(s:name(), "s")
check.equal(s:kind(), "other")
check.equal(s:elements(), 6)
s:set { { 1, 2, 3 }, { 4, 5, 6 } }
check.all(s:get(), { 1, 2, 3, 4, 5, 6 }, 0, "nested")
s:set { 6, 5, 4, 3, 2, 1 }
check.all(s:get(), { 6, 5, 4, 3, 2, 1 }, 0, "flat")
s:set(0.5)
check.all(s:get(), { 0.5, 0.5, 0.5, 0.5, 0.5, 0.5 }, 0, "a number")
local turned = core.host("f64", 3, 2):fill { { 1, 4 }, { 2, 5 }, { 3, 6 } }
s:set(turned, { b, "a" })
check.all(s:get(), { 1, 2, 3, 4, 5, 6 }, 0, "axes in another order")
s:set({ { 1, 2, 3 }, { 4, 5, 7 } }, { "a", "b" })
check.equal(s:get()[6], 7, "axes in the same order")
s:set(core.host("bf16", 1, 2, 1, 3):fill { 1, 2, 3, 4, 5, 6 })
check.all(s:get(), { 1, 2, 3, 4, 5, 6 }, 0, "axes of size 1")
local cube = core.state { name = "cube", axes = { a, b, m.axis("c", 4) } }
local elements = core.host("f32", 4, 2, 3)
for i = 1, 24 do elements[i] = i end
cube:set(elements, { "c", "a", "b" })
for i = 0, 1 do
  for j = 0, 2 do
    for k = 0, 3 do check.equal(cube:get()[i * 12 + j * 4 + k + 1], k * 6 + i * 3 + j + 1, "three axes in another order") end
  end
end
local counter = core.state { name = "counter", axes = {}, dtype = "i32", init = 0 }
local step = m.compile(function(i)
  s:assign(s:read():permute("b", "a") * i.factor)
  counter:assign(counter:read() + 1)
  return { total = s:read():sum(), rows = s:read():sum("b"), count = counter:read() }
end, { factor = {} })
local out = step { factor = 2 }
check.equal(out.total, 21)
check.all(out.rows, { 6, 15 }, 0, "rows")
check.equal(math.type(out.count), "integer")
check.equal(step({ factor = 0.5 }).total, 42)
check.all(s:get(), { 1, 2, 3, 4, 5, 6 }, 0, "after two steps")
check.equal(counter:get()[1], 2)
check.raises("two states cannot both be called \"s\"", core.state, { name = "s" })
check.raises("cannot have axis \"c\"", function() s:assign(m.input("c", { m.axis("c", 2) })) end)
check.raises("s takes f32[a=2, b=3], not a host array f32[5]", function() s:set(core.host("f32", 5)) end)
check.raises("depends on an input", core.state, { axes = { a }, init = m.input("z", { a }) + 1 })
check.raises("has no option \"knd\"", core.state, { knd = 1 })
check.raises("s is assigned outside of a program", s.assign, s, 1)
core.tracing(true)
s:assign(1)
s:assign(2)
core.tracing(false)
check.equal(#core.take_updates(), 1, "the last assignment counts")

-- Gradients.
local p = core.state { name = "p", axes = { b }, kind = "parameter", init = 3 }
local unused = core.state { name = "unused", axes = { a }, kind = "parameter", init = 3 }
local grads = m.compile(function()
  local g = m.grad((p * p):sum(), { p, unused })
  return { p = g[1], unused = g[2] }
end) {}
check.all(grads.p, { 6, 6, 6 }, 1e-6, "gradient")
check.all(grads.unused, { 0, 0 }, 0, "of what does not matter")

-- Feeds.
local double = m.compile(function(i) return { y = 2 * i.x } end, { x = { a, b } })
check.all(double({ x = { { 1, 2, 3 }, { 4, 5, 6 } } }).y, { 2, 4, 6, 8, 10, 12 }, 0, "nested table")
check.all(double({ x = 1 }).y, { 2, 2, 2, 2, 2, 2 }, 0, "number")
check.all(double({ x = core.host("bf16", 2, 3):fill { 1, 2, 3, 4, 5, 6 } }).y, { 2, 4, 6, 8, 10, 12 }, 0, "bf16 for f32")
check.all(double({ x = core.host("f64", 6):fill { 1, 2, 3, 4, 5, 0.1 }:reshape(2, 3) }).y, { 2, 4, 6, 8, 10, 0.2 }, 1e-7, "f64 for f32")
local narrow = m.compile(function(i) return { y = i.x, n = i.n } end, { x = { b, dtype = "bf16" }, n = { a, dtype = "i32" } })
local fed = narrow { x = core.host("f64", 3):fill { 1.00390625 + 2 ^ -40, 0 / 0, 1 / 0 }, n = core.host("i64", 2):fill { -2 ^ 31 | 0, 2 ^ 31 - 1 | 0 } }
check.equal(fed.y[1], 1.0078125, "f64 is rounded to bf16 once")
check.equal(fed.y[2] ~= fed.y[2] and fed.y[3] == 1 / 0, true, "NaN and infinity")
check.all(fed.n, { -2 ^ 31, 2 ^ 31 - 1 }, 0, "i64 for i32")
check.all(core.host("f32", 2):fill(core.host("bf16", 2):fill { 1, 2 }), { 1, 2 }, 0, "filled from another")
check.raises("needs the input \"x\"", double, {})
check.raises("no input \"xx\"", double, { x = 1, xx = 1 })
check.raises("takes f32[a=2, b=3], 6 elements; the table has 2", double, { x = { 1, 2 } })
check.raises("takes f32[a=2, b=3], not a host array i32[6]", double, { x = core.host("i32", 6) })
check.raises("no caller feeds", core.program, { outputs = { y = m.input("z", { a }) + 1 } })
local plan = double:plan()
check.equal(plan.peak_bytes > 0 and plan.flops >= 6, true)

-- Corpora: windows by (seed, sample) alone, whatever the batch.
local corpus = core.corpus()
local function draw(rows, step, options)
  local tokens, targets = core.host("i32", rows, 16), core.host("i32", rows, 16)
  corpus:fill(tokens, targets, step, options)
  return tokens, targets
end
local four, targets = draw(4, 1, { seed = 7 })
for row = 0, 3 do
  local one = draw(1, 4 + row, { seed = 7 })
  for i = 1, 16 do check.equal(four[row * 16 + i], one[i], "sample") end
  for i = 1, 15 do check.equal(targets[row * 16 + i], four[row * 16 + i + 1], "target") end
end
check.equal(corpus:text(four) == corpus:text((draw(4, 1, { seed = 8 }))), false)
check.equal(#corpus:text(four), 64)
core.set_seed(7)
check.equal(corpus:text((draw(4, 1))), corpus:text(four), "without a seed that of all randomness")
core.set_seed(0)
check.equal(corpus:text((draw(4, 1))), corpus:text((draw(4, 1, { seed = 0 }))), "the default seed")
check.equal(corpus:text((draw(4, 0, { seed = 7, skip = 4 }))), corpus:text(four), "samples that are skipped")
check.raises("-1 samples cannot be skipped", draw, 4, 0, { skip = -1 })
check.raises("a share between 0 and 1", draw, 1, 0, { from = 2 })
check.raises("tokens to draw from", draw, 1, 0, { from = 0.5, to = 0.5 })
check.raises("cannot open", core.corpus, "no/such/file")
local file = os.tmpname()
local f = assert(io.open(file, "wb"))
for i = 0, 99 do f:write(string.pack("<I2", i * 600)) end
f:close()
local wide = core.corpus(file, { dtype = "u16" })
check.equal(wide:size(), 100)
local tokens, next_tokens = core.host("i32", 8, 9), core.host("i32", 8, 9)
wide:fill(tokens, next_tokens, 0, { from = 0.5, to = 0.75 })
for i = 1, #tokens do check.equal(tokens[i] >= 50 * 600 and next_tokens[i] < 75 * 600, true) end
for i = 1, #tokens do check.equal(next_tokens[i] - tokens[i], 600) end
check.raises("is not below vocab=1000", function() wide:fill(tokens, next_tokens, 0, { vocab = 1000 }) end)

-- Files of tokens that a script writes.
core.write_tokens(file .. ".bin", { { 1, 2, 3 }, core.host("i32", 2):fill { 4, 70000 } }, { format = "megatron", dtype = "u32" })
local written = core.corpus(file .. ".bin")
check.equal(written:size(), 5)
check.equal(written:documents(), 2)
tokens, next_tokens = core.host("i32", 1, 4), core.host("i32", 1, 4)
written:fill(tokens, next_tokens, 0)
check.all(next_tokens:table(), { 2, 3, 4, 70000 }, 0, "tokens written and read")
check.equal(written:identity():match '"tokens":(%d+)', "5")
check.raises("would be taken for its index", core.write_tokens, file .. ".bin", { { 7 } })
os.remove(file .. ".idx")
check.raises("does not fit the 2 bytes", core.write_tokens, file .. ".bin", { { 70000 } })
check.raises("element 2 of a document is not a token id", core.write_tokens, file .. ".bin", { { 1, -1 } })
check.raises("document 1 is not a list", core.write_tokens, file .. ".bin", { 5 })
os.remove(file .. ".bin")

-- Tensor files: what is read, and what is told of others.
local function tensors(header, data)
  local out = assert(io.open(file, "wb"))
  out:write(string.pack("<s8", header), data)
  out:close()
  return core.read_tensors(file)
end
local entry = '{"w":{"dtype":"%s","shape":[2],"data_offsets":[0,%d]}}'
check.all(tensors(entry:format("F32", 8), string.pack("<ff", 1.5, -2)).w, { 1.5, -2 }, 0, "tensor of a file")
check.raises('tensor "w": F8_E4M3 values need the scales of another tensor', tensors, entry:format("F8_E4M3", 2), "ab")
-- F16 is read as f32, exactly: subnormals, the smallest normal number, the largest, infinities, NaN, both zeros.
local halves = { 0x0001, 0x03ff, 0x8001, 0x0400, 0x7bff, 0x3555, 0x7c00, 0xfc00, 0x7e00, 0x7c01, 0x0000, 0x8000 }
local bytes = {}
for i, bits in ipairs(halves) do bytes[i] = string.pack("<I2", bits) end
local half = tensors(('{"w":{"dtype":"F16","shape":[3,4],"data_offsets":[0,%d]}}'):format(2 * #halves), table.concat(bytes)).w
check.equal(half:dtype(), "f32")
check.equal(table.concat(half:dims(), " "), "3 4")
local exact = { 2 ^ -24, 1023 * 2 ^ -24, -2 ^ -24, 2 ^ -14, 65504, 0.333251953125, 1 / 0, -1 / 0 }
for i, value in ipairs(exact) do check.equal(half[i], value, "F16 " .. i) end
check.equal(half[9] ~= half[9] and half[10] ~= half[10], true, "F16 NaN")
check.equal(1 / half[11] == 1 / 0 and 1 / half[12] == -1 / 0, true, "F16 zeros")
check.raises('entry for tensor "w" is malformed', tensors, entry:format("F32", 4), string.pack("<f", 1))
check.raises("its header is malformed", tensors, "{", "")
os.remove(file)

local odd = core.host("f32", 3)
for i, x in ipairs { 0 / 0, -(0 / 0), -1 / 0 } do odd:set(i, x) end
check.equal(tostring(odd), "host f32[3] {nan, nan, -inf}")

check.equal(core.suggest("lerning", { "learning", "loss" }), "learning")
check.equal(core.suggest("zzz", { "learning", "loss" }), nil)
check.equal(core.hash "a" ~= core.hash "b", true)
check.done()
