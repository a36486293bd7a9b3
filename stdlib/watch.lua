-- `mlua watch SCRIPT`: at each save the report of `mlua check` as a difference to the last one, errors first. The script is
-- traced in a process of its own (mlua check --facts, known.lua); its file and those that it loads are looked at 5 times a second.
local core = require "mlua.core"
local files = require "mlua.watch_files"
local report = require "mlua.watch_report"

local INTERVAL = 0.2 -- seconds

local function write(text, ...) io.write((select("#", ...) > 0 and text:format(...) or text), "\n") end

local function show(facts, last)
  if facts.error then
    io.write(facts.error.text, facts.error.text:find "\n$" and "" or "\n")
    if last then write "  the report before this error stays the one to compare with" end
    return last
  end
  if not last then
    for _, each in ipairs(facts.reports) do report.whole(each) end
    if #facts.reports == 0 then write "  no program: nothing to plan" end
  else
    local any = report.parameters(last.parameters, facts.parameters)
    for i, each in ipairs(facts.reports) do
      if last.reports[i] then any = report.difference(last.reports[i], each) or any else report.whole(each) any = true end
    end
    if not any then write "  no difference" end
  end
  report.hints(last, facts)
  return facts
end

---@param script string
return function(script)
  local words = { "check", "--facts", "--quiet", table.unpack(core.options().paths) }
  local list, last, changed = { script }, nil, nil
  while true do
    local known = files.stamps(list)
    write("%s  %s", os.date "%H:%M:%S", changed and changed .. " changed" or "watching " .. script)
    local facts, code = files.trace(words)
    if facts then
      last = show(facts, last)
      list, known = files.after(script, facts, list, known)
    else
      write("  the script could not be traced (exit code %d)", code or -1)
      if code == 2 then return end -- options that are wrong stay wrong
    end
    io.stdout:flush()
    repeat
      core.lsp_wait(INTERVAL, false)
      changed = files.changed(list, known)
    until changed
  end
end
