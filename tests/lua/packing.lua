-- Documents of a batch: what a model computes of several in a row is what it computes of each alone.
local m = require "mlua"
local core = require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")

local file = os.tmpname()
local documents = {}
for i = 1, 60 do
  documents[i] = {}
  for k = 1, 1 + i * 5 % 7 do documents[i][k] = (i * 31 + k * k * 7) % 50 end
end
m.write_tokens(file .. ".bin", documents, { format = "megatron" })

local A = m.axes { embed = 8, heads = 2, head_dim = 4, vocab = 50, seq = 12, batch = 4, places = 12 }
local Model = m.module("Model", function(self)
  self.table, self.places = m.param { A.vocab, A.embed, init = 0.7 }, m.param { A.places, A.embed, init = 0.7 }
  self.wq, self.wk, self.wv = m.param { A.embed, A.heads, A.head_dim, init = 0.7 }, m.param { A.embed, A.heads, A.head_dim, init = 0.7 }, m.param { A.embed, A.heads, A.head_dim, init = 0.7 }
  self.wo = m.param { A.heads, A.head_dim, A.embed, init = 0.7 }
end)
function Model:forward(tokens)
  local x = self.table:gather(tokens, "vocab") + self.places:gather(m.positions(tokens), "places")
  local q, k, v = x:dot(self.wq, "embed"), x:dot(self.wk, "embed"), x:dot(self.wv, "embed")
  x = x + m.attention(m.rope(q), m.rope(k), v, { causal = true }):dot(self.wo, "heads", "head_dim")
  return x:dot(self.table, "embed")
end
local model = Model()

-- The loss of a first step that changes nothing.
local function train(options)
  local o = { model = model, batch = A.batch, seq = A.seq, steps = 1, optimizer = m.sgd { lr = 0 }, data = file .. ".bin", seed = 3, skip = 0, log_every = 9 }
  for key, value in pairs(options) do o[key] = value end
  return m.train(o).loss
end
local packed, crossed = train { pack = "document" }, train { pack = "concat" }
check.near(train { pack = "document", accum = 2 }, packed, 1e-6, "accumulated")
check.equal(train {}, crossed, "concat is the default")
check.equal(math.abs(packed - crossed) > 1e-3, true, "attention that crosses documents differs")

-- The same batch, each document alone.
local function host() return core.host("i32", 4, 12) end
local tokens, targets, numbers, positions = host(), host(), host(), host()
core.corpus(file .. ".bin"):fill(tokens, targets, 0, { seed = 3, documents = numbers, positions = positions })
local programs = {}
local function alone(first, count)
  local seq, batch = m.axis("seq", count), m.axis("batch", 1)
  local inputs = { tokens = { batch, seq, dtype = "i32" }, targets = { batch, seq, dtype = "i32" } }
  programs[count] = programs[count] or m.compile(function(feeds)
    local total, counted = m.cross_entropy(model(feeds.tokens), feeds.targets)
    return { total = total, counted = counted }
  end, inputs)
  local part = { tokens = core.host("i32", 1, count), targets = core.host("i32", 1, count) }
  for i = 1, count do part.tokens[i], part.targets[i] = tokens[first + i - 1], targets[first + i - 1] end
  local out = programs[count](part)
  return out.total, out.counted
end
local total, counted, first = 0, 0, 1
for i = 1, 48 do
  local ends = i % 12 == 0 or numbers[i + 1] ~= numbers[i]
  check.equal(positions[i], i - first, "the position")
  if i % 12 ~= 0 then check.equal(targets[i], ends and -1 or tokens[i + 1], "the target") end
  if ends then
    local sum, count = alone(first, i - first + 1)
    total, counted, first = total + sum, counted + count, i + 1
  end
end
check.near(packed, total / counted, 1e-5, "documents in a row and alone")

-- Documents and positions that are given, and none.
-- `given` is true, nil, or false for attention that crosses documents.
local function attend(given)
  local Other = m.module("Other", function(self) self.inner = model end)
  function Other:forward(t)
    local x = self.inner.table:gather(t, "vocab")
    local q = m.rope(x:dot(self.inner.wq, "embed"), { positions = given and m.positions(t) or nil })
    local o = m.attention(q, q, x:dot(self.inner.wv, "embed"), { causal = true, document = given and m.documents(t) or given })
    return o:dot(self.inner.wo, "heads", "head_dim"):dot(self.inner.table, "embed")
  end
  return Other()
end
check.equal(train { model = attend(true), pack = "document" }, train { model = attend(), pack = "document" }, "given")
check.equal(train { model = attend(true) }, train { model = attend(true), pack = "concat" }, "one document")
check.near(train { model = attend(true) }, train { model = attend() }, 1e-6, "one document, given")
check.equal(train { model = attend(false), pack = "document" } ~= train { model = attend(), pack = "document" }, true, "none")

-- Positions along an axis of another name.
local T = m.axes { time = 12, batch = 4 }
local Timed = m.module("Timed", function(self) self.inner, self.places = model, m.param { T.time, A.embed, init = 0.7 } end)
function Timed:forward(t)
  return (self.inner.table:gather(t, "vocab") + self.places:gather(m.positions(t), "time")):dot(self.inner.table, "embed")
end
local timed = { model = Timed(), seq = T.time }
check.equal(train(timed) ~= train { model = timed.model, seq = T.time, pack = "document" }, true, "another axis")

-- What cannot know documents is refused.
local Bare = m.module("Bare", function(self) self.inner = model end)
function Bare:forward(t) return self.inner.table:gather(t, "vocab"):dot(self.inner.table, "embed") end
check.raises("uses neither the documents nor the positions", train, { model = Bare(), pack = "document" })
local Table = m.module("Table", function(self) self.inner, self.added = model, m.param { A.seq, A.embed } end)
function Table:forward(t)
  local x = self.inner.table:gather(t, "vocab") + self.added
  return m.attention(x, x, x, { causal = true, head_dim = "embed" }):dot(self.inner.table, "embed")
end
check.raises("adds a table over seq by broadcast", train, { model = Table(), pack = "document" })
check.raises('must be "concat" or "document"', train, { pack = "documents" })
local f = assert(io.open(file .. ".u16.bin", "wb"))
f:write(("ab"):rep(500))
f:close()
check.raises("is not known", train, { pack = "document", data = file .. ".u16.bin", vocab = 30000 })
for _, suffix in ipairs { "", ".bin", ".idx", ".u16.bin" } do os.remove(file .. suffix) end
check.done()
