-- --batch-invariant: what is computed of a sequence is the same to the bit whatever is decoded beside it, also where it gives its place to
-- others and continues.
local m = require "mlua"
local Decoder = require "mlua.decode"
local root = require("mlua.core").options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")

local A = m.axes { batch = 1, seq = 64, embed = 48, heads = 2, head_dim = 24, ffn = 96, vocab = 90 }
local Model = m.module("Model", function(self)
  self.table, self.wo = m.param { A.vocab, A.embed }, m.param { A.heads, A.head_dim, A.embed }
  self.wq, self.wk, self.wv = m.param { A.embed, A.heads, A.head_dim }, m.param { A.embed, A.heads, A.head_dim }, m.param { A.embed, A.heads, A.head_dim }
  self.up, self.down = m.param { A.embed, A.ffn }, m.param { A.ffn, A.embed }
end)
function Model:forward(tokens)
  local x = self.table:gather(tokens, "vocab")
  local q, k, v = x:dot(self.wq, "embed"), x:dot(self.wk, "embed"), x:dot(self.wv, "embed")
  x = x + m.attention(m.rope(q), m.rope(k), v, { causal = true }):dot(self.wo, "heads", "head_dim")
  x = x + m.gelu(x:dot(self.up, "embed")):dot(self.down, "ffn")
  return 8 * x:dot(self.table, "embed")
end
local model = Model()

local function new() return Decoder.new(model, { seq = A.seq, slots = 3, invariant = true, chunk = 16 }) end
local function asked(seed) return { temperature = 1, seed = seed } end
local function prompt(n)
  local ids = {}
  for i = 1, n do ids[i] = (i * 7 + n) % 90 end
  return ids
end

-- A sequence alone: its tokens' log probabilities, to the last bit.
local function alone(n, seed, count)
  local d, list = new(), {}
  local s = d:open(prompt(n), asked(seed))
  while #list < count do
    local r = d:step({ s })[1]
    if r then list[#list + 1] = ("%d %a"):format(r.id, r.logprob) end
  end
  d:close(s)
  return table.concat(list, " ")
end

local d, got = new(), { {}, {}, {} }
local lengths, sequences = { 21, 3, 40 }, {}
for i, n in ipairs(lengths) do
  sequences[i] = d:open(prompt(n), asked(i))
end
for round = 1, 60 do
  if round == 8 then -- the first gives its place to a fourth one, and continues
    local first = sequences[1]
    d:close(first)
    local other = d:open(prompt(9), asked(9))
    for _ = 1, 3 do d:step { other } end
    d:close(other)
    local a = asked(1)
    a.prompt = lengths[1]
    sequences[1] = d:open(first.ids, a)
  end
  local list, of = {}, {}
  for i, s in ipairs(sequences) do
    if #got[i] < 12 and (round + i) % 4 > 0 then list[#list + 1], of[#of + 1] = s, i end
  end
  for i, r in ipairs(#list > 0 and d:step(list) or {}) do
    if r then
      local to = got[of[i]]
      to[#to + 1] = ("%d %a"):format(r.id, r.logprob)
    end
  end
end
for i, n in ipairs(lengths) do check.equal(table.concat(got[i], " "), alone(n, i, 12), ("sequence %d"):format(i)) end
for key in pairs(d.programs) do check.equal(key == "3 x 1" or key == "1 x 16", true, "the program " .. key) end
check.done()
