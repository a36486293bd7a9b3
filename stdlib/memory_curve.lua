-- `mlua check --memory-curve`: the predicted time of a step over the memory that it may use.
--
-- The script is checked with memory for everything, then with next to none, whose plan is the least; then with budgets between,
-- several at once. A budget decides which values are computed again and which are copied to host memory and back
-- (runtime/plan/fit_memory.c); below each row are those that the row above does not compute again, or not as often, and all that are
-- copied: operators by modules and lines, of which layers alike are one ("blocks.*"), and the
-- segments of scans.
local core = require "mlua.core"

local ENOUGH, NONE = 1e8, 0.001 -- GiB
local POINTS = 8 -- between the least and the most

local options = core.options()

local function words_of(memory)
  local words = { "check", options.script }
  for _, pair in ipairs(options.overrides) do words[#words + 1] = pair[1] .. "=" .. pair[2] end
  for name, value in pairs { ["--device"] = options.device_name, ["--dtype"] = options.dtype_name, ["--mesh"] = options.mesh_text,
    ["--layout"] = options.layout_text } do
    table.move({ name, value }, 1, 2, #words + 1, words)
  end
  if options.hosts > 0 then table.move({ "--nodes", tostring(options.hosts) }, 1, 2, #words + 1, words) end
  return table.move({ "--json", "--memory", ("%.4f"):format(memory) }, 1, 3, #words + 1, words)
end

-- Reports of checks with these budgets; an error where one has none.
local function check(budgets)
  local words, reports = {}, {}
  for i, memory in ipairs(budgets) do words[i] = words_of(memory) end
  for i, result in ipairs(core.run_program(words, options.processors, 600)) do
    local report = result.output ~= "" and core.json(result.output:match "[^\n]*")
    if not report then
      io.stderr:write(result.errors)
      core.fail "the script cannot be planned"
    end
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
    table.insert(modules[r.module], ("%s%s x %d, %.2f GiB"):format(r.op, place_of(r), r.values, r.bytes / 2 ^ 30))
    bytes = bytes + r.bytes
  end
  if bytes == 0 then return end
  local predicted = report.predicted
  print(("          on the host %.2f GiB%s"):format(bytes / 2 ^ 30, predicted and
    (", copies %.1f ms, of which computation waits %.1f ms"):format(1e3 * predicted.host_copies, 1e3 * predicted.host_wait) or ""))
  for _, module in ipairs(order) do print(("            %s%s"):format(module ~= "" and module .. ": " or "", table.concat(modules[module], "; "))) end
end

return function()
  local ends = check { ENOUGH, NONE }
  local most, least = ends[1].process_bytes / 2 ^ 30, ends[2].process_bytes / 2 ^ 30
  local budgets = {}
  for i = 1, POINTS do budgets[i] = least + (most - least) * i / (POINTS + 1) end
  local rows = check(budgets)
  table.insert(rows, 1, ends[2])
  rows[#rows + 1] = ends[1]

  local fastest = ends[1].predicted and ends[1].predicted.seconds
  if options.json then
    local points = {}
    for i, r in ipairs(rows) do points[i] = { peak_bytes = r.peak_bytes, process_bytes = r.process_bytes, seconds = r.predicted and r.predicted.seconds, recomputed = r.recomputed,
      offloaded = r.offloaded, host_bytes = r.host_bytes, host_copies = r.predicted and r.predicted.host_copies,
      host_wait = r.predicted and r.predicted.host_wait } end
    io.write(core.to_json(points), "\n")
  else
    print(fastest and "     GiB   ms a step   slower" or "     GiB")
    local before, above
    for i = #rows, 1, -1 do
      local r = rows[i]
      local row = ("%8.2f"):format(r.process_bytes / 2 ^ 30)
      if fastest then row = row .. ("  %10.1f  %6.1f %%"):format(1e3 * r.predicted.seconds, 100 * (r.predicted.seconds / fastest - 1)) end
      if row ~= before then
        print(row)
        print_again(r, above)
        print_segments(r, above)
        print_offloaded(r)
        above = r
      end
      before = row
    end
  end
end
