-- Lines above modules and m.train: parameters, bytes, the share of the step; memory and work.
local core = require "mlua.core"
local format = require "mlua.lsp_format"
local lens = {}

local function is_below(path, module) return module == "" or path == module or path:sub(1, #module + 1) == module .. "." end

-- Parameters and bytes below paths, and their share of the steps, in percent: of the predicted time, else of the work.
local function sums(object, paths)
  local elements, bytes, work, all = 0, 0, 0, 0
  local timed = object.steps[1] and object.steps[1].seconds ~= nil
  local function inside(path)
    for _, module in ipairs(paths) do
      if is_below(path, module) then return true end
    end
  end
  for _, parameter in ipairs(object.parameters) do
    if inside(parameter.name) then elements, bytes = elements + parameter.elements, bytes + parameter.bytes end
  end
  for _, step in ipairs(object.steps) do
    local amount = timed and step.seconds or step.flops
    all = all + amount
    if inside(step.module) then work = work + amount end
  end
  return elements, bytes, all > 0 and ("%.1f%% of the step's %s"):format(100 * work / all, timed and "time" or "work") or nil
end

local function module_text(object, class)
  local paths = {}
  for _, module in ipairs(object.modules) do
    if module.class == class then paths[#paths + 1] = module.path end
  end
  if #paths == 0 then return nil end
  local elements, bytes, share = sums(object, paths)
  local one = sums(object, { paths[1] })
  local count = #paths > 1 and ("%d x %s = "):format(#paths, format.count(one)) or ""
  return ("%s%s parameters, %s%s"):format(count, format.count(elements), format.bytes(bytes), share and ", " .. share or "")
end

-- What takes most of a predicted step.
local function longest(predicted)
  local most, name = -1, nil
  for _, kind in ipairs { "products", "attention", "memory", "other", "exposed", "bubble" } do
    if (predicted[kind] or 0) > most then most, name = predicted[kind], kind end
  end
  local words = { exposed = "waiting for collectives", bubble = "waiting for other stages", memory = "moving bytes", other = "small kernels" }
  return ("%s (%.0f%%)"):format(words[name] or name, 100 * most)
end

local function training_text(report)
  if not report then return nil end
  local parts = { format.count(report.parameters) .. " parameters", format.bytes(report.peak_bytes) .. " at the peak" }
  if report.tokens and report.tokens > 0 then parts[#parts + 1] = ("%s a step of %.0f tokens"):format(format.flops(report.flops), report.tokens) end
  local predicted = report.predicted
  if predicted then
    parts[#parts + 1] = ("%s a step predicted"):format(format.seconds(predicted.seconds))
    if predicted.tokens_per_s > 0 then parts[#parts + 1] = ("%.0f tokens/s"):format(predicted.tokens_per_s) end
    parts[#parts + 1] = "most of it " .. longest(predicted)
  end
  if report.bubble then parts[#parts + 1] = ("bubble %.1f%%"):format(100 * report.bubble) end
  return table.concat(parts, ", ") .. " (" .. report.device .. (report.ranks and (", each of %d ranks)"):format(report.ranks) or ")")
end

---The lenses of a document.
function lens.of(document, facts)
  local list = {}
  local trained = 0
  for _, call in ipairs(facts and document.parsed.calls or {}) do
    local title
    if call.library and call.name == "module" then
      title = call.class and module_text(facts.object, call.class)
    elseif call.library and call.name == "train" then
      trained = trained + 1
      title = training_text(facts.object.reports[trained])
    end
    if title then
      list[#list + 1] = { range = document.text:range(call.first, call.first - 1), command = { title = title, command = "" } }
    end
  end
  return core.list(list)
end

return lens
