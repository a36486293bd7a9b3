-- What models read: patches, buckets of relative positions, spans, labelled texts; m.accuracy; m.freeze of tables.
local m = require "mlua"
local core = require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")

-- Patches: pixel (row, column, channel) of an image of 4 x 6 x 3 is at place p of patch s.
local A = m.axes { batch = 2, height = 4, width = 6, channels = 3, seq = 5, vocab = 4, heads = 2, head_dim = 4, buckets = 8 }
local image, expected = {}, {}
for b = 0, 1 do
  for i = 0, 71 do
    local row, column, channel = i // 18, i // 3 % 6, i % 3
    local value = 100 * b + i
    image[#image + 1] = value
    local s, p = row // 2 * 3 + column // 2, (row % 2 * 2 + column % 2) * 3 + channel
    expected[b * 72 + s * 12 + p + 1] = value
  end
end
local patches = m.compile(function(i) return m.patches(i.image, 2) end, { image = { A.batch, A.height, A.width, A.channels } })
check.all(patches { image = image }, expected, 0, "patches")
local renamed = m.patches(core.input("other", { m.axis("y", 4), m.axis("x", 4), m.axis("colour", 1) }), 2,
  { height = "y", width = "x", channels = "colour", seq = "patches", patch = "pixels_of_it" })
check.equal(table.concat(renamed:axes(), " "), "patches pixels_of_it")
local input = core.input("image", { A.batch, A.height, A.width, A.channels })
check.raises("patches of 4 pixels do not divide width=6", m.patches, input, 4)
check.raises("the size of m.patches must be a positive integer, got 0", m.patches, input, 0)
check.raises("m.patches has no option \"hight\"", m.patches, input, 2, { hight = "y" })
check.raises("\"channels\"", m.patches, core.input("grey", { A.height, A.width }), 2)

-- Buckets as in T5's code, of a key at `relative` to its query.
local function bucket(relative, buckets, reach, causal)
  local base, distance = 0, -relative
  if not causal then
    buckets = buckets // 2
    if relative > 0 then base = buckets end
    distance = math.abs(relative)
  end
  distance = math.max(distance, 0)
  local exact = buckets // 2
  if distance < exact then return base + distance end
  local large = exact + math.floor(math.log(distance / exact) / math.log(reach / exact) * (buckets - exact) + 1e-9)
  return base + math.min(large, buckets - 1)
end
local long = m.axis("seq", 300)
for _, o in ipairs { { buckets = 32, reach = 128 }, { buckets = 32, reach = 128, causal = true }, { buckets = 8, reach = 20 }, { buckets = 5, reach = 60, causal = true } } do
  local f = m.compile(function(i) return m.relative_buckets(i.x, o) end, { x = { long } })
  local values, wrong = f { x = 0 }, 0
  for q = 0, 299, 7 do
    for k = 0, 299 do
      if values[q * 300 + k + 1] ~= bucket(k - q, o.buckets, o.reach, o.causal) then wrong = wrong + 1 end
    end
  end
  check.equal(wrong, 0, ("wrong ones of %d buckets"):format(o.buckets))
end
check.raises("cannot have 6 buckets up to a distance of 1", m.relative_buckets, core.input("x", { long }), { buckets = 6, reach = 1 })
check.raises("must be a positive integer", m.relative_buckets, core.input("x", { long }), { buckets = 0 })
check.equal(tostring(m.relative_buckets(core.input("x", { A.seq }), { keys = 7 })), "i32[seq=5, kv_seq=7]")

-- Spans: of T5's own lengths, and their sums.
local calls = 0
local random = { integer = function(_, low, high)
  calls = calls + 1
  return low + core.hash(tostring(calls)) % (high - low + 1)
end }
local spans = m.spans { seq = 512 }
check.equal(("%d %d %d"):format(spans.text, spans.count, spans.targets), "568 28 114")
local longest = 0
for _ = 1, 20 do
  local kept, cut, parts = 0, 0, spans.draw(random)
  for _, part in ipairs(parts) do
    check.equal(part.kept >= 1 and part.cut >= 1, true)
    kept, cut, longest = kept + part.kept, cut + part.cut, math.max(longest, part.cut)
  end
  check.equal(("%d %d %d"):format(#parts, kept, cut), "28 483 85")
end
check.equal(longest > 4, true, "spans differ")
check.raises("a share between 0 and 1, got 2", m.spans, { seq = 64, noise = 2 })
check.raises("must be a positive integer, got nil", m.spans, {})
check.raises("no text loses a share of 0.9", m.spans, { seq = 64, noise = 0.9, length = 1 })

-- Labelled texts.
local tokens, targets = m.labelled(8, { "ab", { learn = "c\n" }, { 300, 301 } })
check.equal(table.concat(tokens, " "), "97 98 99 10 300 301 0 0")
check.equal(table.concat(targets, " "), "-1 99 10 -1 -1 -1 -1 -1")
check.raises("the text has 4 tokens, and seq is 3", m.labelled, 3, { "ab", { learn = "cd" } })
check.raises("part 1 of m.labelled is a text, a list of tokens or {learn = one}, got 7", m.labelled, 3, { 7 })

-- Accuracy: of targets 1, 2, -1, 0, 3 and largest logits 1, 3, 0, 0, 3.
local accuracy = m.compile(function(i)
  local a = m.accuracy(i.logits, i.targets)
  return { right = a[1], count = a[2] }
end, { logits = { A.seq, A.vocab }, targets = { A.seq, dtype = "i32" } })
local out = accuracy { logits = { 0, 9, 0, 0, 0, 0, 0, 1, 5, 0, 0, 0, 2, 1, 1, 1, -4, -4, -4, -3 }, targets = { 1, 2, -1, 0, 3 } }
check.equal(out.right, 3.0)
check.equal(out.count, 4.0)
check.raises("accuracy", m.accuracy, core.input("l", { A.seq }), core.input("t", { A.seq }, "i32"))

-- A table of parameters and modules can be frozen.
local Model = m.module("Model", function(self)
  self.eye = m.freeze { w = m.param { A.heads, A.head_dim }, norm = m.rms_norm { A.heads } }
  self.w = m.param { A.heads, A.head_dim }
end)
local _, names = m.parameters(Model())
check.equal(table.concat(names, " "), "w")
check.raises("m.freeze takes a module, a parameter or a table of them", m.freeze, {})
check.raises("m.freeze takes a module, a parameter or a table of them", m.freeze, Model)

check.done()
