-- The checkpoints of a run: when one is saved, which are kept, from which a run is resumed and what has changed since.
--
-- A checkpoint's record says where the run stood: `step` counts the steps of all the script's trainings, `training` is the
-- number of the one under way and `done` its steps, `trainings` are the results of those before it, `skip` is the number of
-- samples before its first. The script runs from its beginning: trainings that were over are not repeated.
local core = require "mlua.core"
local format = require "mlua.lsp_format"
local m = require "mlua"
local undo = require "mlua.run_undo"
local universal = require "mlua.universal"

local saves = {}

local function report(text)
  if core.options().rank == 0 then core.write_error(text .. "\n") end
end

local function name_of(path) return path:match "([^/]*)$" end

-- Resuming -----------------------------------------------------------------------------------------------------------------

-- Rank 0's view of the folder, on every rank: no two of them may see another state of a shared file system.
local function listed(folder)
  local text
  if core.options().rank == 0 then
    local list = {}
    for i, c in ipairs(core.checkpoint_list(folder)) do list[i] = { path = c.path, whole = c.whole, problem = c.problem } end
    text = core.to_json { list = core.list(list) }
  end
  return core.json(core.share(text), "the list of checkpoints").list
end

-- A checkpoint that proved damaged when it was read leaves the folder, so that none counts it among the kept ones.
local function put_aside(kept, path)
  if core.options().rank ~= 0 then return end
  local folder = kept.path .. "/damaged"
  local ok, problem = core.make_folders(folder)
  if ok then ok, problem = os.rename(path, ("%s/%s-%d"):format(folder, name_of(path), os.time())) end
  if not ok then report(("cannot move %s: %s"):format(path, problem)) end
end

local function shown(value) return value == nil and "none" or tostring(value) end

-- What a table of plain values has otherwise than another: texts, in the order of the names.
local function differences(before, now)
  local names, list = {}, {}
  for _, t in ipairs { before, now } do
    for name in pairs(t) do names[name] = true end
  end
  for name in pairs(names) do
    if before[name] ~= now[name] then list[#list + 1] = ("%s=%s, was %s"):format(name, shown(now[name]), shown(before[name])) end
  end
  return list
end

-- How data differ from those of a record, both of train_data.lua's identity: a text, or nil. Where files lie is no difference.
local function other_data(a, b)
  if core.to_json(a) == core.to_json(b) then return nil end
  if a.tokenizer ~= b.tokenizer then return "another tokenizer" end
  if (a.share or b.share) ~= b.share then return ("training uses %s of them, and used %s"):format(shown(b.share), shown(a.share)) end
  if #a.sources ~= #b.sources then return ("%d sources instead of %d"):format(#b.sources, #a.sources) end
  for i, source in ipairs(b.sources) do
    if source.weight ~= a.sources[i].weight then return ("source %d weighs %s, and weighed %s"):format(i, shown(source.weight), shown(a.sources[i].weight)) end
    for k = 1, math.max(#source.files, #a.sources[i].files) do
      local file, other = source.files[k] or {}, a.sources[i].files[k] or {}
      if core.to_json(file) ~= core.to_json(other) then
        if file.name == other.name and file.tokens == other.tokens then return file.name .. " has other contents" end
        return ("%s of %s tokens, where it was %s of %s"):format(shown(file.name), shown(file.tokens), shown(other.name), shown(other.tokens))
      end
    end
  end
  return "other contents"
end

local OTHER_SAMPLES = "; the next samples are not those of an uninterrupted run"

-- Whether the samples that follow are others than without the interruption, in data that are the same.
local function other_samples(record, now)
  local before = record.settings or {}
  for _, name in ipairs { "seed", "seq", "pack" } do
    if before[name] ~= now.settings[name] then return true end
  end
  return not now.settings.seed and record.seed ~= now.seed
end

-- Report how the run that continues differs from the saved one.
local function compare(kept, record, now)
  local changed = differences(record.settings or {}, now.settings)
  if kept.compared then return end -- with a checkpoint that was damaged
  kept.compared = true
  if not now.settings.seed and record.seed ~= now.seed then table.insert(changed, 1, ("--seed %s, was %s"):format(now.seed, shown(record.seed))) end
  if #changed > 0 then
    report("settings have changed: " .. table.concat(changed, "; ") .. (other_samples(record, now) and OTHER_SAMPLES or ""))
  end
  local files = {}
  for name, hash in pairs(now.files) do
    if (record.files or {})[name] ~= hash then files[#files + 1] = name end
  end
  if #files > 0 then report(("the script has changed: %s (the run's folder has the saved text)"):format(table.concat(files, ", "))) end
  if record.version ~= now.version then report(("mlua %s saved this, and mlua %s continues"):format(shown(record.version), now.version)) end
  kept.changed = #changed > 0 or #files > 0
end

local function check_data(record, training, now)
  if record.training ~= training or not record.data or core.options().new_data then return end
  local a, b = core.json(record.data, "the data of the checkpoint"), core.json(now, "the data")
  local problem = other_data(a.data, b.data)
  if problem then core.fail("the run's data are others than before: " .. problem, { help = "--new-data continues with other data" }) end
  problem = type(a.eval_data) == "table" and type(b.eval_data) == "table" and other_data(a.eval_data, b.eval_data)
  if problem then report("eval_data are others than before: " .. problem) end
end

local function some(list)
  local most = 8
  return table.concat(list, ", ", 1, math.min(#list, most)) .. (#list > most and (" and %d more"):format(#list - most) or "")
end

local function name_of_problem(text) return text:match "^[^:]*" end

-- Of a script that was edited while it ran (mlua run --watch), whose checkpoint lacks some of its states or has them of other
-- axes: the values that an edit before left out. Those that have none stay in the lists, as names.
local function take_undone(from, missing, reshaped)
  for i, text in ipairs(reshaped) do reshaped[i] = name_of_problem(text) end
  local names = table.move(reshaped, 1, #reshaped, #missing + 1, { table.unpack(missing) })
  local loaded = #names > 0 and undo.load(from, names) or {}
  local function others(list)
    local rest = {}
    for _, name in ipairs(list) do rest[#rest + 1] = not loaded[name] and name or nil end
    return rest
  end
  local back = {}
  for name in pairs(loaded) do back[#back + 1] = name end
  table.sort(back)
  if #back > 0 then report(("as they were before an edit left them out: %s"):format(some(back))) end
  return others(missing), others(reshaped)
end

-- What this edit leaves out or changes, for an undo.
local function hold_for_undo(to, path, unexpected, reshaped)
  local names, count = {}, 0
  for _, list in ipairs { unexpected, reshaped } do
    for _, text in ipairs(list) do names[name_of_problem(text)], count = true, count + 1 end
  end
  if core.options().rank ~= 0 then return end
  local bytes, problem = undo.hold(to, path, names)
  if count == 0 then return end
  report(bytes and ("%d states that the edit leaves out are in host memory for an undo (%s)"):format(count, format.bytes(bytes))
    or ("%d states that the edit leaves out begin anew after an undo: %s; %s has them"):format(count, problem, path))
end

-- Load what fits. Where the checkpoint was saved by an earlier training than this one's states, the others come later.
local function load(kept, path, last)
  local record, missing, unexpected, reshaped = core.checkpoint_load(path, nil, false)
  if not record then return nil, missing end
  if not last then return core.json(record, path) end
  local options = core.options()
  if options.undo then
    local changed = { table.unpack(reshaped) }
    missing, reshaped = take_undone(options.undo[1], missing, reshaped)
    hold_for_undo(options.undo[2], path, unexpected, changed)
  end
  if #reshaped > 0 and options.new_sizes then
    for i, text in ipairs(reshaped) do reshaped[i] = name_of_problem(text) end
    report(("%s has other axes of %s: they begin anew"):format(path, some(reshaped)))
  elseif #reshaped > 0 then
    core.fail(("%s does not fit the script: %s"):format(path, some(reshaped)), { help = "a run continues with axes of the same sizes; another --out begins anew" })
  end
  if #missing > 0 then
    local text = ("%s has no %s"):format(path, some(missing))
    if not kept.changed then core.fail(text, { help = "the script makes other states than when it was saved" }) end
    report(text .. ": they begin anew")
  end
  if #unexpected > 0 then report(("%s has %s, which the script has not"):format(path, some(unexpected))) end
  return core.json(record, path)
end

-- Whether a record is of a run's checkpoint: scripts may save others beside them.
local function of_run(record) return type(record) == "table" and math.type(record.step) == "integer" and math.type(record.training) == "integer" end

---The record from which the run continues; nil where it has no checkpoint yet. None that is whole is an error: what is left
---of the run may be worth more than a new start. `now` is what a record of it would say.
---@param kept table
---@param now table
---@return table?
function saves.find(kept, now)
  if core.options().rank == 0 then core.checkpoint_sweep(kept.checkpoints) end
  local lost = next(kept.damaged) ~= nil
  for _, c in ipairs(listed(kept.checkpoints)) do
    lost = true
    local text, problem, record
    if core.options().rank == 0 and c.whole and not kept.damaged[c.path] then text, problem = core.checkpoint_record(c.path) end
    text = core.share(text)
    record = text and core.json(text)
    if of_run(record) then
      kept.resumed, kept.from = record, c.path
      compare(kept, record, now)
      return record
    end
    if not kept.damaged[c.path] then
      report(("%s is no checkpoint to continue from: %s"):format(c.path, c.problem or problem or "it is none of a run"))
    end
  end
  if lost then
    core.fail(("%s has no whole checkpoint"):format(kept.path), { help = "another --out begins anew; mlua show --verify " .. kept.path .. " says what is damaged" })
  end
end

---The states of a training, from the checkpoint that saves.find has found or, where that is damaged, one before it.
---@param kept table
---@param training integer
---@param now table
function saves.restore(kept, training, now)
  local record = kept.resumed
  while record do
    check_data(record, training, now.data)
    local loaded, problem = load(kept, kept.from, record.training == training)
    if loaded then
      kept.last_good = name_of(kept.from)
      if record.training == training then report(("continues %s from %s: step %d"):format(kept.path, name_of(kept.from), record.step)) end
      return record
    end
    report(("%s is damaged: %s"):format(kept.from, problem))
    local damaged = kept.from
    kept.damaged[damaged] = true
    record = saves.find(kept, now)
    kept.resumed = record
    put_aside(kept, damaged) -- the last one stays where it is
    if record.training < training then -- the script is beyond where that one begins
      core.fail(("%s is of an earlier training of the script"):format(kept.from), { help = "start again with --resume: the run continues from there" })
    end
  end
end

-- Saving -------------------------------------------------------------------------------------------------------------------

-- Whole checkpoints of the run, the oldest first, for remove_old: read once, since a manifest takes milliseconds.
local function found(kept)
  local list = {}
  for _, c in ipairs(core.checkpoint_list(kept.checkpoints)) do
    local record = c.whole and core.checkpoint_record(c.path)
    if record and of_run(core.json(record)) then table.insert(list, 1, { path = c.path, step = c.step }) end
  end
  return list
end

local function removed(ok, problem)
  if not ok then report("cannot remove an old checkpoint: " .. tostring(problem)) end
end

-- Rank 0, once a save is durable: of the run's own the newest stay, and each of keep's steps.
local function remove_old(kept, path, step)
  local keep, newest, list = kept.keep, 0, {}
  for _, c in ipairs(kept.whole or found(kept)) do
    if c.path ~= path then list[#list + 1] = c end
  end
  list[#list + 1] = { path = path, step = step }
  table.sort(list, function(a, b) return (a.step or 0) < (b.step or 0) end)
  kept.whole = {}
  for i = #list, 1, -1 do
    local c = list[i]
    newest = newest + 1
    if newest <= keep.newest then
      table.insert(kept.whole, 1, c)
    elseif not (keep.every and c.step and c.step % keep.every == 0) then
      removed(core.checkpoint_remove(c.path))
    end
  end
end

local function ended(kept, result)
  if not result then return end
  local name, rank = name_of(result.path), core.options().rank
  if rank ~= 0 then -- the first rank knows of the whole, and this one why it could not write its part
    if result.own and result.error then core.write_error(("%s: %s\n"):format(name, result.error)) end
    return
  end
  local step = math.tointeger(tonumber(name:match "%d+$"))
  local whole = kept.last_good
  if result.error then
    report(("%s could not be saved: %s; training continues%s"):format(name, result.error, whole and (", and %s stays"):format(whole) or ""))
    core.unsaved(("the end of this run is not saved: %s of %s"):format(
      whole and ("the last whole checkpoint is " .. whole) or "there is no whole checkpoint", kept.path))
    kept.event("save_failed", { { "checkpoint", name }, { "problem", result.error } }, step)
    return
  end
  kept.last_good = name
  core.unsaved(nil)
  kept.event("save", { { "checkpoint", name }, { "bytes", result.bytes }, { "stall_ms", 1e3 * result.stall }, { "seconds", result.seconds } }, step)
  remove_old(kept, result.path, step)
end

---Take note of a save that has ended meanwhile.
---@param kept table
function saves.poll(kept)
  if kept.saving then ended(kept, core.checkpoint_poll()) end
end

---Wait for the save under way.
---@param kept table
function saves.wait(kept)
  if core.options().rank == 0 then removed(core.checkpoint_remove()) end
  if not kept.saving then return end
  kept.saving = false
  ended(kept, core.checkpoint_poll()) -- one that ended before
  ended(kept, core.checkpoint_wait())
end

local under_way -- the run whose saves those of the script are beside

---Wait for the run's own save before one of the script, whose result takes its place; all ranks at once.
function saves.wait_for_run()
  if under_way then saves.wait(under_way) end
end

---Begin a save; all ranks at once. A save that fails stops no training.
---@param kept table
---@param record table
function saves.begin(kept, record)
  saves.wait(kept)
  kept.saved_step, kept.saved_at = record.step, core.time()
  local path = ("%s/step-%08d"):format(kept.checkpoints, record.step)
  if core.options().rank == 0 then
    core.make_folders(kept.checkpoints)
    core.checkpoint_sweep(kept.checkpoints) -- what failed saves left
  end
  core.share()
  local begun, problem = core.checkpoint_begin(path, core.to_json(record))
  if begun then kept.saving = true else ended(kept, { path = path, error = problem }) end
end

---What the first save would take time for is done after the first step; all ranks at once.
---@param kept table
function saves.rehearse(kept)
  local every = kept.save_every
  if kept.rehearsed or not (every.steps or every.seconds) then return end
  kept.rehearsed = true
  if core.options().rank == 0 then kept.whole = found(kept) end
  core.checkpoint_rehearse()
end

---Whether a save is due after this step; rank 0's clock decides.
---@param kept table
---@return boolean
function saves.due(kept)
  local every = kept.save_every
  if core.options().rank ~= 0 or kept.saved_step == kept.step then return false end
  if every.steps then return kept.step % every.steps == 0 end
  return every.seconds ~= nil and core.time() - kept.saved_at >= every.seconds
end

---Back to the newest checkpoint of this training, for on_nan=skip; nil where there is none.
---@param kept table
---@param training integer
---@return table? record
function saves.back(kept, training)
  saves.wait(kept)
  for _, c in ipairs(listed(kept.checkpoints)) do
    local record = c.whole and core.checkpoint_load(c.path, nil, true)
    record = record and core.json(record, c.path)
    if record and record.training == training then return record, name_of(c.path) end
  end
end

---@param kept table
function saves.open(kept)
  under_way = kept
  kept.checkpoints, kept.damaged = kept.path .. "/checkpoints", {} -- paths that proved damaged in this process
  kept.save_every = universal.value "save_every" or { seconds = 900 }
  kept.keep = universal.value "keep" or { newest = 2 }
  kept.saved_at = core.time()
end

return saves
