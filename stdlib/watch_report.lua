-- What two reports of `mlua check --facts` (known.lua) have otherwise, as text: for `mlua watch` and `mlua run --watch`.
local format = require "mlua.lsp_format"
local report = {}

local SHOWN = 8 -- parameters of a list

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
local function collectives(of)
  local list = {}
  for mesh, kinds in pairs(of.collectives or {}) do
    for kind, sum in pairs(kinds) do list[mesh .. " " .. kind] = sum end
  end
  return list
end

local function sent(sum) return sum and ("%d, %s"):format(sum.count, format.bytes(sum.bytes)) or "none" end

---All of a report.
function report.whole(of)
  for _, row in ipairs(ROWS) do
    local value = row[2](of)
    if value then write("  %-16s %s", row[1], row[3](value)) end
  end
  for name, sum in pairs(collectives(of)) do write("  %-16s %s sent by a rank", name, sent(sum)) end
end

---Both reports' values where they differ; whether any does.
function report.difference(before, after)
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
  local alike, list = {}, {}
  table.sort(lines)
  for _, line in ipairs(lines) do
    local pattern = line:gsub("%.%d+%.", ".*.")
    if not alike[pattern] then
      alike[pattern] = { first = line, pattern = pattern, count = 0 }
      list[#list + 1] = alike[pattern]
    end
    alike[pattern].count = alike[pattern].count + 1
  end
  for i = 1, math.min(#list, SHOWN) do
    local each = list[i]
    write("  %s %s", mark, each.count > 1 and ("%s, %d of them"):format(each.pattern, each.count) or each.first)
  end
  if #list > SHOWN then write("  %s %d more", mark, #list - SHOWN) end
end

---The parameters that are new (+), absent (-) and of other axes (~); whether there are any, and how many stay as they are.
function report.parameters(before, after)
  local old, new = by_name(before), by_name(after)
  local added, removed, changed, same = {}, {}, {}, 0
  for name, kind in pairs(new) do
    if not old[name] then
      added[#added + 1] = ("%s %s"):format(name, kind)
    elseif old[name] ~= kind then
      changed[#changed + 1] = ("%s %s -> %s"):format(name, old[name], kind)
    else
      same = same + 1
    end
  end
  for name, kind in pairs(old) do
    if not new[name] then removed[#removed + 1] = ("%s %s"):format(name, kind) end
  end
  write_list("+", added)
  write_list("-", removed)
  write_list("~", changed)
  return #added + #removed + #changed > 0, same
end

---Hints that the last facts lacked.
function report.hints(before, after)
  local known = {}
  for _, hint in ipairs(before and before.hints or {}) do known[hint.text] = true end
  for _, hint in ipairs(after.hints) do
    if not known[hint.text] then write("  %s:%d: hint: %s", hint.file, hint.line, hint.text) end
  end
end

return report
