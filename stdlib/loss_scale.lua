-- Training in f16 (--dtype f16): the loss is multiplied by a scale, so that small gradients do not become zero in f16. The scale
-- doubles after a run of steps without overflow and halves with each overflow, whose step changes nothing (Micikevicius et al.
-- 2018, arXiv:1710.03740). The device decides: the scale and its counts are states, which checkpoints keep.
local core = require "mlua.core"
local m = require "mlua"

local loss_scale = {}

local FIRST, LEAST, MOST, WINDOW = 2.0 ^ 16, 1.0, 2.0 ^ 32, 1000 -- of a mean loss; steps between two doublings

local made, count = {}, 0 -- states by optimizer, beside its moments

local function states_of(o)
  if not made[o.optimizer] then
    count = count + 1
    local function state(name, first)
      local label = count > 1 and ("loss_scale%d."):format(count) or "loss_scale."
      return core.state { name = label .. name, axes = {}, dtype = "f32", kind = "optimizer", init = first }
    end
    made[o.optimizer] = { scale = state("scale", o.loss_scale or FIRST), since = state("steps_since_overflow", 0), skipped = state("skipped", 0) }
  end
  return made[o.optimizer]
end

---The scaling of a training; nil where it does not compute in f16. :loss(total) scales a sum of losses; :gradients(list) undoes it,
---in f32; :guard(finite, out) takes back what the step assigned where its gradients are not finite, and moves the scale.
---@param o TrainOptions
---@return table?
function loss_scale.of(o)
  if core.compute_dtype() ~= "f16" then return nil end
  local states = states_of(o)
  -- The loss is a sum: a power of two near what it counts makes the scale that of a mean, and keeps the product exact.
  local counted = 2.0 ^ math.ceil(math.log(o.batch.size * (o.seq and o.seq.size or 1), 2))
  local self = {}
  function self.loss(total) return total * (states.scale:read() / counted) end
  function self.gradients(list)
    local scaled, by = {}, counted / states.scale:read()
    for i, g in ipairs(list) do scaled[i] = g * by end
    return scaled
  end
  -- The steps that changed the parameters: what bias corrections count.
  function self.steps(step) return step - states.skipped:read() end
  function self.guard(finite, out)
    for _, update in ipairs(core.take_updates()) do
      local state, value = update[1], update[2]
      state:assign(core.where(finite, value, state:read()))
    end
    local scale, since = states.scale:read(), core.where(finite, states.since:read() + 1, 0)
    local full = core.ge(since, WINDOW)
    states.scale:assign(core.where(finite, core.where(full, core.minimum(2 * scale, MOST), scale), core.maximum(scale / 2, LEAST)))
    states.since:assign(core.where(full, 0, since))
    states.skipped:assign(states.skipped:read() + core.where(finite, 0.0, 1.0))
    out.loss_scale, out.skipped = scale, core.where(finite, 0.0, 1.0)
  end
  return self
end

---Whether a step was skipped for its scale, and training continues: its loss is finite, and the scale may still fall.
---@param out table<string, number> what the step returned
---@return boolean
function loss_scale.skipped(out)
  return out.skipped == 1 and out.loss_scale > LEAST and out.loss == out.loss and math.abs(out.loss) < math.huge
end

return loss_scale
