-- Ids out of range that the script feeds: the op's line, the value, its place and what is allowed.
local m = require "mlua"
local A = m.axes { batch = 2, seq = 3, more = 4, vocab = 8, embed = 2, half = 2, pair = 2, long = 6 }
local wte = m.param { A.vocab, A.embed, name = "wte" }
local out = m.param { A.embed, A.vocab, name = "out" }
local ids = { A.batch, A.seq, dtype = "i32" }

local function told(name, program, feeds)
  local ok, message = pcall(program, feeds)
  print(name .. ": " .. (ok and "runs" or tostring(message):gsub("^[^\n]*id_ranges.lua:%d+: ", ""):gsub("\n *%d+ |   local ok, message[^\n]*", "")))
end
local function compile(fn, spec) return m.compile(fn, { x = spec or ids }) end
local function embed(x) return wte:gather(x, "vocab") end

local good, bad = { { 0, 1, 2 }, { 3, 4, 7 } }, { { 0, 1, 2 }, { 3, 8, 7 } }
local gather = compile(function(i) return embed(i.x) end)
told("gather", gather, { x = good })
told("gather", gather, { x = bad })
told("a host array", gather, { x = m.host("i32", 2, 3):fill { 0, 0, 0, 0, 0, -1 } })
told("one number", gather, { x = 9 })
told("no axes", compile(function(i) return embed(i.x) end, { dtype = "i32" }), { x = -3 })
told("one_hot", compile(function(i) return i.x:one_hot(A.vocab) end), { x = bad })

local function losses(options)
  return m.compile(function(i)
    local total, count = m.cross_entropy(embed(i.x):dot(out, "embed"), i.y, options)
    return { total = total, count = count }
  end, { x = ids, y = ids })
end
told("targets", losses(), { x = good, y = bad })
told("targets of -1", losses(), { x = good, y = { { -1, -1, 2 }, { 3, 4, -1 } } })
told("targets of -100", losses(), { x = good, y = { { 1, -100, 2 }, { 3, 4, -1 } } })
told("targets of -100, ignored", losses { ignore = -100 }, { x = good, y = { { 1, -100, 2 }, { 3, 4, 5 } } })
told("targets of -1, not ignored", losses { ignore = -100 }, { x = good, y = { { 1, -100, 2 }, { 3, 4, -1 } } })

-- Through casts and what rearranges elements.
local more = { A.batch, A.more, dtype = "i32" }
local shifted = m.compile(function(i)
  local total, count = m.cross_entropy(embed(i.x:slice("more", 0, 3):rename("more", "seq")):dot(out, "embed"),
    i.x:slice("more", 1, 4):rename("more", "seq"))
  return { total = total, count = count }
end, { x = more })
told("inputs and targets of one", shifted, { x = { { 1, 2, 3, -1 }, { 1, 2, 3, 4 } } })
told("inputs and targets of one", shifted, { x = { { 1, 2, 3, 4 }, { -1, 2, 3, 4 } } })
told("inputs and targets of one", shifted, { x = { { 1, 2, 3, 4 }, { 1, 2, 3, 9 } } })
local first = compile(function(i) return embed(i.x:slice("more", 0, 1)) * i.x:slice("more", 1, 2):rename("more", "other"):max():cast "f32" end, more)
told("a column of lengths", first, { x = { { 1, 99, -5, -5 }, { 1, 99, -5, -5 } } })
told("a column of lengths", first, { x = { { 1, 99, -5, -5 }, { 8, 99, -5, -5 } } })
local wide = { A.batch, A.more, dtype = "i64" }
told("i64", compile(function(i) return embed(i.x:cast "i32") end, wide), { x = { { 1, 2, 3, 4 }, { 1, 2 ^ 32 | 0, 3, 4 } } })
told("f32", compile(function(i) return embed(i.x:cast "i32") end, { A.batch }), { x = { 7.9, 8.5 } })
told("nan", compile(function(i) return embed(i.x:cast "i32") end, { A.batch, dtype = "bf16" }), { x = { 7.9, 0 / 0 } })
told("split", compile(function(i) return embed(i.x:split("more", A.pair, A.half):slice("half", 1, 2)) end, more), { x = { { -1, 2, -1, 4 }, { 9, 2, 9, 4 } } })
told("split", compile(function(i) return embed(i.x:split("more", A.pair, A.half):slice("half", 1, 2)) end, more), { x = { { -1, 2, -1, 4 }, { 9, 2, 9, 9 } } })
told("merged", compile(function(i) return embed(i.x:merge("batch", "seq", "long"):slice("long", 1, 4)) end), { x = { { -1, 1, 2 }, { 3, -1, -1 } } })
told("merged", compile(function(i) return embed(i.x:merge("batch", "seq", "long"):slice("long", 1, 5)) end), { x = { { -1, 1, 2 }, { 3, -1, -1 } } })
told("turned", compile(function(i) return embed(i.x:permute("seq", "batch"):slice("seq", 0, 2)) end), { x = { { 1, 1, -1 }, { 1, -2, -1 } } })
told("padded", compile(function(i) return embed(i.x:pad("seq", 1):slice("seq", 0, 3)) end), { x = { { 1, 1, -1 }, { 1, 1, -1 } } })
told("padded", compile(function(i) return embed(i.x:pad("seq", 1):slice("seq", 0, 3)) end), { x = { { 1, 1, -1 }, { 1, -1, -1 } } })
local joined = m.compile(function(i) return embed(m.concat({ i.x, i.y }, "seq"):slice("seq", 2, 4)) end, { x = ids, y = ids })
told("concatenated", joined, { x = { { -1, -1, 2 }, { -1, -1, 5 } }, y = { { 1, -1, -1 }, { 4, -1, -1 } } })
told("concatenated", joined, { x = { { -1, -1, 2 }, { -1, -1, 5 } }, y = { { 1, -1, -1 }, { 9, -1, -1 } } })
told("detached", compile(function(i) return embed(i.x:detach():broadcast { A.batch, A.seq, A.pair }) end), { x = bad })

-- What the script has mended is not claimed; nor what the program does not compute.
told("masked", compile(function(i)
  local known = m.logical_and(m.ge(i.x, 0), m.lt(i.x, 8))
  return m.where(known, embed(m.where(known, i.x, 0)):sum "embed", 0)
end), { x = { { -1, 1, 2 }, { 3, 99, 7 } } })
told("not needed", compile(function(i)
  local _ = embed(i.x)
  return i.x + 1
end), { x = bad })
-- The gradient of a product that needs no gathered value.
told("a gradient alone", m.compile(function(i) return m.grad(embed(i.x):sum(), { wte })[1] end, { x = ids }), { x = bad })
-- 300 elements, more than one block of the check; the last.
local run = m.axis("run", 300)
local list = {}
for i = 1, 300 do list[i] = i % 8 end
local long = compile(function(i) return embed(i.x) end, { run, dtype = "i32" })
told("many", long, { x = list })
list[300] = 8
told("many", long, { x = list })
list[300], list[200] = 1, -1
told("many", long, { x = list })

-- In m.train, too.
local T = m.axes { batch = 2, seq = 4, vocab = 256, embed = 4, small = 8 } -- any text has bytes beyond
local Model = m.module("Model", function(self) self.wte, self.out = m.param { T.small, T.embed }, m.param { T.embed, T.vocab } end)
function Model:forward(tokens)
  return self.wte:gather(tokens, "small"):dot(self.out, "embed")
end
local ok, message = pcall(m.train, { model = Model(), batch = T.batch, seq = T.seq, steps = 2 })
print(ok, (tostring(message):gsub("element %d+ %b() is %d+", "element ... is ...")))
