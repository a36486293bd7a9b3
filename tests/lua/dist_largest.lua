-- args: run --device cpu -n 4
-- The gradient of largest elements that lie with other ranks than what they are the largest of: it goes to the elements that equal
-- them, wherever a compiler rounds a product and a sum together. Each adds 1 to the gradient of what all have in common.
local m, core = require "mlua", require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")
local A = m.axes { batch = 8, seq = 16, embed = 24 }
local layout = m.layout {
  mesh = { { "dp", 2 }, { "tp", 2 } }, params = { dp = { "embed" } }, acts = { dp = { "seq", "batch" }, tp = { "embed" } },
}
local function wave(axes, key) return m.uniform(axes, key) + 0.5 end
local gain, bias = m.param { A.embed, name = "gain", init = wave }, m.param { A.embed, name = "bias", init = wave }
local program = m.compile(function(feeds)
  local x = feeds.x + 0.5 * m.tanh(feeds.x)
  local centred = x - x:mean "embed"
  local y = centred * m.rsqrt((centred * centred):mean "embed" + 1e-5) * gain + bias
  local total = y:max("seq"):sum()
  local gradients = m.grad(total, { bias, gain })
  return { total = total, bias = gradients[1], gain = gradients[2] }
end, { x = { A.batch, A.seq, A.embed } }, { layout = layout })
local x, each = {}, {}
for i = 1, 8 * 16 * 24 do x[i] = math.sin(0.37 * i * i) end
for i = 1, 24 do each[i] = 8 end
check.all(program { x = x }.bias, each, 1e-6, "elements that are the largest")
check.done()
