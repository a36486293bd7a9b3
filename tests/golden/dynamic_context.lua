-- args: check SCRIPT --mesh dp=2,cp=2
-- What cp = "dynamic" cannot place is refused at its line.
local m = require "mlua"
local A = m.axes { batch = 4, seq = 64, embed = 8, heads = 2, head_dim = 4, vocab = 256 }

local function model(more)
  local Model = m.module("Model", function(self)
    self.table, self.wq = m.param { A.vocab, A.embed }, m.param { A.embed, A.heads, A.head_dim }
    self.places, self.seen = m.param { A.seq, A.embed }, m.buffer {}
  end)
  function Model:forward(tokens)
    local x = self.table:gather(tokens, "vocab")
    local q = m.rope(x:dot(self.wq, "embed"))
    x = more(x, q, self) or x
    return x:dot(self.table, "embed")
  end
  return Model()
end

local layout = m.layout.megatron { cp = "dynamic" }
local function try(what, options, more)
  local o = {
    model = model(more or function(x, q) return x + m.attention(q, q, q, { causal = true }):sum("heads", "head_dim") end),
    batch = A.batch, seq = A.seq, steps = 1, pack = "document", layout = layout,
  }
  for key, value in pairs(options) do o[key] = value end
  local ok, problem = pcall(m.train, o)
  print(("%s: %s\n"):format(what, ok and "allowed" or tostring(problem)))
end

local function attended(change)
  return function(x, q, self) return x + change(m.attention(q, q, q, { causal = true }):sum("heads", "head_dim"), self) end
end

try("documents run together", { pack = "concat" })
try("a window is too long", { accum = 16 })
try("sums along the sequence", {}, attended(function(y) return y:cumsum "seq" end))
try("the token before", {}, attended(function(y) return y:pad("seq", 1, 0):slice("seq", 0, y:size "seq") end))
try("a mean over the sequence", {}, attended(function(y) return y - y:mean "seq" end))
try("places in the row", {}, attended(function(y) return y * m.iota(m.axis("seq", y:size "seq"), "f32") end))
try("a table over the sequence", {}, function(x, q, self)
  return x + m.attention(q, q, q, { causal = true }):sum("heads", "head_dim") + self.places
end)
try("dropout", {}, attended(function(y) return m.dropout(y, 0.1) end))
try("attention across documents", {}, function(x, q) return x + m.attention(q, q, q, { document = false }):sum("heads", "head_dim") * m.positions(q:sum("heads", "head_dim")):cast "f32" end)
try("a score of places", {}, function(x, q)
  return x + m.attention(q, q, q, { causal = true, score = function(s, i) return s + i.q:cast "f32" end }):sum("heads", "head_dim")
end)
try("numbers of documents", {}, attended(function(y) return y * m.documents(y):cast "f32" end))
try("a score by numbers of documents", {}, function(x, q)
  local number = m.documents(x:sum "embed"):cast "f32"
  return x + m.attention(q, q, q, { causal = true, score = function(s) return s * number end }):sum("heads", "head_dim")
end)
try("a score by a table", {}, function(x, q, self)
  local table = self.places:sum "embed"
  return x + m.attention(q, q, q, { causal = true, score = function(s) return s + table end }):sum("heads", "head_dim")
end)
try("the length of a row", {}, attended(function(y) return y * (1 / y:size "seq") end))
try("an axis of windows", {}, attended(function(y) return y * m.ones { A.seq } end))
try("a sum as long as a row", {}, attended(function(y) return y * (1e-3 * m.ones { m.axis("n", y:size "seq") }:sum()) end))
try("the last of a row's places", {}, attended(function(y) return y * m.iota(m.axis("n", y:size "seq"), "f32"):max() end))
try("a bound on the length of a row", {}, attended(function(y)
  if y:size "seq" > A.seq.size then error "too long" end
  return y
end))
try("a score by the length of a row", {}, function(x, q)
  return x + m.attention(q, q, q, { causal = true, score = function(s) return s * (1 / q:size "seq") end }):sum("heads", "head_dim")
end)
try("a state of each microbatch", {}, attended(function(y, self)
  self.seen:assign(y:sum())
  return y
end))
try("a total of each microbatch", {}, attended(function(y, self)
  m.step_total(self.seen, 1)
  return y
end))
try("a loss of each microbatch", {}, attended(function(y)
  m.add_loss((y * y):sum(), 1)
  return y
end))
try("a mean of each microbatch", { loss = function(tokens, targets)
  local sum, count = m.cross_entropy(model(attended(function(y) return y end))(tokens), targets)
  return sum / count, 1
end })
try("the square of a sum", { loss = function(tokens, targets)
  local sum, count = m.cross_entropy(model(attended(function(y) return y end))(tokens), targets)
  return sum * sum, count
end })
for what, options in pairs {
  ["parameters split over dp"] = { preset = "fsdp" }, ["pipeline stages with exchange"] = { pp = 2, ep = 2, exchange = 1.5 },
  ["pipeline stages and experts"] = { pp = 2, ep = 2 },
} do
  local preset = m.layout[options.preset or "megatron"]
  local ok, problem = pcall(preset, { cp = "dynamic", pp = options.pp, ep = options.ep, exchange = options.exchange })
  print(("%s: %s\n"):format(what, tostring(problem)))
end
