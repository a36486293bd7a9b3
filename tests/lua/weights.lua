-- Weights of 8 bits: which parameters products read so, what is computed by them beside the same values in f32, and what is freed.
local m = require "mlua"
local core = require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")
m.compute_dtype "f32"

local A = m.axes { embed = 40, ffn = 56, vocab = 32, seq = 16, few = 8, experts = 4, heads = 2, head_dim = 20 }
local Model = m.module("Model", function(self)
  self.table, self.head = m.param { A.vocab, A.embed }, m.param { A.vocab, A.embed }
  self.wq, self.wo = m.param { A.embed, A.heads, A.head_dim }, m.param { A.heads, A.head_dim, A.embed }
  self.up, self.down = m.param { A.embed, A.ffn }, m.param { A.ffn, A.embed }
  self.router, self.out = m.param { A.embed, A.experts }, m.param { A.experts, A.embed }
  self.narrow, self.back = m.param { A.embed, A.few }, m.param { A.few, A.embed }
  self.both = m.param { A.embed, A.ffn }
end)
function Model:forward(tokens)
  local x = self.table:gather(tokens, "vocab")
  local q = x:dot(self.wq, "embed")
  x = x + m.attention(q, q, q, { causal = true }):dot(self.wo, "heads", "head_dim")
  x = x + m.gelu(x:dot(self.up, "embed")):dot(self.down, "ffn")
  local chosen = x:dot(self.router, "embed"):top_k("experts", 4, A.experts)
  x = x + chosen:dot(self.out, "experts") + x:dot(self.narrow, "embed"):dot(self.back, "few")
  x = x + x:dot(self.both, "embed"):dot(self.both, "ffn") -- summed over either axis
  return x:dot(self.head, "embed")
end
local model = Model()
m.parameters(model)
for i, name in ipairs { "table", "head", "wq", "wo", "up", "down", "router", "out", "narrow", "back", "both" } do
  local values = model[name]:get():table()
  for j in ipairs(values) do values[j] = math.sin(12.9898 * j + i) * 0.4 end
  model[name]:set(values)
end
local ids = {}
for i = 1, 16 do ids[i] = i * 7 % 32 end
local narrowed = { wq = 40, wo = 40, up = 56, down = 40, narrow = 8 } -- outputs

-- What rounding to the format gives in f64, each output by itself.
local function e4m3(x)
  local size = math.abs(x)
  local unit = size < 2 ^ -6 and 2 ^ -9 or 2 ^ (math.floor(math.log(size, 2) + 1e-12) - 3)
  local n = size / unit
  local whole = math.floor(n)
  if n - whole > 0.5 or (n - whole == 0.5 and whole % 2 == 1) then whole = whole + 1 end
  return (x < 0 and -1 or 1) * whole * unit
end
local function i8(x)
  local whole = math.floor(x)
  if x - whole > 0.5 or (x - whole == 0.5 and whole % 2 == 1) then whole = whole + 1 end
  return whole
end
local function f32(x) return (string.unpack("f", string.pack("f", x))) end
local function rounded(p, outputs, largest, round) -- outputs are last in memory
  local values = p:get():table()
  for o = 1, outputs do
    local most = 0
    for i = o, #values, outputs do most = math.max(most, math.abs(values[i])) end
    local scale = f32(most / largest)
    for i = o, #values, outputs do values[i] = round(f32(values[i] / scale)) * scale end
  end
  return values
end

local plain = m.score(model, { ids }, { seq = A.seq })[1]
local by = {}
for _, format in ipairs { "int8", "fp8" } do by[format] = m.score(model, { ids }, { seq = A.seq, weights = format })[1] end
local before, after = core.fill_weights "i8"
local elements, outputs = 0, 0
for name, count in pairs(narrowed) do
  local n = 1
  for _, axis in ipairs(m.axes_of(model[name])) do n = n * axis.size end
  elements, outputs = elements + n, outputs + count
end
check.equal(before, 4 * elements, "bytes of the parameters that are narrowed: products' weights alone, summed over one set of 16 terms or more")
check.equal(after, elements + 4 * outputs, "bytes of values and scales")

local originals = {}
for name in pairs(narrowed) do originals[name] = model[name]:get() end
for format, how in pairs { int8 = { 127, i8 }, fp8 = { 448, e4m3 } } do
  for name, count in pairs(narrowed) do
    model[name]:set(originals[name])
    model[name]:set(rounded(model[name], count, how[1], how[2]))
  end
  local same = m.score(model, { ids }, { seq = A.seq })[1]
  check.near(by[format].logprob, same.logprob, 2e-5, format .. ": as by the rounded values in f32")
  check.equal(math.abs(plain.logprob - by[format].logprob) > 1e-6, true, format .. " rounds")
end
for name in pairs(narrowed) do model[name]:set(originals[name]) end

-- Increments read the same weights, and later values of the parameters.
local text = m.generate(model, { prompt = { 1, 2, 3 }, n = 1, tokens = 8, seq = A.seq, temperature = 0, quiet = true, weights = "int8" })[1]
local whole = m.generate(model, { prompt = { 1, 2, 3 }, n = 1, tokens = 8, seq = A.seq, temperature = 0, quiet = true, weights = "int8", increment = false })[1]
for i, id in ipairs(whole.ids) do
  check.equal(text.ids[i], id, "token " .. i)
  check.near(text.logprobs[i], whole.logprobs[i], 1e-5, "its log probability")
end
model.down:set(0.0)
local zero, zero8 = m.score(model, { ids }, { seq = A.seq })[1], m.score(model, { ids }, { seq = A.seq, weights = "int8" })[1]
check.near(zero.logprob, zero8.logprob, 0.05 * math.abs(zero.logprob), "after a parameter was set, to zeros")
check.equal(math.abs(zero8.logprob - by.int8.logprob) > 1e-4, true, "the new value is read")
check.raises("weights are held as int8 or fp8", m.score, model, { ids }, { seq = A.seq, weights = "int4" })
check.done()
