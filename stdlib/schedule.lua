-- Learning-rate schedules: functions of the step (1, 2, ...) and the total that return a factor of
-- the base rate. Any function(step, steps) -> number is a schedule.
local core = require "mlua.core"
local m = require "mlua"

-- after(share, options, step, steps): the factor behind the warm-up; `share` of what follows it is done.
local function with_warmup(options, what, known, after)
  if options ~= nil and what == "linear" and (type(options) ~= "table" or m.is_module(options)) then
    core.fail(("m.linear is a schedule and takes its options in a table, got %s"):format(m.shown(options)), {
      help = 'm.linear{warmup = 100}; a layer is a parameter and a product: w = m.param{A.embed, A.ffn}, x:dot(w, "embed")',
    })
  end
  if type(options) == "number" then
    core.fail(("m.%s takes its options in a table, got %s"):format(what, m.shown(options)), {
      help = ("m.%s{warmup = 100} gives the schedule: m.train{schedule = m.%s{warmup = 100}}"):format(what, what),
    })
  end
  m.check_options(what, options, known)
  options = options or {}
  for key, value in pairs(options) do
    if type(value) ~= "number" or not (value >= 0) then
      core.fail(("m.%s's %s must be a number and not negative, got %s"):format(what, key, m.shown(value)))
    end
  end
  local warmup = options.warmup or 0
  return function(step, steps)
    if step <= warmup then return step / warmup end
    return after((step - warmup) / math.max(1, steps - warmup), options, step, steps)
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
---all steps, those of the warm-up among them (default 0.2) (Hu et al. 2024). A warm-up that leaves less is followed by
---the decay at once.
---@param options? {warmup: integer, decay: number, final: number}
---@return fun(step: integer, steps: integer): number
function m.wsd(options)
  if type(options) == "table" and type(options.decay) == "number" and options.decay > 1 then
    core.fail(("m.wsd's decay is a share of the steps, from 0 to 1, got %s"):format(m.shown(options.decay)), { help = "decay = 0.2" })
  end
  return with_warmup(options, "wsd", { "warmup", "decay", "final" }, function(_, o, step, steps)
    local final, left = o.final or 0, steps - step
    local span = math.min((o.decay or 0.2) * steps, steps - (o.warmup or 0))
    if left >= span then return 1 end
    return final + (1 - final) * math.max(0, left / span)
  end)
end
