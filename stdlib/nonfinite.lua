-- What made a loss or a gradient norm not finite.
local core = require "mlua.core"
local m = require "mlua"
local step_of = require "mlua.train_step"

local nonfinite = {}

-- "nan" whatever its sign bit is, so that a message is the same on every machine.
function nonfinite.plain(x) return x ~= x and "nan" or tostring(x) end

-- Where the numbers went bad: run the forward pass again with a probe at every module.
function nonfinite.explain(o, data, before, step, loss, norm)
  local paths = {}
  local probe = m.compile(function(feeds)
    local outputs = {}
    if o.accum > 1 then step_of.cut_batch(o, feeds) end
    m.context.probe = function(path, x)
      paths[#paths + 1] = path
      outputs[("%06d"):format(#paths)] = core.is_finite(x:cast "f32"):cast("f32"):min()
    end
    local total, count = step_of.loss(o, feeds)
    outputs.total, outputs.count = total, core.is_tensor(count) and count or core.full({}, count)
    m.context.totals = {}
    core.take_updates() -- no state changes
    return outputs
  end, step_of.forward_inputs(o), { name = "probe", training = true }) -- which draws what the step drew
  local total, count = 0, 0
  local function culprit()
    for micro = 0, o.accum - 1 do
      data.fill(step, micro, false, probe)
      local finite = probe(step_of.forward_feeds(o, data, before + step, micro))
      total, count = total + finite.total, count + finite.count
      for i, path in ipairs(paths) do
        if finite[("%06d"):format(i)] ~= 1 then return path == "" and "the model" or path end
      end
    end
  end
  local path = culprit()
  local where = path and "the first output that is not finite is that of " .. path
    or count == 0 and "the loss counts nothing: the count that belongs to its sum is 0"
    or total - total ~= 0 and "every module's output is finite, and the loss is not"
    or "every module's output is finite: the backward pass overflows"
  core.fail(("step %d: loss %s, gradient norm %s: %s"):format(step, nonfinite.plain(loss), nonfinite.plain(norm), where), {
    help = "the parameters still hold their values of the step before; try a lower lr, longer warmup or clip",
  })
end

return nonfinite
