-- Learning-rate schedules: functions of the step (1, 2, ...) and the total that give a factor of
-- the base rate. Any function(step, steps) -> number is a schedule.
local core = require "mlua.core"
local m = require "mlua"

local function with_warmup(options, what, known, after)
  m.check_options(what, options, known)
  options = options or {}
  for key, value in pairs(options) do
    if type(value) ~= "number" or value < 0 then
      core.fail(("m.%s's %s must be a number and not negative, got %s"):format(what, key, m.shown(value)))
    end
  end
  local warmup = options.warmup or 0
  return function(step, steps)
    if step <= warmup then return step / warmup end
    return after((step - warmup) / math.max(1, steps - warmup), options, steps - warmup)
  end
end

---Warm-up over `warmup` steps, then constant.
---@param options? {warmup: integer}
---@return fun(step: integer, steps: integer): number
function m.constant(options)
  return with_warmup(options, "constant", { "warmup" }, function() return 1 end)
end

---Warm-up, then linear decay to `final` (a factor, default 0).
---@param options? {warmup: integer, final: number}
---@return fun(step: integer, steps: integer): number
function m.linear(options)
  return with_warmup(options, "linear", { "warmup", "final" }, function(t, o) return 1 - (1 - (o.final or 0)) * math.min(t, 1) end)
end

---Warm-up, then half a cosine down to `final` (a factor, default 0.1) (Loshchilov and Hutter 2016).
---@param options? {warmup: integer, final: number}
---@return fun(step: integer, steps: integer): number
function m.cosine(options)
  return with_warmup(options, "cosine", { "warmup", "final" }, function(t, o)
    local final = o.final or 0.1
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * math.min(t, 1)))
  end)
end

---Warm-up, stable, then linear decay to `final` (a factor, default 0) over the last `decay` share of
---the steps (default 0.2) (Hu et al. 2024).
---@param options? {warmup: integer, decay: number, final: number}
---@return fun(step: integer, steps: integer): number
function m.wsd(options)
  return with_warmup(options, "wsd", { "warmup", "decay", "final" }, function(t, o)
    local share, final = o.decay or 0.2, o.final or 0
    if t <= 1 - share then return 1 end
    return final + (1 - final) * math.max(0, (1 - t) / share)
  end)
end
