-- args: MLUA_VERIFY=1 check --device h200 SCRIPT </dev/null 2>&1 | grep -e "^scan" -e shared
-- A scan of six inputs, of which five are wide: rows of a thread are as few as leave a block's shared memory room for two stages of them.
local m = require "mlua"
local A = m.axes { batch = 8, seq = 1024, embed = 4096 }
local inputs = { a = { A.batch, A.seq, A.embed, dtype = "bf16" } }
for _, name in ipairs { "b", "c", "d", "e", "f" } do inputs[name] = { A.batch, A.seq, A.embed } end
m.compile(function(x)
  return { y = m.scan(function(h, t)
    local s = h * m.sigmoid(t.a) + t.b * t.c + t.d * t.e + t.f
    return s, s
  end, { axis = "seq", state = m.zeros { A.batch, A.embed }, inputs = x }) }
end, inputs, { name = "scan" })
