-- Under cp = "dynamic": forward passes over whole windows of a batch, whose sums groups of ranks add up each for itself.
local core = require "mlua.core"
local m = require "mlua"
local dynamic = require "mlua.dynamic"
local step_of = require "mlua.train_step"

local Sums = {}
Sums.__index = Sums

-- Over `count` batches, each of which fill(i) makes the one that the data hold; `number` is that of the step.
function Sums:run(runner, count, number, fill)
  local first = true
  self.program:refresh()
  for i = 0, count - 1 do
    fill(i)
    first = runner.evaluate(self.program, self.ranks, { step = number }, first)
  end
  if first then runner.nothing(self.program, { step = number }) end
  self.program:finish()
  return self.sum {}
end

---The programs of a window and of the sums: {program =, run =}.
---@param o TrainOptions
---@param name string
---@param trace fun(shape: table, feeds: table): table<string, Tensor> sums over a window, by name
---@param training? boolean
return function(o, name, trace, training)
  local shape, ranks = dynamic.window(o)
  local inputs, names = step_of.forward_inputs(shape), {}
  inputs.first = { dtype = "bool" }
  local window = m.compile(function(feeds)
    for key, value in pairs(trace(shape, feeds)) do
      local sum = step_of.accumulator(("%s's %s"):format(name, key), {})
      sum:assign(core.where(feeds.first, 0, sum:read()) + value)
      names[#names + 1] = key
    end
  end, inputs, { name = name, group = ranks, training = training })
  local sum = m.compile(function()
    local outputs = {}
    for _, key in ipairs(names) do outputs[key] = step_of.accumulator(("%s's %s"):format(name, key)):read() end
    return outputs
  end, {}, { name = name .. "'s sums" })
  return setmetatable({ program = window, sum = sum, ranks = ranks }, Sums)
end
