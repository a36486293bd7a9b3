-- What made a loss or a gradient norm not finite.
local core = require "mlua.core"
local m = require "mlua"
local step_of = require "mlua.train_step"
local window_sums = require "mlua.window_sums"

local nonfinite = {}

-- "nan" whatever its sign bit is, so that a message is the same on every machine.
function nonfinite.plain(x) return x ~= x and "nan" or tostring(x) end

-- How many values of what each module gives are not finite, beside the loss's sum and count. `paths` becomes the modules' paths.
local function probe(shape, feeds, paths)
  local sums = {}
  m.context.probe = function(path, x)
    paths[#paths + 1] = path
    sums[("%06d"):format(#paths)] = core.where(core.is_finite(x:cast "f32"), 0, 1):cast("f32"):sum()
  end
  local total, count = step_of.loss(shape, feeds)
  sums.total, sums.count = total, core.is_tensor(count) and count or core.full({}, count)
  m.context.totals = {}
  core.take_updates() -- no state changes
  return sums
end

-- Of the step's parts, how many there are and what gives the sums of one: microbatches, or all windows where `runner` is.
local function parts_of(o, data, before, step, runner, paths)
  if runner then
    local windows = window_sums(o, "probe", function(shape, feeds) return probe(shape, feeds, paths) end, true)
    return 1, function()
      return windows:run(runner, 1, before + step, function() data.fill(step, 0, false, windows.program) end)
    end
  end
  local program = m.compile(function(feeds)
    if o.accum > 1 then step_of.cut_batch(o, feeds) end
    return probe(o, feeds, paths)
  end, step_of.forward_inputs(o), { name = "probe", training = true }) -- which draws what the step drew
  return o.accum, function(micro)
    data.fill(step, micro, false, program)
    return program(step_of.forward_feeds(o, data, before + step, micro))
  end
end

---Where the numbers went bad: run the forward pass again with a probe at every module.
---@param runner? table that of a dynamic layout (dynamic.lua)
function nonfinite.explain(o, data, before, step, loss, norm, runner)
  local total, count, paths = 0, 0, {}
  local parts, sums_of = parts_of(o, data, before, step, runner, paths)
  local function culprit()
    for part = 0, parts - 1 do
      local sums = sums_of(part)
      total, count = total + sums.total, count + sums.count
      for i, path in ipairs(paths) do
        if sums[("%06d"):format(i)] ~= 0 then return path == "" and "the model" or path end
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
