-- The comments above the functions of stdlib/, by name: "gelu" of m.gelu, "init.normal" of m.init.normal.
local core = require "mlua.core"
local documentation = { files = {} } ---@type string[][] the lines of each file

---The lines directly above line `at` that begin so.
---@param lines string[]
---@param at integer
---@param mark string
---@return string[]
function documentation.above(lines, at, mark)
  local first = at
  while first > 1 and lines[first - 1]:match "^%s*(.*)$":sub(1, #mark) == mark do first = first - 1 end
  return table.move(lines, first, at - 1, 1, {})
end

local found = {}
for _, text in ipairs(core.library_texts()) do
  local lines = {}
  for line in text:gmatch "([^\n]*)\n" do
    lines[#lines + 1] = line
    local name = line:match "^function m%.([%w_.]+)%(" or line:match "^m%.([%w_.]+) = "
    if name then
      local parameters = line:match "^function [^(]*%((.-)%)" or line:match "^[^ ]* = function%((.-)%)"
      found[name] = found[name] or { comment = documentation.above(lines, #lines, "---"), parameters = parameters, head = line }
    end
  end
  documentation.files[#documentation.files + 1] = lines
end

---@param name string
---@return {comment: string[], parameters?: string, head: string}? known
function documentation.of(name) return found[name] end

---The parts of "axis: Axis|string, keep?: fun(a, b)" between the commas outside of brackets.
---@param text string
---@return string[]
function documentation.split(text)
  local parts, depth, first = {}, 0, 1
  for at, mark in (text .. ","):gmatch "()([%(%[{<>}%]%),])" do
    if mark:find "[%(%[{<]" then
      depth = depth + 1
    elseif mark ~= "," then
      depth = depth - 1
    elseif depth == 0 then
      parts[#parts + 1] = text:sub(first, at - 1):match "^%s*(.-)%s*$"
      first = at + 1
    end
  end
  return parts
end

return documentation
