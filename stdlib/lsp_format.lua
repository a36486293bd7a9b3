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
function format.seconds(value)
  if value < 1e-3 then return ("%.1f us"):format(1e6 * value) end
  return value < 1 and ("%.2f ms"):format(1e3 * value) or ("%.2f s"):format(value)
end
function format.flops(value) return format.count(value) .. (value < 1000 and " FLOP" or "FLOP") end

local SHOWN = 4 -- steps of a line

-- The forward steps of a line, those that take longest first: "gemm 0.31 ms, kernel `mul+add` 12.0 us".
local function steps_text(steps)
  local found, order = {}, {}
  for _, step in ipairs(steps) do
    local text = step.kind == "kernel" and "kernel `" .. step.label .. "`" or step.kind == "collective" and step.label or step.kind
    if not step.backward then
      local sum = found[text]
      if not sum then
        sum = { text = text, count = 0, flops = 0, seconds = 0 }
        found[text], order[#order + 1] = sum, sum
      end
      sum.count, sum.flops, sum.seconds = sum.count + step.count, sum.flops + step.flops, sum.seconds + (step.seconds or 0)
    end
  end
  if #order == 0 then return nil end
  table.sort(order, function(a, b)
    if a.seconds ~= b.seconds then return a.seconds > b.seconds end
    if a.flops ~= b.flops then return a.flops > b.flops end
    return a.text < b.text
  end)
  local parts = {}
  for i = 1, math.min(#order, SHOWN) do
    local sum = order[i]
    parts[i] = (sum.count > 1 and ("%d x "):format(sum.count) or "") .. sum.text .. (sum.seconds > 0 and " " .. format.seconds(sum.seconds) or "")
  end
  if #order > SHOWN then parts[#parts + 1] = ("%d more"):format(#order - SHOWN) end
  return table.concat(parts, ", ")
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
---@param pending? boolean layout and steps come later
function format.value(name, value, steps, pending)
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
  if by then lines[#lines + 1] = "forward steps of the line: " .. by end
  if value.module and value.kind == "tensor" then lines[#lines + 1] = ("first made in `%s`"):format(value.module) end
  if pending then lines[#lines + 1] = "layout and steps: pending" end
  if value.others then lines[#lines + 1] = "elsewhere `" .. table.concat(value.others, "`, `") .. "`" end
  return lines
end

return format
