-- `mlua watch SCRIPT`: at each save the report of `mlua check` as a difference to the last one, errors first. The script is
-- traced in a process of its own (mlua check --facts, known.lua); its file and those that it loads are looked at 5 times a second.
local core = require "mlua.core"
local format = require "mlua.lsp_format"

local INTERVAL, SHOWN = 0.2, 8 -- seconds; parameters of a list

local function write(text, ...) io.write((select("#", ...) > 0 and text:format(...) or text), "\n") end

-- Reports ----------------------------------------------------------------------------------------------------------------------

-- What is compared: a label, the value of a report, how it is shown.
local function integer(value) return ("%.0f"):format(value) end
local ROWS = {
  { "parameters", function(r) return r.parameters end, format.count }, { "states", function(r) return r.state_bytes end, format.bytes },
  { "peak memory", function(r) return r.peak_bytes end, format.bytes }, { "work a step", function(r) return r.flops end, format.flops },
  { "predicted step", function(r) return r.predicted and r.predicted.seconds end, format.seconds },
  { "tokens/s", function(r) return r.predicted and r.predicted.tokens_per_s end, integer },
  { "tokens a step", function(r) return r.tokens end, integer }, { "kernels", function(r) return r.kernels end, integer },
  { "to compile", function(r) return r.kernels_to_compile end, integer }, { "products", function(r) return r.matrix_products end, integer },
  { "attention", function(r) return r.attentions end, integer }, { "ranks", function(r) return r.ranks end, integer },
  { "bubble", function(r) return r.bubble end, function(x) return ("%.1f%%"):format(100 * x) end },
}

-- The collectives of a report: {"dp all-reduce"} -> {count, bytes}.
local function collectives(report)
  local list = {}
  for mesh, kinds in pairs(report.collectives or {}) do
    for kind, sum in pairs(kinds) do list[mesh .. " " .. kind] = sum end
  end
  return list
end

local function sent(sum) return sum and ("%d, %s"):format(sum.count, format.bytes(sum.bytes)) or "none" end

local function write_whole(report)
  for _, row in ipairs(ROWS) do
    local value = row[2](report)
    if value then write("  %-16s %s", row[1], row[3](value)) end
  end
  for name, sum in pairs(collectives(report)) do write("  %-16s %s sent by a rank", name, sent(sum)) end
end

-- Both reports' values where they differ; whether any does.
local function write_difference(before, after)
  local any = false
  for _, row in ipairs(ROWS) do
    local old, new = row[2](before), row[2](after)
    if old ~= new and (old or new) then
      any = true
      local share = old and new and old ~= 0 and (" (%+.1f%%)"):format(100 * (new - old) / old) or ""
      write("  %-16s %s -> %s%s", row[1], old and row[3](old) or "none", new and row[3](new) or "none", share)
    end
  end
  local old, new = collectives(before), collectives(after)
  local names = {}
  for name in pairs(old) do names[name] = true end
  for name in pairs(new) do names[name] = true end
  for name in pairs(names) do
    if sent(old[name]) ~= sent(new[name]) then
      any = true
      write("  %-16s %s -> %s", name, sent(old[name]), sent(new[name]))
    end
  end
  return any
end

-- Parameters -------------------------------------------------------------------------------------------------------------------

local function by_name(parameters)
  local set = {}
  for _, parameter in ipairs(parameters) do set[parameter.name] = parameter.type end
  return set
end

-- Lines that differ in the number of a layer alone are one.
local function write_list(mark, lines)
  local count, list = {}, {}
  for _, line in ipairs(lines) do
    local alike = line:gsub("%.%d+%.", ".*.")
    if not count[alike] then list[#list + 1] = alike end
    count[alike] = (count[alike] or 0) + 1
  end
  table.sort(list)
  for i, line in ipairs(list) do list[i] = count[line] > 1 and ("%s, %d of them"):format(line, count[line]) or line end
  for i = 1, math.min(#list, SHOWN) do write("  %s %s", mark, list[i]) end
  if #list > SHOWN then write("  %s %d more", mark, #list - SHOWN) end
end

local function write_parameters(before, after)
  local old, new = by_name(before), by_name(after)
  local added, removed, changed = {}, {}, {}
  for name, kind in pairs(new) do
    if not old[name] then
      added[#added + 1] = ("%s %s"):format(name, kind)
    elseif old[name] ~= kind then
      changed[#changed + 1] = ("%s %s -> %s"):format(name, old[name], kind)
    end
  end
  for name, kind in pairs(old) do
    if not new[name] then removed[#removed + 1] = ("%s %s"):format(name, kind) end
  end
  write_list("+", added)
  write_list("-", removed)
  write_list("~", changed)
  return #added + #removed + #changed > 0
end

-- Hints that the last facts lacked.
local function write_hints(before, after)
  local known = {}
  for _, hint in ipairs(before and before.hints or {}) do known[hint.text] = true end
  for _, hint in ipairs(after.hints) do
    if not known[hint.text] then write("  %s:%d: hint: %s", hint.file, hint.line, hint.text) end
  end
end

-- Watching ---------------------------------------------------------------------------------------------------------------------

-- The facts of the script as it is now; nil and why not.
local function trace(words)
  core.lsp_start(words)
  local output, code
  repeat
    local what
    what, output, code = core.lsp_wait(60, false)
  until what == "process" or what == "end"
  local facts = output and core.json(output)
  if type(facts) ~= "table" then return nil, code end
  return facts
end

local function stamps(files)
  local list = {}
  for _, file in ipairs(files) do list[#list + 1] = file .. " " .. (core.lsp_stamp(file) or "absent") end
  return list
end

-- Wait until one of the files changes; gives its name.
local function wait_for_change(files, known)
  while true do
    core.lsp_wait(INTERVAL, false)
    for i, stamp in ipairs(stamps(files)) do
      if stamp ~= known[i] then return files[i] end
    end
  end
end

local function show(facts, last)
  if facts.error then
    io.write(facts.error.text, facts.error.text:find "\n$" and "" or "\n")
    if last then write "  the report before this error stays the one to compare with" end
    return last
  end
  if not last then
    for _, report in ipairs(facts.reports) do write_whole(report) end
    if #facts.reports == 0 then write "  no program: nothing to plan" end
  else
    local any = write_parameters(last.parameters, facts.parameters)
    for i, report in ipairs(facts.reports) do
      if last.reports[i] then any = write_difference(last.reports[i], report) or any else write_whole(report) any = true end
    end
    if not any then write "  no difference" end
  end
  write_hints(last, facts)
  return facts
end

---@param script string
return function(script)
  local words = { "check", "--facts", "--quiet", table.unpack(core.options().paths) }
  local files, last, changed = { script }, nil, nil
  while true do
    local known = stamps(files) -- before the trace: what is saved meanwhile is traced again
    write("%s  %s", os.date "%H:%M:%S", changed and changed .. " changed" or "watching " .. script)
    local facts, code = trace(words)
    if facts then
      last = show(facts, last)
      local loaded = { script }
      for _, file in ipairs(facts.files) do
        if file ~= script then loaded[#loaded + 1] = file end
      end
      if facts.error then -- a file that was not reached stays watched
        for _, file in ipairs(files) do
          if not table.concat(loaded, "\n"):find(file, 1, true) then loaded[#loaded + 1] = file end
        end
      end
      local before = {}
      for i, file in ipairs(files) do before[file] = known[i] end
      files, known = loaded, stamps(loaded)
      for i, file in ipairs(files) do known[i] = before[file] or known[i] end
    else
      write("  the script could not be traced (exit code %d)", code or -1)
      if code == 2 then return end -- options that are wrong stay wrong
    end
    io.stdout:flush()
    changed = wait_for_change(files, known)
  end
end
