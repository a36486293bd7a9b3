-- Names that were never set: each message says what was probably meant.
local m = require "mlua"
local cfg = m.config { layers = 2, embed = 8, steps = 3 }
local A = m.axes { embed = cfg.embed, heads = 2 }
local weights = m.param { A.embed, name = "weights" }

local function try(fn, ...) print((select(2, pcall(fn, ...)))) end

try(function() return m.attention(weights, weights, weights, { causal = True }) end)
try(function() return { None, weights } end)
try(function() return softmax(weights, "embed") end)
try(function() return sqrt(weights) end)
try(function() return rms_nrom { A.embed } end)
try(function() return weights:sum(heads) end)
try(function() return cfg.layers, A.heads, embed, weights end)
try(function() return m.exp(weigths) + weights end)
try(function() return torch.nn.Linear(3, 4) end)
try(function() return pritn(cfg.steps) end)
try(function() return forgotten end)
try(function() if debugging then return 1 end end)

do
  local inner = 1
end
try(function() return inner end)
try(function() return helper(1) end)
local function helper(x) return x end
try(function() return later(1) end)
function later(x) return x end
print(helper(1), later(2), _VERSION)

try(coroutine.wrap(function()
  coroutine.yield(1)
  return weigths
end))
local thread = coroutine.wrap(function()
  coroutine.yield(1)
  return weigths
end)
thread()
try(thread)
try(load("local x = 1\nreturn x + undefind", "=text"))
try(load("return undefind", "=text", "t", setmetatable({}, { __index = _G })))
try(function() return _G.undefind end)
try(function() return unpack { 1, 2 } end)
try(function() return arg[1] end)
try(function() return nill end)
try(function() return { none, weights } end)
