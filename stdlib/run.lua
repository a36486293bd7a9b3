-- The folder of a run (--out DIR): the script with what it loaded, settings.json, metrics.jsonl (a line a step), TensorBoard's
-- event files, log.txt and checkpoints (run_saves.lua). Rank 0 writes all but those. A file that can no longer be written is reported once, and training continues.
local core = require "mlua.core"
local text_files = require "mlua.text_files"
local m = require "mlua"
local saves = require "mlua.run_saves"
local tensorboard = require "mlua.tensorboard"
local tokenizer_files = require "mlua.tokenizer_files"
local universal = require "mlua.universal"

local run = {}
local kept -- of this process: {path, writes, step, samples, tokens, lost, trainings}; step, samples and tokens count all trainings

local function warn(problem)
  if kept.warned or not problem then return end
  kept.warned = true
  core.write_error(("the run's folder: %s; training continues\n"):format(problem))
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

-- The texts of the script and of what it loaded, by their names in the folder.
local function script_files()
  local script, files = core.options().script, {}
  for file, text in pairs(core.sources()) do
    if file == script or script == "-" and file == "stdin" then
      files["script.lua"] = text
    elseif file:find "%.lua$" and not file:find "\n" then
      files["files/" .. kept_name(file, script)] = text
    end
  end
  return files
end

-- A text that has changed since the run began stays beside the new one.
local function copy_script(path, step)
  for name, text in pairs(script_files()) do
    local inside = path .. "/" .. name
    local ok, problem = core.make_folders(inside:match "^(.*)/")
    local before = ok and text_files.read(inside)
    if before and before ~= text then os.rename(inside, ("%s.before-step-%d"):format(inside, step)) end
    if ok then ok, problem = text_files.write(inside, text) end
    if not ok then core.fail(("--out %s: %s"):format(path, problem)) end
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
  for _, axis in ipairs(o.layout and o.layout.mesh or {}) do sizes[axis.name] = not axis.group and axis.size or nil end
  return sizes
end

local function description(o, programs, tokenizer)
  local options, parameters = core.options(), 0
  for _, p in ipairs(m.parameters(o.model, { frozen = true })) do parameters = parameters + p:elements() end
  return {
    version = options.version, script = options.script, command = options.command, from = options.from, settings = plain_settings(),
    tokenizer = tokenizer, seed = options.seed, device = core.device().description, layout = mesh_of(o), ranks = options.ranks,
    placement = o.dynamic and o.dynamic.costs.groups, parameters = parameters, memory = #programs > 0 and core.rank_memory(programs) or nil, started = os.date "!%Y-%m-%dT%H:%M:%SZ",
  }
end

-- What a checkpoint says of its run, the place in it aside.
local function record_of(o, data)
  local options, files = core.options(), {}
  for name, text in pairs(script_files()) do files[name] = ("%016x"):format(core.hash(text)) end
  return {
    version = options.version, settings = plain_settings(), files = files, seed = options.seed, layout = mesh_of(o),
    ranks = options.ranks, device = core.device().description, data = data.identity(),
  }
end

-- Metrics ------------------------------------------------------------------------------------------------------------------

local quoted = setmetatable({}, { __index = function(all, name)
  all[name] = core.to_json(name) .. ":"
  return all[name]
end }) -- names as JSON

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
    parts[i] = quoted[field[1]] .. (type(value) == "number" and number(value) or value and core.to_json(value) or "null")
  end
  return "{" .. table.concat(parts, ",") .. "}"
end

local function append(fields)
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

-- The line of the last step, which waits until the device works on the next one.
local function write_step()
  local fields = kept.waiting
  kept.waiting = nil
  if not fields then return end
  append(fields)
  write_scalars(fields[1][2], fields)
end

local function write_line(fields)
  write_step()
  append(fields)
end

-- A line of what happened beside the steps.
local function event(name, more, step)
  local fields = { { "step", step or kept.step }, { "event", name } }
  for _, field in ipairs(more or {}) do fields[#fields + 1] = field end
  write_line(fields)
end

-- What a script's on_step returned and its loss's extra results, after the fields that every line has.
local function add_extras(fields, more, what)
  local known = {}
  for _, field in ipairs(fields) do known[field[1]] = true end
  for name, value in pairs(more) do
    if type(name) == "string" and type(value) == "number" then
      if known[name] then core.fail(("%s has %q, which each line of metrics has already"):format(what, name), { help = "give it another name" }) end
      fields[#fields + 1] = { name, value }
    end
  end
end

local MOST_SKIPS = 10 -- from one checkpoint
local IN_LINE = { loss = true, grad_norm = true, uneven = true }

-- The lines of metrics.jsonl up to this step stay; later ones are of steps that are made again. nil: none stay.
local function open_metrics(path, step)
  local lines, file, problem = {}, step and io.open(path, "rb"), nil
  if file then
    for line in file:lines "L" do
      local at = math.tointeger(tonumber(line:match '^{"step":(%d+)[,}]'))
      if at and at <= step and line:sub(-2) == "}\n" then lines[#lines + 1] = line end
    end
    file:close()
  end
  local ok
  ok, problem = text_files.write(path .. ".new", table.concat(lines))
  if ok then ok, problem = os.rename(path .. ".new", path) end
  if ok then kept.metrics, problem = io.open(path, "ab") end
  if not kept.metrics then warn(problem) end
end

-- Starting -----------------------------------------------------------------------------------------------------------------

-- A copy of what made tokens of the text: models are used with it. Its name in the folder.
local function copy_tokenizer(o, path)
  local file = o.tokenizer or plain_settings().tokenizer
  if not file or file == "" or file == "bytes" then return nil end
  local ok, problem = core.make_folders(path .. "/tokenizer")
  if ok then ok, problem = tokenizer_files.copy(file, path .. "/tokenizer") end
  if not ok then core.fail(("--out %s: %s"):format(path, problem)) end
  return "tokenizer/" .. ok
end

-- Rank 0, once a first training is about to make its first step: what fails until here leaves no folder behind.
local function start(o, programs)
  local path = kept.path
  local ok, problem = core.make_folders(path)
  if not ok then core.fail("--out: " .. problem) end
  copy_script(path, kept.step)
  if not kept.resumed then -- settings.json says how the run began
    ok, problem = text_files.write(path .. "/settings.json", core.to_json(description(o, programs, copy_tokenizer(o, path)), 2) .. "\n")
    if not ok then core.fail(("--out %s: %s"):format(path, problem)) end
  end
  open_metrics(path .. "/metrics.jsonl", kept.resumed and kept.step)
  kept.board, problem = tensorboard.open(path, kept.step)
  if not kept.board then warn(problem) end
  core.log_text(("%s\n%s\n"):format(os.date "!%Y-%m-%dT%H:%M:%SZ", core.options().command))
  event(kept.resumed and "resume" or "start", { { "ranks", core.options().ranks } })
end

-- Every `check_every` steps, and then before each save: a rank whose copy of a state differs from another's ends the run.
local function check_replicas(saves_now)
  local every = universal.value "check_every"
  if not every or every == 0 or kept.step % every ~= 0 and not saves_now then return end
  local problem = core.replica_check(kept.step)
  if problem then
    core.fail(("step %d: %s"):format(kept.step, problem), { help = "a bit of a rank's memory has changed; --resume continues from the last checkpoint" })
  end
end

-- The record of where this process begins: the newest checkpoint's, with its states, or nil.
local function open(now)
  local options = core.options()
  kept = { path = options.out, writes = options.rank == 0, step = 0, samples = 0, tokens = 0, lost = {}, trainings = {}, event = event }
  saves.open(kept)
  core.keep_choices(kept.path .. "/choices")
  if options.rank == 0 and core.make_folders(kept.path) then warn(core.log_to(kept.path .. "/log.txt")) end
  if options.resume then saves.find(kept, now) end
end

-- A training's part in its run ------------------------------------------------------------------------------------------------

local Keeper = {} -- every method does nothing where no folder keeps the run
Keeper.__index = Keeper

---A training of the script, before its first step. `done`: its steps that a resumed run has behind it; `result`: that of a
---training that was over.
---@param o table m.train's options
---@param data table of train_data.lua
---@return table
function run.begin(o, data)
  local keeper = setmetatable({ o = o, done = 0, skips = 0 }, Keeper)
  if not core.options().out then return keeper end
  local now, first = record_of(o, data), not kept
  keeper.now = now
  if first then open(now) end
  keeper.training = #kept.trainings + 1
  keeper.base = { step = kept.step, samples = kept.samples, tokens = kept.tokens }
  local resumed = kept.resumed and saves.restore(kept, keeper.training, now)
  if resumed and resumed.training > keeper.training then
    keeper.result = resumed.trainings[keeper.training]
    keeper:count(keeper.result.steps)
  elseif resumed then
    o.skip, keeper.last = resumed.skip, resumed.result
    keeper.base = { step = resumed.step - resumed.done, samples = resumed.samples - resumed.done * o.batch.size,
      tokens = resumed.tokens - resumed.done * o.step_tokens }
    keeper:count(resumed.done)
    kept.saved_step = resumed.step
  end
  keeper.starts = (first or resumed) and not keeper.result
  return keeper
end

function Keeper:count(done)
  local o, base = self.o, self.base
  self.done = done
  kept.step, kept.samples, kept.tokens = base.step + done, base.samples + done * o.batch.size, base.tokens + done * o.step_tokens
end

-- The finite numbers of a training's result: what JSON holds, and a resumed run returns.
local function plain_result(result)
  local numbers = {}
  for name, value in pairs(result or {}) do
    if type(value) == "number" and value - value == 0 then numbers[name] = value end
  end
  return numbers
end

function Keeper:save(result)
  write_step()
  local record = {}
  for key, value in pairs(self.now) do record[key] = value end
  record.step, record.samples, record.tokens, record.skip = kept.step, kept.samples, kept.tokens, self.o.skip
  record.training, record.done, record.trainings = self.training, self.done, core.list(kept.trainings)
  record.result = plain_result(result)
  self:lose("save", saves.begin, kept, record)
end

---The first step is next: data.begin has said from which sample.
---@param programs Program[] of a step
function Keeper:start(programs)
  if not kept or self.result then return end
  if self.starts and kept.writes then start(self.o, programs) end
  kept.resumed = nil
  if universal.value "on_nan" == "skip" and self.done == 0 then self:save() end
end

---fn(...), whose time is lost to `what`: data, eval or save.
function Keeper:lose(what, fn, ...)
  if not kept then return fn(...) end
  local begun = core.time()
  local result, more = fn(...)
  kept.lost[what] = (kept.lost[what] or 0) + core.time() - begun
  return result, more
end

---A step is done; `fields` are of its line (log.lua), `out` its program's results, `more` what on_step gave.
function Keeper:step(step, fields, out, more)
  if not kept then return end
  self:count(step)
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
  if type(more) == "table" then add_extras(fields, more, "what on_step returns") end
  kept.waiting = fields
end

---The device works: the last step's line is written.
function Keeper:write()
  if kept then write_step() end
end

function Keeper:eval(loss, further)
  if not kept then return end
  local fields = { { "step", kept.step }, { "eval_loss", loss }, table.unpack(further) }
  write_line(fields)
  write_scalars(kept.step, fields)
end

---Between two steps, on all ranks at once: whether the training ends here. In a run's folder it saves where that is due, and
---a signal saves and ends the script.
function Keeper:between(result)
  if not kept then return (core.stopped()) end
  saves.poll(kept)
  saves.rehearse(kept)
  local stop, due = core.stopped(saves.due(kept))
  local saves_now = due or stop and kept.saved_step ~= kept.step
  check_replicas(saves_now)
  if saves_now then self:save(result) end
  if not stop then return false end
  saves.wait(kept)
  event "stop"
  if kept.writes then
    core.write_error(("stopped at step %d; --resume continues %s%s\n"):format(kept.step, kept.path, kept.last_good and " from " .. kept.last_good or ""))
  end
  core.end_script()
end

---The numbers of a step are not finite: with on_nan=skip the step to continue after, once the newest checkpoint is loaded;
---the samples since then are not seen again. nil: the training ends here.
function Keeper:back(step)
  if not kept or universal.value "on_nan" ~= "skip" or self.skips >= MOST_SKIPS then return end
  local record, name = saves.back(kept, self.training)
  if not record then return end
  local o, bad = self.o, self.base.step + step
  local samples = (step - record.done) * o.batch.size
  self.skips = record.step == self.skipped_from and self.skips + 1 or 1
  self.skipped_from = record.step
  o.skip = o.skip + samples
  o.progress.advance(o.batch.size, record.done - step + 1)
  self:count(record.done)
  write_step()
  if kept.metrics then
    kept.metrics:close()
    open_metrics(kept.path .. "/metrics.jsonl", kept.step)
  end
  event("skip", { { "bad_step", bad }, { "samples", samples }, { "checkpoint", name } })
  if kept.writes then
    core.write_error(("step %d: its numbers are not finite; back to %s, and the samples since then are left out\n"):format(bad, name))
  end
  return record.done
end

---The training is over.
function Keeper:over(result)
  if not kept then return result end
  if not self.result and kept.saved_step ~= kept.step then self:save(result) end
  saves.wait(kept)
  kept.trainings[self.training] = plain_result(result)
  if not self.result then event "end" end
  return result
end

return run
