-- args: check --device h200 --mesh tp=2,dp=4 SCRIPT < /dev/null 2>&1 | grep -A3 ^ranks
-- Neither mesh axis divides what it splits: how much each rank holds. Heads fewer than ranks are whole on each.
local m = require "mlua"
local A = m.axes { batch = 10, embed = 64, vocab = 50257, kv_heads = 1 }
local w, k = m.param { A.embed, A.vocab, name = "w" }, m.param { A.embed, A.kv_heads, name = "k" }
local layout = m.layout {
  mesh = { { "dp", 1 }, { "tp", 1 } },
  params = { tp = { "kv_heads", "vocab" } },
  acts = { dp = { "batch" }, tp = { "kv_heads", "vocab" } },
}
local step = m.compile(function(i)
  local total, count = m.cross_entropy(i.x:dot(w, "embed"), i.label, { axis = "vocab" })
  local loss = total / count + i.x:dot(k, "embed"):sum()
  for n, g in ipairs(m.grad(loss, { w, k })) do
    local p = n == 1 and w or k
    p:assign(p:read() - 0.1 * g)
  end
  return { loss = loss }
end, { x = { A.batch, A.embed }, label = { A.batch, dtype = "i32" } }, { layout = layout, name = "step" })
