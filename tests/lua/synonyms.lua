-- What errors recommend in the place of other libraries' names (stdlib/synonyms.lua): every piece of code there is
-- run, on tensors of which the table's header speaks; of those that compute more than they say, the values are checked.
local m = require "mlua"
local core = require "mlua.core"
local synonyms = require "mlua.synonyms"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")

local A = m.axes { batch = 2, seq = 8, kv_seq = 8, embed = 16, heads = 4, head_dim = 4, ffn = 6, vocab = 10 }

local Block = m.module("Block", function(self) self.w = m.param { A.embed, m.axis("hidden", 16) } end)
function Block:forward(x) return x:dot(self.w, "embed"):rename("hidden", "embed") end
local Net = m.module("Net", function(self) self.block = Block() end)
function Net:forward(x) return self.block(x) end
local model = Net()

local w, b = m.param { A.embed, A.ffn, name = "w" }, m.param { A.ffn, name = "b" }
local wte = m.param { A.vocab, A.embed, name = "wte" }

local function environment(i)
  return setmetatable({
    m = m, math = math, select = select, ipairs = ipairs, table = table, A = A, model = model, Block = Block,
    w = w, b = b, wte = wte, x = i.x, y = i.y, q = i.q, k = i.q * 2, v = i.q * 3, h = m.zeros { A.batch, m.axis("seq", 1), A.embed },
    ids = i.ids, targets = i.ids, logits = i.logits, mask = m.gt(i.x, 0), loss = i.x:dot(w, "embed"):mean() + b:sum(),
  }, { __index = function(_, name) error("the code speaks of " .. name, 0) end })
end

-- The pieces of code of a row; an expression that begins with a method goes on from the one before it.
local function pieces(text)
  local list = {}
  for code in text:gmatch "`([^`]*)`" do
    if code:sub(1, 1) ~= ":" then list[#list + 1] = code end
  end
  return list
end

-- Run a piece as an expression or as a statement; gives what it returns.
local function run(code, env)
  local fn = load("return " .. code, "=" .. code, "t", env) or assert(load(code, "=" .. code, "t", env))
  return fn()
end

local inputs = {
  x = { A.batch, A.seq, A.embed }, y = { A.batch, A.seq, A.embed }, q = { A.batch, A.seq, A.heads, A.head_dim },
  ids = { A.batch, A.seq, dtype = "i32" }, logits = { A.batch, A.seq, A.vocab },
}
local function numbers(count, seed)
  local list = {}
  for i = 1, count do list[i] = ((i * 7919 + seed * 104729) % 2003) / 1000 - 1 end
  return list
end
local ids = {}
for i = 1, 16 do ids[i] = i * 3 % 10 end
local data = { x = numbers(256, 1), y = numbers(256, 2), q = numbers(256, 3), ids = ids, logits = numbers(160, 4) }

-- Every piece runs, and what it gives has values.
local count, names = 0, {}
local program = m.compile(function(i)
  local outputs = {}
  for _, row in ipairs(synonyms.rows) do
    for name in row[1]:gmatch "%S+" do
      check.equal(names[name], nil, name .. " is in the table once; before it was in the row of " .. tostring(names[name]))
      if row[3] ~= "method" and row[3] ~= "module" then check.equal(rawget(m, name), nil, name .. " is no function of mlua") end
      if row[3] ~= "function" and row[3] ~= "module" then check.equal(core.tensor_methods[name], nil, name .. " is no method of tensors") end
      names[name] = row[1]
    end
    for _, code in ipairs(pieces(row[2])) do
      local ok, result = pcall(run, code, environment(i)) -- statements set x and h
      if not ok then error(("%s: %s: %s"):format(row[1], code, tostring(result)), 0) end
      count = count + 1
      if core.is_tensor(result) and getmetatable(result) == "tensor" then
        outputs[code] = m.where(m.is_finite(result:cast "f32"), 1, 0):sum()
      end
    end
    check.equal(row[2]:find("`", 1, true) ~= nil or row[2]:find "[%-m]" ~= nil, true, row[1] .. " has a help")
  end
  return outputs
end, inputs)
assert(count > 120, "the table has pieces of code")
local positive = { x = {}, y = data.y, q = data.q, ids = ids, logits = data.logits } -- for logarithms
for i, value in ipairs(data.x) do positive.x[i] = value + 1.1 end
for code, finite in pairs(program(positive)) do
  if not (finite > 0) then error(code .. " gives no finite value", 0) end
end

-- What some of them are said to compute.
local function column(f, size) -- f(element, place) of x's last axis for each row
  local out = {}
  for row = 0, 15 do
    for i = 1, size or 16 do out[#out + 1] = f(row, i) end
  end
  return out
end
local function at(list, row, i) return list[row * 16 + i] end
local function sorted(row, how)
  local list = {}
  for i = 1, 16 do list[i] = { at(data.x, row, i), i } end
  table.sort(list, function(a, c) return a[1] < c[1] end)
  return list[how][1], list[how][2]
end
local function reduced(f) return column(function(row) return f(row) end, 1) end
local function total(row, f)
  local sum = 0
  for i = 1, 16 do sum = sum + f(at(data.x, row, i), at(data.y, row, i)) end
  return sum
end
-- A row of x is a position (batch, seq); `place` counts positions within a sample from 0.
local function moved(to) -- the tensor whose row r is row to(r % 8) of the same sample; nil: zeros
  return column(function(row, i)
    local from = to(row % 8)
    return from and at(data.x, row // 8 * 8 + from, i) or 0
  end)
end
local meanings = {
  flip = { moved(function(place) return 7 - place end) },
  roll = { moved(function(place) return (place + 1) % 8 end), moved(function(place) return place > 0 and place - 1 or nil end) },
  norm = { reduced(function(row) return math.sqrt(total(row, function(a) return a * a end)) end) },
  argsort = { column(function(row, i) return select(2, sorted(row, i)) - 1 end) },
  median = { reduced(function(row) return (sorted(row, 9)) end) },
  squeeze = { {} }, -- below: the first position of each sample
  logaddexp = { column(function(row, i) return math.log(math.exp(at(data.x, row, i)) + math.exp(at(data.y, row, i))) end) },
  log2 = { false, column(function(row, i) return 2 ^ at(data.x, row, i) end) },
  sinh = { column(function(row, i) return math.tan(at(data.x, row, i)) end), column(function(row, i)
    local e = at(data.x, row, i)
    return (math.exp(e) - math.exp(-e)) / 2
  end) },
  l1_loss = { { (function()
    local sum = 0
    for i = 1, 256 do sum = sum + math.abs(data.x[i] - data.y[i]) end
    return sum / 256
  end)() } },
  cosine_similarity = { reduced(function(row)
    local norms = total(row, function(a) return a * a end) * total(row, function(_, c) return c * c end)
    return total(row, function(a, c) return a * c end) / math.sqrt(norms)
  end) },
  bincount = { {} }, -- below
  eye = { (function()
    local list = {}
    for i = 0, 63 do list[i + 1] = i // 8 == i % 8 and 1 or 0 end
    return list
  end)() },
  tril = { (function()
    local list = {}
    for i = 0, 63 do list[i + 1] = i // 8 >= i % 8 and 1 or 0 end
    return list
  end)() },
  linspace = { { 0, 1 / 7, 2 / 7, 3 / 7, 4 / 7, 5 / 7, 6 / 7, 1 } },
}
do
  local counts = {}
  for i = 1, 10 do counts[i] = 0 end
  for _, id in ipairs(ids) do counts[id + 1] = counts[id + 1] + 1 end
  meanings.bincount[1] = counts
  for sample = 0, 1 do
    for i = 1, 16 do table.insert(meanings.squeeze[1], at(data.x, sample * 8, i)) end
  end
end
local checked = m.compile(function(i)
  local env, outputs = environment(i), {}
  for _, row in ipairs(synonyms.rows) do
    for name in row[1]:gmatch "%S+" do
      for k, expected in pairs(meanings[name] or {}) do
        if expected then
          local result = run(pieces(row[2])[k], env):cast "f32"
          outputs[name .. k] = result:has "embed" and result:has "seq" and result:permute("batch", "seq", "embed") or result
        end
      end
    end
  end
  return outputs
end, inputs)(data)
for name, list in pairs(meanings) do
  for k, expected in pairs(list) do
    if expected then
      local actual = checked[name .. k]
      assert(actual, name .. " is in the table")
      check.all(type(actual) == "number" and { actual } or actual:table(), expected, 1e-5, name .. k)
    end
  end
end

-- A draw of softmax(logits): shares of many.
local wide = m.axis("draw", 20000)
local scores = { 0, 1, 2 }
local drawn = m.compile(function(i)
  local logits = i.scores:broadcast { wide, m.axis("vocab", 3) }
  for _, row in ipairs(synonyms.rows) do
    if row[1]:find "multinomial" then
      return m.one_hot(run(pieces(row[2])[1], { m = m, logits = logits }), m.axis("vocab", 3)):mean "draw"
    end
  end
end, { scores = { m.axis("vocab", 3) } }) { scores = scores }
for k, share in ipairs(drawn:table()) do check.near(share, math.exp(scores[k]) / (1 + math.exp(1) + math.exp(2)), 0.02, "a draw") end

-- Options: each name is told by some function, and what it recommends is one of that function's.
local q, logits, tokens = m.zeros { A.seq, A.heads, A.head_dim }, m.zeros { A.seq, A.vocab }, m.zeros({ A.seq }, "i32")
local takers = {
  m.train, m.adamw, m.sgd, m.cosine, m.wsd, m.param, m.rms_norm, m.layer_norm, m.moe,
  function(o) return m.attention(q, q, q, o) end, function(o) return m.gelu(logits, o) end,
  function(o) return m.cross_entropy(logits, tokens, o) end, function(o) return m.generate(model, o) end,
  function(o) return m.conv(logits, logits, o) end,
  function(o) return m.compile(function(i) return i.x end, { x = {} }, o) end,
}
for _, row in ipairs(synonyms.options) do
  for name in row[1]:gmatch "%S+" do
    local told = false
    for _, fn in ipairs(takers) do
      local ok, message = pcall(fn, { [name] = 1 })
      if not ok and tostring(message):find("has no option", 1, true) and message.help == row[3] then told = true end
    end
    check.equal(told, true, ("the option %s in the row of %s"):format(name, row[2]))
  end
end

for _, row in ipairs(synonyms.options) do
  local code = row[1]:find "attn_mask" and row[3]:match "^score = (function.- end)"
  if code then
    local both = m.compile(function(i)
      local score = assert(load("return " .. code, code, "t", { m = m, math = math }))()
      return { mask = m.attention(i.q, i.q, i.q, { score = score }), causal = m.attention(i.q, i.q, i.q, { causal = true }) }
    end, { q = inputs.q }) { q = data.q }
    check.all(both.mask:table(), both.causal:table(), 1e-5, code)
  end
end

-- Names with the same help as a function and as a method, near misses, tables of functions, methods and functions.
local x = m.zeros { A.seq, A.embed }
check.raises("products over the named axes", function() return m.einsum("sd,df->sf", x, w) end)
check.raises("products over the named axes", function() return x:matmul(w) end)
check.raises("products over the named axes", function() return w:matmul(x) end)
check.raises("einsum: x:dot(w, \"embed\")", function() return m.einsun("sd,df->sf", x, w) end)
check.raises('mlua has no function "nn.Linear"', function() return m.nn.Linear(16, 64) end)
check.raises("a layer is a parameter and a product", function() return m.nn.Linear(16, 64) end)
check.raises("all functions are in one table: m.softmax", function() return m.nn.functional.softmax(x, "seq") end)
check.raises("it is a method of tensors: x:argmax(...)", function() return m.argmax(x, "seq") end)
check.raises("m.maximum(x, y) takes the larger of two", function() return m.max(x, "seq") end)
check.raises("a parameter keeps none", function() return w.grad end)
check.raises("it is a function: m.layer_norm(x, ...)", function() return x:layer_norm() end)
check.raises("t:size(\"seq\") is the size of the axis", function() return x.seq end)
check.raises("did you mean assign?", function() return w:asign(x) end)
check.raises("no op changes one: x = x:sigmoid(...)", function() return x:sigmoid_() end)
check.raises("no op changes one: operators", function() return x:multiply_(2) end)
check.raises("mlua editor prints all", function() return m.quux end)
check.done()
