-- Saving and loading states: m.save and m.load, over what C gives (core.checkpoint_*).
local core = require "mlua.core"
local m = require "mlua"

local WHAT = "a list of modules, optimizers and states: { model, optimizer }; all states where it is absent"

local function is_optimizer(x) return type(x) == "table" and type(rawget(x, "update")) == "function" and rawget(x, "options") ~= nil end

-- {{State, name}...}, each once; nil for all.
local function entries_of(what, caller, loads)
  if what == nil then return nil end
  local list, seen = {}, {}
  local function add(state)
    local name = state:name()
    if not name then
      core.fail(("m.%s: a state has no name"):format(caller), { help = "m.parameters(model) names those of a model; m.param{..., name = \"w\"}" })
    end
    if not seen[name] then list[#list + 1] = { state, name } end
    seen[name] = true
  end
  if type(what) ~= "table" or m.is_module(what) or is_optimizer(what) then what = { what } end
  for key, x in pairs(what) do
    if type(key) ~= "number" then core.fail(("m.%s takes a list, got the key %s"):format(caller, m.shown(key)), { help = WHAT }) end
    if m.is_module(x) then
      for _, state in ipairs(m.module_states(x)) do add(state) end
    elseif is_optimizer(x) then
      local states = m.optimizer_states(x)
      if #states == 0 and loads and next(rawget(x, "options")) then
        core.fail(("m.%s: the optimizer %s has no states yet"):format(caller, m.shown(x.name)), {
          help = "its states are made with the program that updates: call m.compile before, or load only the model",
        })
      end
      for _, state in ipairs(states) do add(state) end
    elseif type(x) == "userdata" and core.is_tensor(x) and type(x.kind) == "function" then
      add(x)
    else
      core.fail(("m.%s cannot save or load %s"):format(caller, m.shown(x)), { help = WHAT })
    end
  end
  return list
end

local function check_folder(dir, caller)
  if type(dir) ~= "string" or dir == "" then
    core.fail(("m.%s takes the path of a folder, got %s"):format(caller, m.shown(dir)), { help = ('m.%s("out/step-100", { model, optimizer })'):format(caller) })
  end
end

---Save states into a folder, as a checkpoint that any layout and number of ranks loads: all states of the script, or
---those of a list of modules, optimizers and states. Returns when it is durable; a checkpoint that has this name is
---replaced at once. On several ranks all call it. `record` is kept beside: m.load returns it.
---@param dir string
---@param what? (Module|Optimizer|State)[]
---@param options? {record: table}
---@return {path: string, bytes: integer, stall: number, seconds: number}
function m.save(dir, what, options)
  check_folder(dir, "save")
  m.check_options("save", options, { "record" })
  local entries = entries_of(what, "save")
  local record = options and options.record or {}
  if type(record) ~= "table" then core.fail("m.save: record must be a table, got " .. m.shown(record)) end
  require("mlua.run_saves").wait_for_run()
  local begun, problem, help = core.checkpoint_begin(dir, next(record) and core.to_json(record) or "{}", entries)
  if not begun then core.fail(problem, { help = help }) end
  local result = core.checkpoint_wait()
  if not result then return { path = dir, bytes = 0, stall = 0, seconds = 0 } end -- a check
  if result.error then core.fail(result.error, { help = result.help }) end
  return result
end

---Load states that m.save, or a run, has saved under any layout: all states of the script, or those of a list of modules,
---optimizers and states. Tensors that the checkpoint lacks or has in another shape are errors, and without a list those
---that the script lacks; with `strict=false` what fits is loaded and the rest is listed. A damaged file is an error; where
---the damage is in tensors, the states have no value until a load succeeds: steps and saves are refused. On several ranks all
---call it.
---@param dir string
---@param what? (Module|Optimizer|State)[]
---@param options? {strict: boolean}
---@return table record what was saved with it
---@return {missing: string[], unexpected: string[], reshaped: string[]} differences by name
function m.load(dir, what, options)
  check_folder(dir, "load")
  m.check_options("load", options, { "strict" })
  local strict = not options or options.strict == nil or options.strict
  if type(strict) ~= "boolean" then core.fail("m.load: strict must be true or false, got " .. m.shown(strict)) end
  local record, missing, unexpected, reshaped = core.checkpoint_load(dir, entries_of(what, "load", true), strict)
  if not record then core.fail(missing, { help = unexpected }) end
  return core.json(record, dir), { missing = missing, unexpected = unexpected, reshaped = reshaped }
end
