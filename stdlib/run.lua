-- The folder of a run (--out DIR): the script with what it loaded, settings.json, metrics.jsonl (a line a step), TensorBoard's
-- event files and log.txt. Rank 0 writes them. A file that can no longer be written is reported once, and training continues.
local core = require "mlua.core"
local m = require "mlua"
local tensorboard = require "mlua.tensorboard"
local universal = require "mlua.universal"

local run = {}
local kept -- of this process: {path, writes, step, samples, tokens, lost}; step, samples and tokens count all its trainings

local function warn(problem)
  if kept.warned or not problem then return end
  kept.warned = true
  core.write_error(("the run's folder: %s; training continues\n"):format(problem))
end

local function write_text(path, text)
  local file, problem = io.open(path, "wb")
  if not file then return nil, problem end
  local ok, why = file:write(text)
  local closed, reason = file:close()
  return ok and closed, why or reason
end

-- Files of the script ------------------------------------------------------------------------------------------------------

-- Where a file that was loaded is kept under files/: as it lay from the script's folder, so that `require` finds it again.
local function kept_name(path, script)
  local folder = script:match "^(.*/)" or ""
  if path:sub(1, #folder) == folder then path = path:sub(#folder + 1) end
  path = path:gsub("^%./", "")
  if path:find "^/" or ("/" .. path .. "/"):find("/../", 1, true) then path = path:match "[^/]*$" end
  return path
end

local function copy_script(path)
  local script = core.options().script
  for file, text in pairs(core.sources()) do
    local name
    if file == script or script == "-" and file == "stdin" then
      name = "script.lua"
    elseif file:find "%.lua$" and not file:find "\n" then
      name = "files/" .. kept_name(file, script)
    end
    if name then
      local inside = path .. "/" .. name
      local ok, problem = core.make_folders(inside:match "^(.*)/")
      if ok then ok, problem = write_text(inside, text) end
      if not ok then core.fail(("--out %s: %s"):format(path, problem)) end
    end
  end
end

-- What settings.json says ----------------------------------------------------------------------------------------------------

local function plain_settings()
  local settings = {}
  for key, value in pairs(universal.all()) do
    local kind = type(value)
    if kind == "boolean" or kind == "string" or kind == "number" and value - value == 0 then settings[key] = value end
  end
  return settings
end

local function mesh_of(o)
  local sizes = {}
  for _, axis in ipairs(o.layout and o.layout.mesh or {}) do sizes[axis.name] = axis.size end
  return sizes
end

-- What is planned for a rank's memory at its peak: {kind = bytes}.
local function memory_of(programs)
  local most
  for _, program in ipairs(programs) do
    local plan = program:plan()
    if not most or plan.peak_bytes > most.peak_bytes then most = plan end
  end
  return most and most.kinds
end

local function description(o, programs)
  local options, parameters = core.options(), 0
  for _, p in ipairs(m.parameters(o.model, { frozen = true })) do parameters = parameters + p:elements() end
  return {
    version = options.version, script = options.script, command = options.command, settings = plain_settings(),
    seed = options.seed, device = core.device().description, layout = mesh_of(o), ranks = options.ranks,
    parameters = parameters, memory = memory_of(programs), started = os.date "!%Y-%m-%dT%H:%M:%SZ",
  }
end

-- Metrics ------------------------------------------------------------------------------------------------------------------

local function number(x)
  if x - x ~= 0 then return "null" end -- JSON has neither infinities nor NaN
  return math.type(x) == "integer" and ("%d"):format(x) or ("%.17g"):format(x)
end

---A list of {name, number or text} as one object of JSON, in that order.
---@param fields table[]
---@return string
function run.encode(fields)
  local parts = {}
  for i, field in ipairs(fields) do
    local value = field[2]
    parts[i] = core.to_json(field[1]) .. ":" .. (type(value) == "number" and number(value) or value and core.to_json(value) or "null")
  end
  return "{" .. table.concat(parts, ",") .. "}"
end

local function write_line(fields)
  if not kept.metrics then return end
  local ok, problem = kept.metrics:write(run.encode(fields), "\n")
  if ok then ok, problem = kept.metrics:flush() end
  if not ok then warn("metrics.jsonl: " .. tostring(problem)) end
end

local function write_scalars(step, fields)
  if not kept.board then return end
  local scalars = {}
  for _, field in ipairs(fields) do
    if type(field[2]) == "number" and field[1] ~= "step" then scalars[#scalars + 1] = field end
  end
  local ok, problem = kept.board.scalars(step, scalars)
  if not ok then warn("TensorBoard's file: " .. tostring(problem)) end
end

-- A line of what happened beside the steps.
local function event(name, more)
  local fields = { { "step", kept.step }, { "event", name } }
  for _, field in ipairs(more or {}) do fields[#fields + 1] = field end
  write_line(fields)
end

-- What a script's on_step returned and its loss's extra results, after the fields that every line has.
local function add_extras(fields, more, what)
  local known, names = {}, {}
  for _, field in ipairs(fields) do known[field[1]] = true end
  for name, value in pairs(more) do
    if type(name) == "string" and type(value) == "number" then
      if known[name] then core.fail(("%s has %q, which each line of metrics has already"):format(what, name), { help = "give it another name" }) end
      names[#names + 1] = name
    end
  end
  table.sort(names)
  for _, name in ipairs(names) do fields[#fields + 1] = { name, more[name] } end
end

local IN_LINE = { loss = true, grad_norm = true, uneven = true }

-- Starting -----------------------------------------------------------------------------------------------------------------

-- Rank 0, once a first training is about to make its first step: what fails until here leaves no folder behind.
local function start(o, programs)
  local path = kept.path
  local ok, problem = core.make_folders(path)
  if not ok then core.fail("--out: " .. problem) end
  copy_script(path)
  ok, problem = write_text(path .. "/settings.json", core.to_json(description(o, programs), 2) .. "\n")
  if not ok then core.fail(("--out %s: %s"):format(path, problem)) end
  warn(core.log_to(path .. "/log.txt"))
  kept.metrics, problem = io.open(path .. "/metrics.jsonl", "wb")
  if not kept.metrics then warn(problem) end
  kept.board, problem = tensorboard.open(path, 0)
  if not kept.board then warn(problem) end
  core.log_text(("%s\n%s\n"):format(os.date "!%Y-%m-%dT%H:%M:%SZ", core.options().command))
  event("start", { { "ranks", core.options().ranks } })
end

---What a training does for its run's folder; every function does nothing where there is none.
---@param o table m.train's options
---@param programs Program[] of a step
---@return table
function run.begin(o, programs)
  local path, keeper = core.options().out, {}
  local before
  if path and not kept then
    kept = { path = path, writes = core.options().rank == 0, step = 0, samples = 0, tokens = 0, lost = {} }
    if kept.writes then start(o, programs) end
  end
  local tokens = o.step_tokens
  before = kept and { step = kept.step, samples = kept.samples, tokens = kept.tokens }

  ---fn(...), whose time is lost to `what`: data, eval or save.
  function keeper.lose(what, fn, ...)
    if not kept then return fn(...) end
    local begun = core.time()
    local result, more = fn(...)
    kept.lost[what] = (kept.lost[what] or 0) + core.time() - begun
    return result, more
  end
  ---A step is done; `fields` are of its line (log.lua), `out` its program's results, `more` what on_step gave.
  function keeper.step(step, fields, out, more)
    if not kept then return end
    kept.step, kept.samples, kept.tokens = before.step + step, before.samples + step * o.batch.size, before.tokens + step * tokens
    local added, known = {}, {}
    for _, field in ipairs(fields) do known[field[1]] = true end
    for name, value in pairs(out) do
      if not IN_LINE[name] and not known[name] then added[name] = value end
    end
    for _, field in ipairs(fields) do
      if field[1] == "step" then field[2] = kept.step elseif field[1] == "tokens" then field[2] = kept.tokens end
    end
    fields[#fields + 1] = { "samples", kept.samples }
    for _, what in ipairs { "data", "eval", "save" } do
      fields[#fields + 1] = { what .. "_ms", 1e3 * (kept.lost[what] or 0) }
      kept.lost[what] = nil
    end
    add_extras(fields, added, "a result of the loss")
    if type(more) == "table" and not core.is_tensor(more) then add_extras(fields, more, "what on_step returns") end
    write_line(fields)
    write_scalars(kept.step, fields)
  end
  function keeper.eval(loss, further)
    if not kept then return end
    local fields = { { "step", kept.step }, { "eval_loss", loss }, table.unpack(further) }
    write_line(fields)
    write_scalars(kept.step, fields)
  end
  function keeper.finish()
    if kept then event "end" end
  end
  return keeper
end

return run
