-- Increments of models/MODEL.lua (MODEL, SETTINGS as "key=value ..." in the environment) against its whole program: prints the largest
-- difference of a log probability, and a sum of log probabilities, by which runs of
-- several ranks are compared with one.
local m = require "mlua"
local core = require "mlua.core"
local root = os.getenv "ROOT" or "."
local check, increments, drawn = dofile(root .. "/tests/lua/lib/check.lua"), dofile(root .. "/tests/lua/lib/increments.lua"), dofile(root .. "/tests/lua/lib/drawn.lua")
local options, captured = core.options, nil
local settings = "batch=1 seq=40 vocab=64 " .. (os.getenv "SETTINGS" or "")

function core.options()
  local o = options()
  for key, value in settings:gmatch "([%w_]+)=(%S+)" do table.insert(o.overrides, { key, (value:gsub("_", " ")) }) end
  return o
end
m.train, m.generate = function(o) captured = o end, function() end
dofile(("%s/models/%s.lua"):format(root, os.getenv "MODEL"))
core.options = options
local o = captured
m.use_layout(o.layout, "m.train")

local model = { A = { batch = core.axis(o.batch.name, 1), seq = o.seq, vocab = m.axis("vocab", 64) } }
function model.forward(tokens) return o.model(tokens) end

-- Initial weights are small: larger ones let each layer have a say.
for _, p in ipairs(m.parameters(o.model)) do
  local values = p:get()
  for k = 1, #values do values[k] = 3 * values[k] end
  if m.attributes(p).decay then p:set(values) end
end

local result = increments(model, function() return drawn.whole(model, 1, "f32") end, drawn.numbers(tonumber(os.getenv "SEED" or "") or 1))
if m.rank() == 0 then
  core.write(("off %.3g in %d positions, argmax %d; sum %.9g\n"):format(result.worst, result.positions, result.argmax, result.sum))
end
check.equal(result.worst <= 1e-5, true, ("off by %g at %s"):format(result.worst, result.where))
check.equal(result.argmax, 0, "positions with another argmax")
check.done()
