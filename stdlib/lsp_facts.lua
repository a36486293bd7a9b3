-- What tracing a script has found (known.lua), by file and place, and shifted by the edits that were made since.
local facts = {}
local Facts = {}
Facts.__index = Facts

local function numbered(item, number)
  local one = { type = item.type, elements = item.elements, bytes = item.bytes, file = item.file, line = item.line }
  one.name = item.name:gsub("%*", tostring(number), 1)
  return one
end

---The parameters of an object, each an item, in the order of layers: "blocks.*.wq" of the numbers first to last are many.
---@param list table[] of known.lua
---@return table[]
function facts.parameters(list)
  local all, i = {}, 1
  while list[i] do
    local item, stop = list[i], i
    local layers = item.first and item.name:match "^[^*]*%*"
    local function beside(other) return other and other.first == item.first and other.last == item.last and other.name:sub(1, #layers) == layers end
    while layers and beside(list[stop + 1]) do stop = stop + 1 end
    for number = item.first or 1, item.last or 1 do
      for k = i, stop do all[#all + 1] = layers and numbered(list[k], number) or list[k] end
    end
    i = stop + 1
  end
  return all
end

---@param object table what known.lua wrote
---@param folder string in which the script was traced: names of files are relative to it
---@param normal fun(path: string): string
function facts.new(object, folder, normal)
  local function path_of(file) return normal(file:sub(1, 1) == "/" and file or folder .. "/" .. file) end
  object.parameters = facts.parameters(object.parameters)
  local self = setmetatable({ object = object, values = {}, steps = {}, path_of = path_of, files = {} }, Facts)
  for _, file in ipairs(object.files) do self.files[path_of(file)] = true end
  for _, value in ipairs(object.values) do
    local path = path_of(value.file)
    self.values[path] = self.values[path] or {}
    table.insert(self.values[path], value)
  end
  for _, step in ipairs(object.steps) do
    local path = path_of(step.file)
    self.steps[path] = self.steps[path] or {}
    local by_line = self.steps[path]
    by_line[step.line] = by_line[step.line] or {}
    table.insert(by_line[step.line], step)
  end
  return self
end

---Bytes of Lua's text (from 0, without the skipped ones) become bytes of the file, from 1: first to last.
function Facts:place(path, skipped)
  for _, value in ipairs(self.values[path] or {}) do
    value.first, value.last = value.begin + 1 + skipped, value.finish + skipped
  end
end

---An edit of the file: what is behind it moves, what it touches is no longer known.
function Facts:shift(path, first, removed, added)
  local kept, by = {}, added - removed
  for _, value in ipairs(self.values[path] or {}) do
    if not value.first then
      kept[#kept + 1] = value
    elseif value.first >= first + removed then
      value.first, value.last = value.first + by, value.last + by -- its line stays the traced one, by which steps are found
      kept[#kept + 1] = value
    elseif value.last < first then
      kept[#kept + 1] = value
    end
  end
  if self.values[path] then self.values[path] = kept end
end

---The values whose expressions contain the byte, smallest first.
function Facts:around(path, offset)
  local list = {}
  for _, value in ipairs(self.values[path] or {}) do
    if value.first and value.first <= offset and offset <= value.last then list[#list + 1] = value end
  end
  table.sort(list, function(a, b)
    local left, right = a.last - a.first, b.last - b.first
    if left ~= right then return left < right end
    return a.first < b.first
  end)
  return list
end

---The value of the expression at exactly these bytes.
function Facts:at(path, first, last)
  for _, value in ipairs(self.values[path] or {}) do
    if value.first == first and value.last == last then return value end
  end
end

---Of a script that failed: what the trace before knew of places that this one did not reach, and of its programs.
function Facts:keep(before)
  for path, list in pairs(before.values) do
    local own, known = self.values[path] or {}, {}
    for _, value in ipairs(own) do known[value.first or 0] = true end
    for _, value in ipairs(list) do
      if value.first and not known[value.first] then own[#own + 1] = value end
    end
    self.values[path] = own
  end
  for _, field in ipairs { "reports", "parameters", "modules", "settings", "axes" } do
    if #self.object[field] == 0 then self.object[field] = before.object[field] end
  end
  if next(self.steps) == nil then self.steps = before.steps end
end

---Steps of the programs that a line makes, a line of the text as it was when it was traced.
function Facts:steps_at(path, line) return self.steps[path] and self.steps[path][line] or {} end

return facts
