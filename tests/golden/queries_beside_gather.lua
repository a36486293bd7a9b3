-- args: MLUA_DEBUG=3 check --device h200 SCRIPT --mesh cp=2 --layout zero=false </dev/null 2>&1 | sed -nE "s/^step [0-9]+: (kernel|gemm|collective|wait|attention) +([^ ]*) *of .*/\1 \2/p" | sed "s/ $//; /^attention/q"
-- Ranks gather keys and values as one, and meanwhile multiply and turn the queries: their product is none of the keys'.
local m = require "mlua"
local A = m.axes { batch = 2, seq = 4096, embed = 2048, heads = 16, head_dim = 128 }
local q, k, v = m.param { A.embed, A.heads, A.head_dim }, m.param { A.embed, A.heads, A.head_dim }, m.param { A.embed, A.heads, A.head_dim }
m.use_layout(m.layout.megatron {})
m.compile(function(i)
  local x = i.x:cast "bf16"
  local function of(w) return x:dot(w:cast "bf16", "embed") end
  return m.attention(m.rope(of(q)), m.rope(of(k)), of(v), { causal = true }):cast("f32"):sum()
end, { x = { A.batch, A.seq, A.embed } })
