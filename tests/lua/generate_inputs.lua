-- Models that read inputs beside the tokens that grow: what depends on those alone is computed once a prompt, and answers are those of the
-- whole program for each token (increment = false). models/t5.lua with weights as they begin, prompts of unequal lengths in fewer slots.
local m = require "mlua"
local core = require "mlua.core"
local Decoder = require "mlua.decode"
local given = require "mlua.given"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")
core.compute_dtype "f32"

local options, train, t5 = core.options, m.train, nil
function core.options()
  local o = options()
  for key, value in pairs { layers = "2", embed = "16", heads = "2", head_dim = "8", ffn = "32", seq = "32", vocab = "270", batch = "2" } do table.insert(o.overrides, { key, value }) end
  return o
end
function m.train(o) t5 = o end
dofile(root .. "models/t5.lua")
core.options, m.train = options, train
given.declare(t5.model, t5.inputs, t5.generate)

local function by_name(before, inputs) return 20 * t5.generate.model(before, inputs) end -- logits that differ

-- Answers by increments and by the whole program.
local function answers(o)
  local lists = {}
  for i, increment in ipairs { true, false } do
    local all = { axis = t5.generate.axis, prompt = { 0 }, quiet = true, increment = increment, tokens = 6, temperature = 1 }
    for key, value in pairs(o) do all[key] = value end
    lists[i] = m.generate(by_name, all)
  end
  return lists
end

local A = t5.inputs.tokens[2]
local function ids(...) return { A, dtype = "i32", value = { ... } } end
local several = { { tokens = ids(5, 6, 7, 8, 9, 1) }, { tokens = ids(65, 1) }, { tokens = ids(100, 101, 102, 1) } }
local lists = answers { inputs = several, n = 2, rows = 2, seed = 3 }
local distinct = {}
for i, r in ipairs(lists[1]) do
  local other = lists[2][i]
  check.equal(table.concat(r.ids, " "), table.concat(other.ids, " "))
  check.near(r.logprob, other.logprob, 1e-5 * math.max(1, math.abs(other.logprob)))
  distinct[table.concat(r.ids, " ")] = true
end
check.equal(#lists[1], 6)
local alone = m.generate(by_name, { inputs = several[3], axis = t5.generate.axis, prompt = { 0 }, n = 2, seed = 3, tokens = 6, temperature = 1, quiet = true })
check.equal(table.concat(alone[2].ids, " "), table.concat(lists[1][6].ids, " "), "batched and alone")
local count = 0
for _ in pairs(distinct) do count = count + 1 end
check.equal(count > 3, true, "answers depend on inputs and seeds")

-- A module by the names of forward's parameters; what the decoder keeps: keys and values of the encoder's output, one for each slot.
local d = Decoder.new(t5.model, { seq = t5.generate.axis, slots = 2, given = given.specs(t5.model, { tokens = {} }) })
local s = d:open({ 0 }, { temperature = 0, given = { tokens = given.elements({ name = "tokens", axes = { A }, dtype = "i32" }, { 9, 8, 1 }) } })
d:step { s }
local kinds = { pool = 0, slot = 0 }
for _, k in ipairs(d.cache.kept:list()) do kinds[k.kind] = kinds[k.kind] + 1 end
check.equal(kinds.pool, 4) -- of two layers
check.equal(kinds.slot, 5) -- and which of the input is padding
d:close(d:fork(s, { temperature = 0 }))
check.equal(d.given_count, 1, "what a prompt gives is computed once")
check.raises("the prompt gives no tokens", d.open, d, { 0 }, { temperature = 0 })

-- What has no increment yet is refused at its line; what cannot be fed says so.
local E, T, S, V = m.axis("embed", 8), m.axis("target", 12), m.axis("source", 12), m.axis("vocab", 20)
local table_of = m.param { V, E, name = "table" }
local function refused(text, line, f)
  local o = { inputs = { source = { S, dtype = "i32", value = { 3, 4 } } }, axis = T, prompt = { 0 }, tokens = 2, quiet = true }
  local batch = m.axis("batch", 1)
  check.raises(("generate_inputs.lua:%d: %s"):format(line, text), m.compile, function(i)
    local whole, source = core.input("whole", { batch, T }, "i32"), core.input("source", { batch, S }, "i32")
    return core.increment(f(whole, { source = source }), {
      tokens = whole, seq = "target", kept = core.increment_states(), given = { source }, new = i.new, start = i.start, count = i.count, table = i.table, pool = 16, block = 16,
    })
  end, { new = { m.axis("row", 1), m.axis("new", 1), dtype = "i32" }, start = { m.axis("row", 1), dtype = "i32" }, count = { m.axis("row", 1), dtype = "i32" }, table = { m.axis("row", 1), m.axis("columns", 1), dtype = "i32" } })
  return o
end
local o = refused("concat that depends on the tokens reads what the prompt gives", debug.traceback():match "generate_inputs.lua:(%d+)" + 2, function(tokens, i)
  local x = table_of:gather(tokens, "vocab"):slice("target", 0, 6)
  return m.concat({ table_of:gather(i.source, "vocab"):rename("source", "target"):slice("target", 0, 6), x }, "target"):dot(table_of, "embed")
end)

-- forward(source, target), the axis by its name among m.train's inputs. A position also reads the source element of its own number.
local Both = m.module("Both", function(self)
  self.table, self.keys = m.param { V, E, init = 1.0 }, m.param { V, E, init = 1.0 }
end)
function Both:forward(source, target)
  local x, keys = self.table:gather(target, "vocab"), self.keys:gather(source, "vocab")
  local seen = m.attention(x, keys:rename("source", "kv_seq"), keys:rename("source", "kv_seq"), { seq = "target", head_dim = "embed" })
  return (x:cumsum "target" + seen + keys:rename("source", "target")):dot(self.table, "embed")
end
local both = Both()
given.declare(both, { source = { m.axis("batch", 4), S, dtype = "i32" }, target = { m.axis("batch", 4), T, dtype = "i32" } })
for _, text in ipairs { { 3, 4, 5 }, { 9 } } do
  local asked, all = { inputs = { source = text }, axis = "target", prompt = { 0 }, n = 2, seed = 5, tokens = 11, quiet = true }, {}
  for i, increment in ipairs { true, false } do
    asked.increment = increment
    all[i] = m.generate(both, asked)
  end
  for i = 1, 2 do
    check.equal(table.concat(all[1][i].ids, " "), table.concat(all[2][i].ids, " "))
    check.near(all[1][i].logprob, all[2][i].logprob, 1e-5)
  end
end

-- What the prompt gives is read by scans (their initial state, inputs and step), filters of convolutions and score functions, too.
local heads, wide = m.axis("heads", 2), m.axis("head_dim", 4)
local Inside = m.module("Inside", function(self)
  self.table, self.keys, self.filter = m.param { V, E, init = 0.8 }, m.param { V, E, init = 0.8 }, m.param { m.axis("taps", 3), E, init = 0.7 }
  self.q, self.bias = m.param { E, heads, wide, init = 0.5 }, m.param { V, heads, init = 1.0 }
end)
function Inside:forward(source, target)
  local x, keys = self.table:gather(target, "vocab"), self.keys:gather(source, "vocab")
  local mean = keys:mean "source"
  local y = m.scan(function(s, t)
    local new = m.tanh(0.5 * s + t.x + mean * t.keys)
    return new, new
  end, { axis = "target", state = mean, inputs = { x = x, keys = keys:rename("source", "target") } })
  local linear = m.scan(function(s, t)
    local new = m.sigmoid(t.x) * s + t.x
    return new, new
  end, { axis = "target", state = mean, inputs = { x = x } })
  y = y + linear + m.conv(x, keys:slice("source", 0, 3):rename("source", "taps") * self.filter:broadcast { m.axis("batch", mean:size "batch"), m.axis("taps", 3), E }, { axis = "target", causal = true })
  local q, bias = y:dot(self.q, "embed"), self.bias:gather(source, "vocab"):rename("source", "kv_seq")
  local a = m.attention(q, q:rename("target", "kv_seq"), q:rename("target", "kv_seq"), { seq = "target", causal = true, score = function(s) return s + bias end })
  return (y + a:dot(self.q, "heads", "head_dim")):dot(self.table, "embed")
end
local inside = Inside()
given.declare(inside, { source = { m.axis("batch", 4), S, dtype = "i32" }, target = { m.axis("batch", 4), T, dtype = "i32" } })
local inputs, derived = { { source = { 3, 4, 5 } }, { source = { 9 } }, { source = { 1, 2, 3, 4, 5, 6, 7, 8 } } }, {}
for i, increment in ipairs { true, false } do
  derived[i] = m.generate(inside, { inputs = inputs, axis = "target", prompt = { 0, 7 }, rows = 2, seed = 5, tokens = 9, quiet = true, increment = increment, temperature = 1 })
end
for i, r in ipairs(derived[1]) do
  check.equal(table.concat(r.ids, " "), table.concat(derived[2][i].ids, " "), "answer " .. i .. " of a model that reads inputs inside of scans")
  check.near(r.logprob, derived[2][i].logprob, 1e-5 * math.abs(r.logprob))
end
local d2 = Decoder.new(inside, { seq = T, slots = 1, given = given.specs(inside, { source = {} }) })
d2:prepare({ { temperature = 1 } }, 1)
check.equal(d2.increment, true, "its increment is derived")
check.raises('axis "nowhere" is of no input of m.train', m.generate, both, { inputs = { source = { 1 } }, axis = "nowhere", prompt = { 0 }, quiet = true })
check.raises("m.generate with inputs needs prompt", m.generate, by_name, { inputs = o.inputs, axis = T, quiet = true })
check.raises("m.generate does not know the axes of inputs.source", m.generate, by_name, { inputs = { source = { 1 } }, axis = T, prompt = { 0 }, quiet = true })
check.raises("has 40 elements, and its axes 12", m.generate, by_name, { inputs = { source = { S, dtype = "i32", value = ("x"):rep(40) } }, axis = T, prompt = { 0 }, quiet = true })
local bare = m.module("Bare", function(self) self.table = m.param { V, E } end)
function bare:forward(tokens) return self.table:gather(tokens, "vocab"):dot(self.table, "embed") end
bare = bare()
check.raises("forward has the parameters tokens: inputs", m.generate, bare, { inputs = { source = o.inputs.source }, axis = T, prompt = { 0 }, quiet = true })
check.done()
