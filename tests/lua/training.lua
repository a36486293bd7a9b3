-- Training: repeatable to the bit, the same with accumulation, learns; generation; evaluation.
local m = require "mlua"
local core = require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")

local A = m.axes { embed = 32, vocab = 256, seq = 32, batch = 8, heads = 2, head_dim = 16, ffn = 64 }
local Model = m.module("Model", function(self)
  self.embedding = m.param { A.vocab, A.embed }
  self.wq, self.wk = m.param { A.embed, A.heads, A.head_dim }, m.param { A.embed, A.heads, A.head_dim }
  self.wv, self.wo = m.param { A.embed, A.heads, A.head_dim }, m.param { A.heads, A.head_dim, A.embed }
  self.norms = { m.rms_norm { A.embed }, m.rms_norm { A.embed } }
end)
function Model:forward(tokens)
  local x = self.embedding:gather(tokens, "vocab")
  local h = self.norms[1](x)
  local q, k, v = h:dot(self.wq, "embed"), h:dot(self.wk, "embed"), h:dot(self.wv, "embed")
  x = x + m.attention(m.rope(q), m.rope(k), v, { causal = true }):dot(self.wo, "heads", "head_dim")
  return self.norms[2](x):dot(self.embedding, "embed")
end

-- The losses of 6 steps of a fresh model; names its parameters anew by a wrapper.
local function train(options)
  local Wrapper = m.module("Wrapper", function(self) self.model = Model() end)
  function Wrapper:forward(tokens) return self.model(tokens) end
  local losses = {}
  local o = {
    model = Wrapper(), batch = A.batch, seq = A.seq, steps = 6, optimizer = m.adamw { lr = 0.01 }, log_every = 100,
    on_step = function(step, out) losses[step] = out.loss end,
  }
  for key, value in pairs(options or {}) do o[key] = value end
  local result = m.train(o)
  return losses, result, o.model
end

local first, _, model = train()
check.near(first[1], math.log(256), 0.05, "first loss")
if not (first[6] < first[1] - 0.5) then check.equal(first[6], "a lower loss", "sixth loss") end
local names = select(2, m.parameters(model))
table.sort(names)
check.equal(table.concat(names, " "),
  "model.embedding model.norms.1.gain model.norms.2.gain model.wk model.wo model.wq model.wv", "names")

local ids, text = m.generate(model, { prompt = "ab", tokens = 5, seq = A.seq, temperature = 0, quiet = true })
check.equal(#ids, 7, "generated ids")
check.equal(#text, 5, "generated text")
local same, decoded = m.generate(model, {
  prompt = "ab", tokens = 5, seq = A.seq, temperature = 0, quiet = true, tokenizer = m.tokenizer "bytes",
})
check.equal(table.concat(same, " "), table.concat(ids, " "), "ids with a tokenizer")
check.equal(decoded, m.tokenizer("bytes"):decode { table.unpack(ids, 3) }, "text by a tokenizer")

-- Adapters beside frozen weights: only the former are learned, and all are read in the compute dtype.
local rank = m.axis("rank", 2)
local Adapted = m.module("Adapted", function(self)
  self.embedding = m.param { A.vocab, A.embed, init = 0.5, frozen = true }
  self.down, self.up = m.param { A.embed, rank, init = 0.1 }, m.param { rank, A.embed, init = 0.1 }
end)
function Adapted:forward(tokens)
  local x = self.embedding:gather(tokens, "vocab")
  check.equal(x:dtype(), m.compute_dtype(), "dtype of frozen weights")
  return (x + x:dot(self.down, "embed"):dot(self.up, "rank")):dot(self.embedding, "embed")
end
local frozen = Adapted()
local early, why = pcall(function() return frozen.embedding:get() end)
local named = m.param { A.embed, init = "ones", name = "read_early" }
check.equal(named:get()[1], 1, "a parameter of no module") -- and the model's are left alone
check.equal(not early and tostring(why):match "a parameter has no value" ~= nil, true, "a parameter without initial values")
local names_left = select(2, m.parameters(frozen))
table.sort(names_left)
check.equal(table.concat(names_left, " "), "down up", "names of what is trained")
check.equal(frozen.embedding:get()[1] ~= 0, true, "initial values after others were read")
local before = table.concat(frozen.embedding:get():table(), " ")
local up = table.concat(frozen.up:get():table(), " ")
train { model = frozen }
check.equal(table.concat(frozen.embedding:get():table(), " "), before, "frozen weights")
check.equal(table.concat(frozen.up:get():table(), " ") ~= up, true, "weights of the adapter")

-- Mistakes.
local Empty = m.module("Empty", function() end)
function Empty:forward(tokens) return tokens:one_hot(A.vocab) end
check.raises("the model has no parameters to train", m.train, { model = Empty(), batch = A.batch, seq = A.seq })
check.raises("m.stack: layer 1 is nil", m.stack, 2, function() end)
check.raises("m.stack takes a count and a class, got 7", m.stack, 2, 7)
local function schedule(value) return function() return value end end
check.raises("the schedule must return a number, got nan at step 1", train, { model = Adapted(), schedule = schedule(0 / 0) })
check.raises("the schedule must return a number, got inf at step 1", train, { model = Adapted(), schedule = schedule(math.huge) })
local steps = 0
check.raises("a window of seq=32 needs 33", train, {
  model = Adapted(), eval_every = 2, eval_share = 1e-6, on_step = function() steps = steps + 1 end,
})
check.equal(steps, 0, "steps before too little data for evaluation is told")
local counted = Adapted()
local function loss(bad)
  return function(tokens, targets)
    local sum, count = m.cross_entropy(counted(tokens), bad == "count" and targets * 0 - 1 or targets)
    return bad == "sum" and sum + m.log(sum * 0) or sum, count
  end
end
check.raises("the loss counts nothing", train, { model = counted, loss = loss "count" })
check.raises("every module's output is finite, and the loss is not", train, { model = counted, loss = loss "sum" })
local function generate(o)
  o.seq, o.quiet = A.seq, true
  m.generate(model, o)
end
check.raises("m.generate's tokens must be an integer, 0 or more, got \"x\"", generate, { tokens = "x" })
check.raises("m.generate's temperature must be a number, 0 or more, got -1", generate, { temperature = -1 })
check.raises("m.generate's tokenizer must be a tokenizer, got \"bytes\"", generate, { tokenizer = "bytes" })
check.raises("m.generate's prompt has the token 256, and the model has 0 to 255", generate, { prompt = { 1, 256 } })
check.raises("m.generate's prompt has the token -1, and", generate, { prompt = { -1 } })
local double = m.compile(function(feeds) return { y = feeds.x * 2 } end, { x = { A.embed } })
check.raises("the program has no input \"y\"", double, { y = 1 })
check.raises("the program needs the input \"x\"", double, {})
check.done()
