-- Numbers for people, and what is said of a value, in Markdown.
local format = {}

local function scaled(value, base, units, digits)
  local unit = 1
  while value >= base and unit < #units do
    value = value / base
    unit = unit + 1
  end
  return (unit == 1 and "%.0f%s" or "%." .. digits .. "f%s"):format(value, units[unit])
end

function format.bytes(value) return scaled(value, 1024, { " B", " KiB", " MiB", " GiB", " TiB" }, value < 10 and 2 or 1) end
function format.count(value) return scaled(value, 1000, { "", " k", " M", " G", " T", " P" }, 1) end
function format.flops(value) return format.count(value) .. (value < 1000 and " FLOP" or "FLOP") end

local SHOWN = 4 -- steps of a line

-- The forward steps of a line, those with the most work first: "gemm, kernel `mul+add`".
local function steps_text(steps)
  local work, order = {}, {}
  for _, step in ipairs(steps) do
    local text = step.kind == "kernel" and "kernel `" .. step.label .. "`" or step.kind == "collective" and step.label or step.kind
    if not step.backward then
      if not work[text] then order[#order + 1] = text end
      work[text] = (work[text] or 0) + step.flops
    end
  end
  table.sort(order, function(a, b)
    if work[a] ~= work[b] then return work[a] > work[b] end
    return a < b
  end)
  local more = #order > SHOWN and (", %d more"):format(#order - SHOWN) or ""
  return #order > 0 and table.concat(order, ", ", 1, math.min(#order, SHOWN)) .. more or nil
end

local FEW = 8 -- operations an element, which say nothing beside those of a product

local function elements_of(value)
  local elements = 1
  for _, axis in ipairs(value.axes) do elements = elements * axis.size end
  return elements
end

---A value as lines of Markdown.
---@param name string? what it is called
---@param value table of known.lua
---@param steps table[] of its line
function format.value(name, value, steps)
  local head = name and name .. ": " or ""
  if value.kind == "axis" then
    return { ("```lua\n%saxis %s = %d\n```"):format(head, value.axes[1].name, value.axes[1].size) }
  elseif value.kind == "other" then
    return { ("```lua\n%s%s\n```"):format(name and name .. " = " or "", value.text) }
  end
  local lines = { ("```lua\n%s%s%s\n```"):format(head, value.kind == "state" and "parameter " or "", value.type) }
  if value.name then lines[#lines + 1] = ("named `%s`"):format(value.name) end
  if value.placed and (value.local_type ~= value.type or value.placed ~= value.type) then
    lines[#lines + 1] = ("layout `%s`"):format(value.placed)
    lines[#lines + 1] = ("of each rank `%s`, %s"):format(value.local_type, format.bytes(value.local_bytes))
  end
  local work = { format.bytes(value.bytes) .. (value.placed and " in all" or "") }
  if value.flops and value.flops > FEW * elements_of(value) then work[#work + 1] = ("%s by `%s`"):format(format.flops(value.flops), value.op) end
  lines[#lines + 1] = table.concat(work, ", ")
  local by = value.kind == "tensor" and steps_text(steps)
  if by then lines[#lines + 1] = "steps of the line: " .. by end
  if value.module and value.kind == "tensor" then lines[#lines + 1] = ("first made in `%s`"):format(value.module) end
  if value.others then lines[#lines + 1] = "elsewhere `" .. table.concat(value.others, "`, `") .. "`" end
  return lines
end

return format
