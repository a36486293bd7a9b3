-- Evaluation: the loss on data that training does not use.
local core = require "mlua.core"
local m = require "mlua"
local extras = require "mlua.train_extras"
local step_of = require "mlua.train_step"
local window_sums = require "mlua.window_sums"

-- What is summed over a batch, or over a part of it that has its own batch axis: `shape`.
local function sums_of(evaluation, shape, feeds)
  local total, count, results = step_of.loss(shape, feeds)
  core.take_updates() -- an evaluation changes no state
  evaluation.idle = m.context.idle
  local sums = { total = total, count = count }
  extras.put(results, sums)
  return sums
end

-- The program of an evaluation's batch: its sums.
local function program_of(o, evaluation)
  return m.compile(function(feeds)
    if o.accum > 1 then step_of.cut_batch(o, feeds) end
    return sums_of(evaluation, o, feeds)
  end, step_of.forward_inputs(o), { name = "evaluation" })
end

-- The loss on the data that training does not use. Each evaluation draws the same numbers, so that losses compare: those of
-- steps 1 to eval_batches. `runner()` is that of a dynamic layout (dynamic.lua).
return function(o, data, runner)
  local evaluation = {}
  local windows = o.dynamic and window_sums(o, "evaluation", function(shape, feeds) return sums_of(evaluation, shape, feeds) end)
  evaluation.program = windows and windows.program or program_of(o, evaluation)
  local function run(i)
    data.fill(1, i, true, evaluation.program)
    return evaluation.program(step_of.forward_feeds(o, data, i // o.accum + 1, i % o.accum))
  end
  local function nothing_counts(where)
    core.fail(where .. ": the loss counts nothing in evaluation: the count that belongs to its sum is 0", {
      help = evaluation.idle and "m.dropout drops nothing in evaluation; m.random_mask(axes, share) draws a mask in evaluation too, and so does "
        .. "m.dropout(x, rate, {always = true})" or o.inputs and "eval_sample makes what it sees"
        or "eval_batches and eval_share say how much data it sees",
    })
  end
  -- What can be reported before the first step: too little data; and where a dropout drops nothing, a mask that is empty for it.
  function evaluation.prepare()
    data.fill(1, 0, true, evaluation.program)
    if not (evaluation.idle and o.own_loss) then return end
    for i = 0, o.eval_batches * o.accum - 1 do
      if run(i).count ~= 0 then return end
    end
    nothing_counts "before the first step"
  end
  -- The loss, and a list of {name, value} of what else the loss returns.
  function evaluation.loss(step)
    local total, count, sums = 0, 0, {}
    if windows then
      local result = windows:run(runner(), o.eval_batches, 1, function(i) data.fill(1, i, true, windows.program) end)
      total, count = result.total, result.count
      extras.add(sums, result)
    end
    for i = 0, windows and -1 or o.eval_batches * o.accum - 1 do
      local result = run(i)
      total, count = total + result.total, count + result.count
      extras.add(sums, result)
    end
    if count == 0 then nothing_counts(("step %d"):format(step)) end
    return total / count, extras.quotients(sums, "eval_")
  end
  return evaluation
end
