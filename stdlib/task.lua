-- What `mlua generate` and `mlua export` do with the model that a script hands to its first m.train (own loops:
-- m.export(model)): the script runs until there, and its model gets the weights of --from.
local core = require "mlua.core"
local from = require "mlua.from"
local m = require "mlua"
local tokenizer_files = require "mlua.tokenizer_files"

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
  local ids = task.ids()
  local most = math.type(values.positions) == "integer" and values.positions > 0 and values.positions or math.huge
  local needed = (ids and #ids or #(options.prompt or "\n")) + options.tokens
  values.seq = math.max(1, math.min((needed + 15) // 16 * 16, most))
  if math.type(values.batch) == "integer" then values.batch = 1 end
end

local function generate(model, seq)
  local options = core.options()
  local prompt, tokenizer = task.ids(), nil
  if not prompt then
    local file = tokenizer_files.of_weights()
    tokenizer = file and m.tokenizer(file)
    prompt = options.prompt or "\n"
  end
  local first = options.rank == 0
  local streams = first and not options.json and type(prompt) == "string"
  local ids = m.generate(model, {
    prompt = prompt, tokens = options.tokens, temperature = options.temperature, seq = seq, tokenizer = tokenizer, quiet = not streams,
    top_k = options.top_k > 0 and options.top_k or nil, top_p = options.top_p > 0 and options.top_p or nil,
  })
  if not first or streams then return end
  local list = "[" .. table.concat(ids, ", ") .. "]\n"
  if options.json then core.write_json(list) else core.write(list) end
end

---Do what the command line asks for with this model, and end the script; nothing where it asks for neither.
---@param model Module
---@param seq? Axis positions
function task.take(model, seq)
  local what = core.options().task
  if not what then return end
  if not seq and what == "generate" then core.fail("mlua generate needs the axis of positions: m.export(model, { seq = A.seq })") end
  if what == "generate" then generate(model, seq) else require "mlua.hf_export"(model) end -- both load the weights
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
