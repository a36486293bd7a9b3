-- Increments of attention over keys of another length than its queries: before and behind, keys are cut off (< 0) or learned ones added
-- (> 0). What has no increment is refused; what has one agrees with the whole program, and does not look ahead.
local core = require "mlua.core"
local m = require "mlua"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check, drawn = dofile(root .. "tests/lua/lib/check.lua"), dofile(root .. "tests/lua/lib/drawn.lua")
local increments = dofile(root .. "tests/lua/lib/increments.lua")
local A = m.axes { batch = 1, seq = 20, embed = 8, vocab = 19, heads = 2, head_dim = 4 }
local function param(name, ...) return m.param { name = name, init = 0.6, ... } end
local table_, wq, wk, wv, wo = param("t", A.vocab, A.embed), param("wq", A.embed, A.heads, A.head_dim), param("wk", A.embed, A.heads, A.head_dim), param("wv", A.embed, A.heads, A.head_dim), param("wo", A.heads, A.head_dim, A.embed)
local sink, head = param("sink", A.heads, A.head_dim), param("head", A.embed, A.vocab)

local function model_of(front, back)
  local model = { A = A }
  function model.forward(tokens, A)
    local h = table_:gather(tokens, "vocab")
    local function keys(x)
      local n = x:size "seq"
      if front < 0 then x = x:slice("seq", -front, n) end
      if back < 0 then x = x:slice("seq", 0, x:size "seq" + back) end
      local list = { x }
      if front > 0 then table.insert(list, 1, sink:broadcast { A.batch, m.axis("seq", front), A.heads, A.head_dim }) end
      if back > 0 then list[#list + 1] = sink:broadcast { A.batch, m.axis("seq", back), A.heads, A.head_dim } end
      return (#list > 1 and m.concat(list, "seq") or x):rename("seq", "kv_seq")
    end
    local y = m.attention(h:dot(wq, "embed"), keys(h:dot(wk, "embed")), keys(h:dot(wv, "embed")), { causal = true })
    return (h + y:dot(wo, "heads", "head_dim")):dot(head, "embed")
  end
  return model
end

local accepted = 0
for _, case in ipairs { { 0, -1 }, { 1, -1 }, { 1, 0 }, { 2, -1 }, { 0, 1 } } do
  local model, what = model_of(case[1], case[2]), ("%d before, %d behind"):format(case[1], case[2])
  local change = drawn.oracle(model, 1)
  local ok, result = pcall(increments, model, function() return drawn.whole(model, 1, "f32") end, drawn.numbers(3))
  if ok then
    accepted = accepted + 1
    check.equal(change < 1e-9, true, what .. ": does not look ahead")
    check.near(result.worst, 0, 1e-5, what)
  else
    check.equal(tostring(result):find("attention over 2%d keys of 20 positions") ~= nil, true, what .. ": " .. tostring(result))
  end
end
check.equal(accepted >= 2, true, "cases with an increment")
check.done()
