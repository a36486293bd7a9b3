-- args: check --device h200 SCRIPT < /dev/null 2>&1 | grep -A1 "^products in"
-- Float inputs make no product f32; where the script says f32, the lines are told.
local m = require "mlua"
local A = m.axes { batch = 64, embed = 256, ffn = 512 }
local Net = m.module("Net", function(self)
  self.up, self.down, self.side = m.param { A.embed, A.ffn }, m.param { A.ffn, A.embed }, m.param { A.embed, A.ffn }
end)
function Net:forward(x)
  local h = m.gelu(x:dot(self.up, "embed")):dot(self.down, "ffn")
  local wide = h:cast "f32"
  local scores = wide:dot(wide:rename("batch", "other"), "embed")
  return h + (x:dot(self.side:read(), "embed")):sum("ffn"):cast "bf16" + scores:sum("other"):cast "bf16"
end
local net = Net()
m.compile(function(i)
  return { loss = (net(i.x) - i.y):sum() }
end, { x = { A.batch, A.embed }, y = { A.batch } })
