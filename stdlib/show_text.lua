-- What `mlua show` prints: tensors, a run, runs beside each other.
local core = require "mlua.core"
local chart = require "mlua.show_chart"

local KEY, NAME = 15, 60 -- columns of the words on the left, of a tensor's name at most
local CHECKPOINTS = 12 -- that are listed

-- Texts of values ------------------------------------------------------------------------------------------------------------

local function pad(text, width) return text .. (" "):rep(width - #text) end

local function is_finite(value) return type(value) == "number" and value - value == 0 end

local function items(value) return type(value) == "table" and value or {} end

-- Control characters, which a terminal would act on, as "?".
local function plain(text) return (tostring(text):gsub("\xC2[\x80-\x9F]", "?"):gsub("%c", "?")) end

local function bytes(value)
  local units, unit = { "KiB", "MiB", "GiB", "TiB" }, 0
  while value >= 1024 and unit < 4 do value, unit = value / 1024, unit + 1 end
  return unit == 0 and ("%d B"):format(value) or (unit < 3 and "%.1f %s" or "%.2f %s"):format(value, units[unit])
end

local function count(value)
  local units, unit = { "k", "M", "G", "T", "P" }, 0
  while math.abs(value) >= 1000 and unit < 5 do value, unit = value / 1000, unit + 1 end
  return unit == 0 and ("%.0f"):format(value) or ("%.1f %s"):format(value, units[unit])
end

local function time(seconds)
  if seconds < 60 then return ("%.1f s"):format(seconds) end
  local minutes = seconds // 60
  if minutes < 60 then return ("%.0f min %.0f s"):format(minutes, seconds // 1 % 60) end
  return ("%.0f h %.0f min"):format(minutes // 60, minutes % 60)
end

local function value_text(value)
  if type(value) == "string" or math.type(value) == "integer" then return plain(value) end
  return math.type(value) == "float" and ("%.6g"):format(value) or plain(core.to_json(value))
end

-- "key  text", where there is one; a list of parts is joined.
local function line(key, text, separator)
  if type(text) == "table" then text = table.concat(text, separator or ", ") end
  if text and text ~= "" then io.write(pad(key, KEY), " ", text, "\n") end
end

-- The values of an object as "a=1 b=2", in lines of `width` behind the key.
local function pairs_line(key, object, separator, width)
  local column = 0
  for name, value in pairs(items(object)) do
    local pair = plain(name) .. "=" .. value_text(value)
    if column == 0 or column + #pair + #separator > width then
      io.write(column > 0 and "\n" or "", pad(column > 0 and "" or key, KEY), " ", pair)
      column = KEY + 1
    else
      io.write(separator, pair)
    end
    column = column + #pair + #separator
  end
  if column > 0 then io.write "\n" end
end

-- Tensors --------------------------------------------------------------------------------------------------------------------

-- "[embed=768, heads=12]", or without names "[768, 12]".
local function axes_text(tensor)
  local list = {}
  for i, axis in ipairs(tensor.axes or tensor.shape) do
    list[i] = type(axis) == "table" and plain(axis[1]) .. "=" .. axis[2] or tostring(axis)
  end
  return "[" .. table.concat(list, ", ") .. "]"
end

local function write_tensors(tensors)
  local widest, widest_axes, axes = 4, 4, {}
  for i, tensor in ipairs(tensors) do
    axes[i] = axes_text(tensor)
    if #tensor.name <= NAME then widest = math.max(widest, #tensor.name) end
    if #axes[i] <= NAME then widest_axes = math.max(widest_axes, #axes[i]) end
  end
  for i, tensor in ipairs(tensors) do
    local name, dtype = pad(plain(tensor.name), widest), pad(plain(tensor.dtype), 5)
    io.write(("  %s  %s %s %10s  %s\n"):format(name, dtype, pad(axes[i], widest_axes), bytes(tensor.bytes), plain(tensor.file)))
  end
end

local function sums_text(sums)
  local list = { ("%d of %s elements, %s"):format(sums.tensors, count(sums.elements), bytes(sums.bytes)) }
  for dtype, sum in pairs(sums.dtypes) do
    list[#list + 1] = ("%s: %d of %s"):format(plain(dtype), sum.tensors, bytes(sum.bytes))
  end
  return list
end

-- A checkpoint or safetensors files. Of a checkpoint's record the plain values, and its objects as pairs.
local function write_holder(shown, width)
  line(shown.kind, plain(shown.path))
  if shown.kind == "checkpoint" then line("state", shown.verified and "whole; every tensor was read" or "whole") end
  if shown.problem then line("damaged", plain(shown.problem)) end
  for key, value in pairs(shown.record or {}) do
    if type(value) == "table" and not value[1] then
      pairs_line(plain(key), value, " ", width)
    elseif value ~= core.null then
      line(plain(key), value_text(value))
    end
  end
  pairs_line("metadata", shown.metadata, " ", width)
  line("tensors", sums_text(shown.sums), "; ")
  write_tensors(shown.tensors)
end

-- A run ----------------------------------------------------------------------------------------------------------------------

local function progress_text(p)
  if not p.step then return "no step yet" end
  local text = "step " .. p.step
  if p.steps and p.steps > 0 then text = ("%s of %d (%.0f %%)"):format(text, p.steps, 100 * p.step / p.steps) end
  if p.tokens then text = ("%s, %s tokens"):format(text, count(p.tokens)) end
  if p.seconds then text = ("%s, %s"):format(text, time(p.seconds)) end
  if not p.seconds_per_step or (p.steps or 0) <= p.step then return text end
  return ("%s; %s left at this speed"):format(text, time((p.steps - p.step) * p.seconds_per_step))
end

local function last_text(last)
  local list = {}
  local function add(key, format, value)
    if is_finite(last[key]) then list[#list + 1] = format:format(value or last[key]) end
  end
  if last.loss == core.null then list[1] = "loss not finite" end
  add("loss", "loss %.4f")
  add("grad_norm", "norm %.3f")
  add("lr", "lr %.2e")
  add("memory_gib", "%.2f GiB")
  add("tokens_per_s", "%s tokens/s", is_finite(last.tokens_per_s) and count(last.tokens_per_s))
  add("mfu", "MFU %.1f %%", is_finite(last.mfu) and 100 * last.mfu)
  return list
end

-- Series that the script added, and no chart shows.
local KNOWN = { "tokens", "samples", "memory_gib", "step_ms", "mfu", "data_ms", "eval_ms", "save_ms", "tflops_per_gpu" }
local function others_text(run)
  local known, list = {}, {}
  for _, name in ipairs(KNOWN) do known[name] = true end
  for _, each in ipairs(chart.all) do known[each.series] = true end
  for name in pairs(run.series) do
    if not known[name] then list[#list + 1] = plain(name) .. " " .. value_text(run.last[name]) end
  end
  return list
end

local function evaluation_text(e)
  if not items(e).step then return "" end
  local text = ("step %d: %.4f"):format(e.step, is_finite(e.loss) and e.loss or 0 / 0)
  if not is_finite(e.lowest) or e.lowest == e.loss then return text end
  return ("%s; lowest %.4f at step %d"):format(text, e.lowest, e.lowest_step)
end

-- "save 7, restart 1"
local function events_text(events)
  local counts, list = {}, {}
  for _, event in ipairs(events or {}) do
    if event.event ~= "start" and event.event ~= "end" then counts[event.event] = (counts[event.event] or 0) + 1 end
  end
  for name, number in pairs(counts) do list[#list + 1] = plain(name) .. " " .. number end
  return list
end

-- "parameters 61.8 MiB, optimizer 82.7 MiB": what is at least `least`.
local function amounts(object, least, format)
  local list = {}
  for name, value in pairs(items(object)) do
    if is_finite(value) and value >= least then list[#list + 1] = plain(name) .. " " .. format(value) end
  end
  return list
end

-- "GEMM 41 %, attention 20 %" of the device's time in the measured steps.
local function profile_text(profile)
  local list = {}
  for i, kind in ipairs(profile and profile.seconds > 0 and profile.kinds or {}) do
    list[i] = ("%s %.0f %%"):format(plain(kind.kind), 100 * kind.seconds / profile.seconds)
  end
  return list
end

local function write_checkpoints(list)
  for i, state in ipairs(list) do
    if i > CHECKPOINTS and #list > CHECKPOINTS + 1 then return line("", ("and %d older"):format(#list - CHECKPOINTS)) end
    local what = state.whole and "whole" or "not whole: " .. plain(state.problem)
    line(i == 1 and "checkpoints" or "", ("%s  %10s  %s"):format(plain(state.path:match "[^/]*$"), bytes(state.bytes), what))
  end
end

local function write_about(run, width)
  local about, command, started = run.about, {}, {}
  line("run", plain(run.path))
  if about.script then line("script", plain(about.script)) end
  for i, word in ipairs(type(about.command) == "table" and about.command or { about.command }) do command[i] = value_text(word) end
  line("command", command, " ")
  for i, key in ipairs { "started", "version", "device", "seed" } do
    local value, label = about[key], i == 2 and "mlua " or i == 4 and "seed " or ""
    if value ~= nil and value ~= core.null then started[#started + 1] = label .. value_text(value) end
  end
  line("started", started)
  pairs_line("settings", about.settings, " ", width)
  pairs_line("layout", about.layout, ", ", width)
  if is_finite(about.parameters) then line("parameters", count(about.parameters)) end
  line("planned memory", amounts(about.memory, 1, bytes))
end

local function write_run(run, width, ascii)
  write_about(run, width)
  line("progress", progress_text(run.progress))
  line("lost to", amounts(run.progress.lost, 0.1, time))
  line("last", last_text(run.last), "  ")
  line("also logged", others_text(run))
  line("evaluation", evaluation_text(run.evaluation))
  line("events", events_text(run.events))
  line("profile", profile_text(run.profile))
  write_checkpoints(run.checkpoints)
  chart.write({ run }, width, ascii)
end

-- Runs beside each other -----------------------------------------------------------------------------------------------------

local SERIES = {
  { "loss", "loss" }, { "evaluation", "eval_loss" }, { "gradient norm", "grad_norm" }, { "learning rate", "lr" },
  { "tokens", "tokens" }, { "tokens/s", "tokens_per_s" }, { "GiB", "memory_gib" },
}

-- A row of what `cell` gives of each run, where it gives anything.
local function write_row(label, runs, column, cell)
  local row, any = pad(plain(label), KEY), false
  for _, run in ipairs(runs) do
    local text = cell(run) or ""
    any = any or text ~= ""
    row = row .. " " .. pad(text:sub(1, column), column)
  end
  if any then io.write(row:match "^(.-) *$", "\n") end
end

-- Settings in which not all runs agree.
local function write_differences(runs, column)
  local function setting(run, name) return items(run.about.settings)[name] end
  local names = {}
  for _, run in ipairs(runs) do
    for name in pairs(items(run.about.settings)) do names[name] = true end
  end
  for name in pairs(names) do
    local function cell(run)
      local value = setting(run, name)
      return value ~= nil and value_text(value)
    end
    local first, same = cell(runs[1]), true
    for _, run in ipairs(runs) do same = same and cell(run) == first end
    if not same then write_row(name, runs, column, cell) end
  end
end

local function step_text(p)
  return p.step and ((p.steps or 0) > 0 and ("%d of %d"):format(p.step, p.steps) or tostring(p.step))
end

local function whole_text(list)
  local whole = 0
  for _, state in ipairs(list) do whole = whole + (state.whole and 1 or 0) end
  if #list > 0 then return (whole == #list and "%d whole" or "%d whole of %d"):format(whole, #list) end
end

local function compare_runs(runs, width, ascii)
  local column = math.max(12, (width - KEY) // #runs - 1)
  for i, run in ipairs(runs) do
    local letter, path = string.char(("a"):byte() + (i - 1) % 26), plain(run.path)
    run.shown_as = letter .. " " .. (#path + 2 > column and path:sub(2 - column) or path)
  end
  write_row("run", runs, column, function(run) return run.shown_as end)
  for _, key in ipairs { "script", "started", "device", "seed", "layout", "parameters" } do
    write_row(key, runs, column, function(run)
      local value = run.about[key]
      if value == nil or value == core.null then return nil end
      return key == "parameters" and is_finite(value) and count(value) or value_text(value)
    end)
  end
  write_differences(runs, column)
  write_row("step", runs, column, function(run) return step_text(run.progress) end)
  for _, series in ipairs(SERIES) do
    local label, key = table.unpack(series)
    write_row(label, runs, column, function(run)
      local value = run.last[key]
      return is_finite(value) and (key:find "^tokens" and count(value) or ("%.5g"):format(value))
    end)
  end
  write_row("checkpoints", runs, column, function(run) return whole_text(run.checkpoints) end)
  chart.write(runs, width, ascii)
end

-- All of them ----------------------------------------------------------------------------------------------------------------

-- Whether the terminal's text is UTF-8, by the variables that say so.
local function is_utf8()
  local function variable(name) return os.getenv(name) ~= "" and os.getenv(name) or nil end
  local locale = (variable "LC_ALL" or variable "LC_CTYPE" or variable "LANG" or ""):lower()
  return locale:find "utf%-?8" ~= nil
end

local text = {}

---@param shown table[] as stdlib/show.lua has them
---@param ascii boolean also where the locale is UTF-8
function text.write(shown, ascii)
  local columns = math.tointeger(tonumber(os.getenv "COLUMNS") or 0) or 0
  if columns == 0 then columns = core.terminal() or 80 end
  local width, runs, printed = columns >= 40 and math.min(columns, 400) or 80, {}, false
  ascii = ascii or not is_utf8()
  for _, one in ipairs(shown) do runs[#runs + 1] = one.kind == "run" and one or nil end
  if #runs > 1 then
    compare_runs(runs, width, ascii)
    printed = true
  end
  for _, one in ipairs(shown) do
    if one.kind ~= "run" or #runs == 1 then
      if printed then io.write "\n" end
      printed = true
      if one.kind == "run" then write_run(one, width, ascii) else write_holder(one, width) end
    end
  end
end

return text
