-- What is known about a script that was traced (mlua check --facts), in whole or up to an error, as one object of JSON.
local core = require "mlua.core"
local m = require "mlua"
local known = {}

local SHORT, NAMES = 60, 200 -- of a text; of a list of names

---What is said of a value that is no tensor, axis or function; nil: nothing.
---@param value any
---@return string?
function known.describe(value)
  local kind = type(value)
  if kind == "string" then return #value <= SHORT and ("%q"):format(value) or nil end
  if kind == "number" or kind == "boolean" then return tostring(value) end
  if kind == "table" and m.is_module(value) then return "an instance of " .. getmetatable(value).__name end -- tostring would name its parameters
  if kind == "table" then return m.is_class(value) and tostring(value) or nil end
  local text = tostring(value)
  return not text:find "0x%x+" and text or nil -- an address
end

local trainings = {} -- what each m.train is given that settles its samples

local function name_of(data) return type(data) == "userdata" and data:name() or data end

---Note the options of m.train that an edit of a running script cannot change (run_watch.lua).
---@param o TrainOptions complete
function known.note_training(o)
  trainings[#trainings + 1] = {
    seed = o.seed, batch = o.batch.size, seq = o.seq and o.seq.size, accum = o.accum, pack = o.pack, tokenizer = name_of(o.tokenizer),
    data = name_of(o.data), eval_data = name_of(o.eval_data),
  }
end

---The texts that an editor has not saved, by path.
function known.buffers(text) return core.json(text, "--buffers") end

local function error_of(value)
  if value == nil then return nil end
  local result = { text = tostring(value) }
  if type(value) == "table" then
    for _, key in ipairs { "message", "help", "file", "line", "operands" } do result[key] = rawget(value, key) end
  end
  return result
end

-- Values of the script's settings, and names of presets.
local function settings()
  local list = {}
  for name, value in pairs(rawget(m, "settings") or {}) do
    list[#list + 1] = { name = name, value = known.describe(value) or type(value) }
  end
  return list
end

---Write the object; `failure` is the error that ended the script, or nil; `pending`: what plans say is not known yet.
---@param failure any
---@param pending? boolean
function known.write(failure, pending)
  local run = core.known_run()
  local reports = {}
  for i, text in ipairs(run.reports) do reports[i] = core.json(text) end
  local values, axes, seen = core.known_values(not pending), {}, {}
  for _, value in ipairs(values) do
    for _, axis in ipairs(value.axes or {}) do
      if not seen[axis.name] and #axes < NAMES then axes[#axes + 1] = axis.name end
      seen[axis.name] = true
    end
  end
  table.sort(axes)
  core.write_json(core.to_json({
    script = run.script, limits = run.limits, stopped = run.stopped, files = core.list(run.files), reports = core.list(reports),
    error = error_of(failure), hints = core.list(core.known_hints()), values = core.list(values),
    pending = pending, steps = core.list(pending and {} or core.known_steps()), parameters = core.list(core.known_parameters()), modules = core.list(m.module_records()),
    trainings = core.list(trainings), settings = core.list(settings()), axes = core.list(axes),
  }, 0, 17, true) .. "\n")
end

return known
