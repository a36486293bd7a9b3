-- What `mlua generate` and `mlua export` do with the model that a script hands to its first m.train (own loops:
-- m.export(model)): the script runs until there, and its model gets the weights of --from.
local core = require "mlua.core"
local from = require "mlua.from"
local m = require "mlua"
local text_files = require "mlua.text_files"

local task = {}

---The ids of --ids, or nil.
---@return integer[]?
function task.ids()
  local text = core.options().ids
  if not text then return nil end
  local ids = {}
  for id in text:gmatch "%d+" do ids[#ids + 1] = math.tointeger(tonumber(id)) end
  return ids
end

-- The bytes of the longest line of a file: at least as many as the tokens of a prompt.
local function longest_line(path)
  local most = 0
  for line in (text_files.read(path) or ""):gmatch "[^\n]+" do most = math.max(most, #line) end
  return most
end

-- How many positions prompt and answer may need, at most.
local function positions_needed(options)
  local ids, needed = task.ids(), nil
  if options.prompts then
    needed = longest_line(options.prompts)
  elseif options.chat and not options.prompt then
    return 4096
  else
    needed = ids and #ids or #(options.prompt or "\n")
  end
  return needed + options.tokens + (options.chat and 512 + #(options.system or "") or 0)
end

---Where text is generated, the window is as long as the text will be and not as the model's longest: m.config calls this.
---@param values table<string, any>
---@param overrides table[]
function task.fit_window(values, overrides)
  local options = core.options()
  if options.task ~= "generate" or math.type(values.seq) ~= "integer" then return end
  for _, pair in ipairs(overrides) do
    if pair[1] == "seq" then return end
  end
  local s = from.source()
  if s and s.kind ~= "hf" then return end -- of a run: its positions may be parameters
  local most = math.type(values.positions) == "integer" and values.positions > 0 and values.positions or math.huge
  values.seq = math.max(1, math.min((positions_needed(options) + 15) // 16 * 16, most))
  if math.type(values.batch) == "integer" then values.batch = 1 end
end

---Do what the command line asks for with this model, and end the script; nothing where it asks for neither.
---@param model Module
---@param seq? Axis positions
function task.take(model, seq)
  local what = core.options().task
  if not what then return end
  if not seq and what ~= "export" then core.fail(("mlua %s needs the axis of positions: m.export(model, { seq = A.seq })"):format(what)) end
  if what == "generate" then -- all of them load the weights
    core.for_command(require "mlua.generate_task", model, seq, task.ids())
  elseif what == "serve" then
    local options = core.options()
    core.for_command(require(options.mode == "check" and "mlua.serve_check" or options.measure and "mlua.serve_measure" or "mlua.serve"), model, seq)
  else
    core.for_command(require "mlua.hf_export", model)
  end
  core.end_script()
end

---The model that mlua generate and mlua export take, for scripts with a loop of their own: m.train says it otherwise. `seq`
---is the axis of positions. A run continues, with the weights of --from where there is one.
---@param model Module
---@param options? {seq: Axis}
---@return Module model
function m.export(model, options)
  m.check_options("export", options, { "seq" })
  if not m.is_module(model) then core.fail("m.export takes a module, got " .. m.shown(model), { help = "calling a class makes one: local model = GPT()" }) end
  task.take(model, options and options.seq)
  from.load(model)
  return model
end

return task
