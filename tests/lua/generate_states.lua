-- States that forward assigns are read while text is generated, and not assigned.
local m = require "mlua"
local root = require("mlua.core").options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")

local A = m.axes { batch = 1, seq = 24, embed = 16, heads = 2, head_dim = 8, vocab = 30 }
local Model = m.module("Model", function(self)
  self.table, self.wo = m.param { A.vocab, A.embed }, m.param { A.heads, A.head_dim, A.embed }
  self.wq, self.wk = m.param { A.embed, A.heads, A.head_dim }, m.param { A.embed, A.heads, A.head_dim }
  self.seen = m.buffer { A.vocab, init = 0 }
end)
function Model:forward(tokens)
  local x = self.table:gather(tokens, "vocab")
  local q, k = x:dot(self.wq, "embed"), x:dot(self.wk, "embed")
  x = x + m.attention(m.rope(q), m.rope(k), k, { causal = true }):dot(self.wo, "heads", "head_dim")
  local before = self.seen:read()
  self.seen:assign(before + 1)
  return 9 * x:dot(self.table, "embed") + before
end
local model = Model()
model.seen:set { 8, 0, -8, 4, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, -9, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }

local function answers(increment)
  return m.generate(model, { prompts = { { 3, 1, 4 }, { 7 } }, n = 2, seed = 2, tokens = 12, temperature = 2, seq = A.seq, quiet = true, increment = increment })
end
local steps, whole = answers(true), answers(false)
for i, r in ipairs(steps) do
  check.equal(table.concat(r.ids, " "), table.concat(whole[i].ids, " "))
  check.near(r.logprob, whole[i].logprob, 1e-5)
end
check.equal(model.seen:get()[1], 8)
check.equal(#m.generate(model, { prompt = { 3 }, tokens = 100, seq = A.seq, slide = false, quiet = true }), 24) -- the context
check.done()
