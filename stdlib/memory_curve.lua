-- `mlua check --memory-curve`: the predicted time of a step over the memory that it may use.
--
-- The script is checked with memory for everything, or with that of --memory, then with next to none, whose plan is the least; then
-- with budgets from the least on, several at once. A budget decides which values are computed again and which are copied to host memory and back
-- (runtime/plan/fit_memory.c); below each row are those that the row above does not compute again, or not as often, and all that are
-- copied: operators by modules and lines, of which layers alike are one ("blocks.*"), and the
-- segments of scans.
local core = require "mlua.core"
local command = require "mlua.tune_command"

local ENOUGH, NONE = 1e8, 0.001 -- GiB
local POINTS = 8 -- between the least and the most
local ROUNDING = 2 ^ -10 -- GiB: of what a process takes beside its plans

local options = core.options()

local function layout_words()
  local words = {}
  if options.mesh_text then table.move({ "--mesh", options.mesh_text }, 1, 2, #words + 1, words) end
  if options.layout_text then table.move({ "--layout", options.layout_text }, 1, 2, #words + 1, words) end
  return words
end

-- Reports of checks with these budgets, and whether each fits; an error where one has no report.
local function check(budgets)
  local words, reports = {}, {}
  for i, memory in ipairs(budgets) do words[i] = command.check(layout_words(), memory) end
  for i, result in ipairs(core.run_program(words, options.processors, 600)) do
    local report, errors = command.report(result)
    if not report then
      io.stderr:write(errors)
      core.fail "the script cannot be planned"
    end
    report.fits = result.code == 0
    reports[i] = report
  end
  return reports
end

-- "blocks.*: dot llama.lua:65 x 12, elementwise x 30" for each module: values that `report` computes again and `other` does not.
local function place_of(r) return r.file and (" %s:%d"):format(r.file:match "[^/]*$", r.line) or "" end

local function print_again(report, other)
  local before, modules, order = {}, {}, {}
  local function key(r) return ("%s %s %d"):format(r.module, r.op, r.line) end
  for _, r in ipairs(other and other.recomputed or {}) do before[key(r)] = r.values end
  for _, r in ipairs(report.recomputed) do
    local more = r.values - (before[key(r)] or 0)
    if more > 0 then
      if not modules[r.module] then
        modules[r.module] = {}
        order[#order + 1] = r.module
      end
      table.insert(modules[r.module], ("%s%s x %d"):format(r.op, place_of(r), more))
    end
  end
  for _, module in ipairs(order) do print(("          again %s%s"):format(module ~= "" and module .. ": " or "", table.concat(modules[module], ", "))) end
end

-- Scans that `report` cuts into segments, and `other` not, or into others.
local function print_segments(report, other)
  local before = {}
  for _, s in ipairs(other and other.scans or {}) do before[s.file .. s.line] = s.segment end
  for _, s in ipairs(report.scans or {}) do
    if s.segment and before[s.file .. s.line] ~= s.segment then
      print(("          states again within segments of %d positions: scan %s:%d"):format(s.segment, s.file:match "[^/]*$", s.line))
    end
  end
end

-- "blocks.*: dot llama.lua:65 x 12, 3.00 GiB" for each module, then what the copies take.
local function print_offloaded(report)
  local modules, order, bytes = {}, {}, 0
  for _, r in ipairs(report.offloaded) do
    if not modules[r.module] then
      modules[r.module] = {}
      order[#order + 1] = r.module
    end
    table.insert(modules[r.module], ("%s%s x %d, %s"):format(r.op, place_of(r), r.values, command.size(r.bytes)))
    bytes = bytes + r.bytes
  end
  if bytes == 0 then return end
  local predicted = report.predicted
  print(("          on the host %s%s"):format(command.size(bytes), predicted and
    (", copies %.1f ms, of which computation waits %.1f ms"):format(1e3 * predicted.host_copies, 1e3 * predicted.host_wait) or ""))
  for _, module in ipairs(order) do print(("            %s%s"):format(module ~= "" and module .. ": " or "", table.concat(modules[module], "; "))) end
end

-- Rows from the least memory to the most.
local function read_rows()
  local ends = check { options.memory > 0 and options.memory or ENOUGH, NONE }
  if not ends[1].fits then core.fail(("no plan fits --memory: the least takes %s"):format(command.size(ends[2].process_bytes))) end
  local most, least, budgets = ends[1].process_bytes / 2 ^ 30, ends[2].process_bytes / 2 ^ 30, {}
  least = math.min(most, least + ROUNDING)
  for i = 0, POINTS do budgets[i + 1] = least + (most - least) * i / (POINTS + 1) end
  local rows = check(budgets)
  if not rows[1].fits then rows[1] = ends[2] end
  rows[#rows + 1] = ends[1]
  return rows
end

local function print_json(rows)
  local points = {}
  for i, r in ipairs(rows) do points[i] = { peak_bytes = r.peak_bytes, process_bytes = r.process_bytes, seconds = r.predicted and r.predicted.seconds, recomputed = r.recomputed,
    offloaded = r.offloaded, host_bytes = r.host_bytes, host_copies = r.predicted and r.predicted.host_copies,
    host_wait = r.predicted and r.predicted.host_wait } end
  io.write(core.to_json(points), "\n")
end

local function print_text(rows)
  local last = rows[#rows]
  local fastest, small, device = last.predicted and last.predicted.seconds, last.process_bytes < 2 ^ 32, core.device()
  local form = fastest and fastest < 0.1 and "  %10.2f  %6.1f %%" or "  %10.1f  %6.1f %%"
  local unit, size = small and "MiB" or "GiB", small and 2 ^ 20 or 2 ^ 30
  print(("     %s%s"):format(unit, fastest and "   ms a step   slower" or ""))
  local before, above
  for i = #rows, 1, -1 do
    local r = rows[i]
    local row = ("%8.2f"):format(r.process_bytes / size)
    if fastest then row = row .. form:format(1e3 * r.predicted.seconds, 100 * (r.predicted.seconds / fastest - 1)) end
    if row ~= before then
      local fits = device.memory_bytes == 0 or r.peak_bytes <= device.memory_bytes
      if i == #rows and not fits then print(("          beyond the memory of %s:"):format(device.description)) end
      if fits and above and above.peak_bytes > device.memory_bytes then print "          within it:" end
      print(row)
      print_again(r, above)
      print_segments(r, above)
      print_offloaded(r)
      above = r
    end
    before = row
  end
end

return function()
  local rows = read_rows()
  if options.json then print_json(rows) else print_text(rows) end
end
