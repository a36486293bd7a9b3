-- `mlua run SCRIPT --out DIR --watch`: the run is a process of its own. At a save the script is checked; where it is right, the
-- run saves its states and stops at its next step, and the new script continues from them: states are found by name, axes and
-- sizes; what an edit left out waits in this process's memory for an undo. A script with an error, or with other data, batch or seed, leaves the old program running.
local core = require "mlua.core"
local files = require "mlua.watch_files"
local report = require "mlua.watch_report"
local undo = require "mlua.run_undo"

local INTERVAL = 0.2 -- seconds
local STOPPED = 75 -- the exit code of a run that saved and may be continued
local FIXED = { "seed", "batch", "seq", "data", "eval_data", "tokenizer", "pack", "accum" } -- options of m.train that an edit cannot change

-- Behind what was printed.
local function say(text, ...)
  io.stdout:flush()
  core.write_error((select("#", ...) > 0 and text:format(...) or text) .. "\n")
end

-- The words of `mlua check` for a run's: without what a check does not take.
local WITH_VALUE, ALONE = { ["--out"] = true, ["-n"] = true, ["--restarts"] = true, ["--undo-memory"] = true }, { ["--resume"] = true, ["--new-data"] = true, ["--elastic"] = true, ["--json"] = true, ["--quiet"] = true }
local function check_words(words)
  local list, i = { "check", "--facts", "--quiet" }, 1
  while words[i] do
    local name = words[i]:match "^(%-%-?[%a-]+)=" or words[i]
    if WITH_VALUE[name] then
      i = i + (name == words[i] and 1 or 0)
    elseif not ALONE[words[i]] then
      list[#list + 1] = words[i]
    end
    i = i + 1
  end
  return list
end

local function setting_of(facts, name)
  for _, setting in ipairs(facts.settings) do
    if setting.name == name then return setting.value end
  end
end

-- Why the new script cannot continue the run; nil where it can.
local function needs_restart(before, after)
  local function changed(name, old, new)
    return old ~= new and ("%s was %s and is %s"):format(name, old == nil and "not set" or old, new == nil and "not set" or new) or nil
  end
  for i = 1, math.min(#before.trainings, #after.trainings) do
    for _, name in ipairs(FIXED) do
      local problem = changed(name, before.trainings[i][name], after.trainings[i][name])
      if problem then return problem end
    end
  end
  local problem = changed("dtype", setting_of(before, "dtype"), setting_of(after, "dtype"))
  if problem then return problem end
  local old, new = before.reports[1], after.reports[1]
  if old.tokens ~= new.tokens then return ("a step is of %.0f tokens instead of %.0f"):format(new.tokens, old.tokens) end
  if old.ranks ~= new.ranks or core.to_json(old.mesh or {}) ~= core.to_json(new.mesh or {}) then return "the layout has another mesh" end
end

-- Whether m.train trains it: own loops keep their place by themselves.
local function trains(facts) return facts.reports[1] and (facts.reports[1].tokens or 0) > 0 end

local function end_of_run()
  local running, code
  repeat
    running, code = core.lsp_running()
    if running then core.lsp_wait(0.02, false) end
  until not running
  return code
end

-- A new text: whether the run continues with it.
local function consider(before, after)
  if after.error then
    io.write(after.error.text, after.error.text:find "\n$" and "" or "\n")
    say "the old program continues"
    return false
  end
  if not trains(after) then
    say "the script has no m.train: the old program continues"
    return false
  end
  local problem = needs_restart(before, after)
  if problem then
    say("%s: that needs a new run; the old program continues", problem)
    return false
  end
  local any, same = report.parameters(before.parameters, after.parameters)
  say("%d parameters continue by their names%s", same, any and "; what is new (+) or has other axes (~) begins anew" or "")
  report.difference(before.reports[1], after.reports[1])
  io.stdout:flush()
  return true
end

---@param script string
---@return integer exit code
return function(script)
  local words = core.options().paths
  local checked = check_words(words)
  local facts, code = files.trace(checked)
  if not facts then return code or 1 end
  if facts.error then
    io.write(facts.error.text)
    return 1
  end
  if not trains(facts) then
    core.fail("--watch continues trainings of m.train, and the script has none", { help = "an own loop keeps its place by itself: m.save and m.load" })
  end
  local list, known = files.after(script, facts, { script }, {})
  core.lsp_run { "run", table.unpack(words) }
  local failed = false -- the edited script, after it was found right
  local undone, left_out = core.lsp_memory(), core.lsp_memory() -- what an edit before left out; what the next one does
  while true do
    local what = core.lsp_wait(INTERVAL, false)
    if what == "end" then
      core.lsp_signal "TERM"
      return end_of_run()
    end
    local running, ended = core.lsp_running()
    if not running and not failed then
      if ended == 0 or ended == STOPPED or list.edits == nil then return ended end
      failed = true
      say("the edited script ended with exit code %d: mend it and save, and the run continues from its checkpoint", ended)
    end
    local changed = files.changed(list, known)
    if changed then
      local edits = (list.edits or 0) + 1
      say("%s changed", changed)
      local before_trace = files.stamps(list)
      local after = files.trace(checked)
      local accepted = after and consider(facts, after)
      if after then list, known = files.after(script, after, list, before_trace) else known = before_trace end
      list.edits = edits
      if accepted then
        if not failed then
          core.lsp_signal "USR1"
          local stopped = end_of_run()
          if stopped ~= STOPPED then return stopped end -- it was over
          if undo.is_of_an_edit(left_out) then undone, left_out = left_out, undone end
        end
        failed, facts = false, after
        core.lsp_run { "run", "--resume", "--new-sizes", "--undo", undone .. ":" .. left_out, table.unpack(words) }
      end
    end
  end
end
