-- What a loss returns beside its sum and count: more sums and counts by name, each logged as their quotient over a whole step.
local core = require "mlua.core"
local m = require "mlua"

local extras = {}

local EXAMPLE = "return sum, count, { accuracy = m.accuracy(logits, targets) }"
local TAKEN = {} -- what lines of metrics have already
for name in ("step steps loss grad_norm loss_scale skipped aux_loss uneven lr tokens tokens_per_s tflops_per_gpu mfu memory_gib step_ms bubble bubble_predicted "
  .. "bubble_planned device_ms busy samples data_ms save_ms event"):gmatch "%S+" do
  TAKEN[name] = true
end

local function is_number(x) return core.is_tensor(x) or type(x) == "number" end

local function scalar(name, what, x, loss)
  if type(x) == "number" then return x end
  if #x:axes() > 0 then
    core.fail(("the %s of the loss's result %q has axes: %s"):format(what, name, tostring(x)), { at = loss, help = "x:sum() sums over all of them" })
  end
  return x:cast "f32"
end

---The third value that a loss returns, as a list of {name=, sum=, count=} ordered by name.
---@param results? table<string, table>
---@param loss function of the script, whose line errors name
---@return table[]
function extras.check(results, loss)
  local list = {}
  if results == nil then return list end
  if type(results) ~= "table" or core.is_tensor(results) then
    core.fail("the third value of m.train's loss is a table of sums and counts by name, got " .. m.shown(results), { at = loss, help = EXAMPLE })
  end
  for name, pair in pairs(results) do
    if type(name) ~= "string" or not name:match "^[%a_][%w_]*$" or name:match "^eval_" or TAKEN[name] then
      core.fail(("a result of the loss cannot be called %s"):format(type(name) == "string" and ("%q"):format(name) or m.shown(name)), {
        at = loss, help = TAKEN[name] and "the line of a step has that already" or "names are words that do not begin with eval_: " .. EXAMPLE,
      })
    end
    if type(pair) ~= "table" or core.is_tensor(pair) or not is_number(pair[1]) or not is_number(pair[2]) or #pair ~= 2 then
      core.fail(("the loss's result %q must be a sum and a count, got %s"):format(name, m.shown(pair)), { at = loss, help = EXAMPLE .. "; of a mean, { mean, 1 }" })
    end
    list[#list + 1] = { name = name, sum = scalar(name, "sum", pair[1], loss), count = scalar(name, "count", pair[2], loss) }
  end
  return list
end

---The sums and counts as outputs of a program, whose results `extras.add` sums up.
---@param list table[]
---@param outputs table<string, Tensor>
function extras.put(list, outputs)
  for _, result in ipairs(list) do
    for _, what in ipairs { "sum", "count" } do
      local x = result[what]
      outputs[what .. " of " .. result.name] = core.is_tensor(x) and x or core.full({}, x, "f32")
    end
  end
end

---Add a program's results to the sums so far; {} are those of nothing.
---@param sums table<string, number[]>
---@param outputs table<string, number>
function extras.add(sums, outputs)
  for key, value in pairs(outputs) do
    local what, name = key:match "^(%a+) of (.*)$"
    if what then
      sums[name] = sums[name] or { sum = 0, count = 0 }
      sums[name][what] = sums[name][what] + value
    end
  end
end

---The quotients as a list of {name, value}, ordered by name, each name after a prefix.
---@param sums table<string, table>
---@param prefix string
---@return table[]
function extras.quotients(sums, prefix)
  local list = {}
  for name, pair in pairs(sums) do list[#list + 1] = { prefix .. name, pair.sum / pair.count } end
  return list
end

return extras
