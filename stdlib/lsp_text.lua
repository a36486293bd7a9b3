-- Texts that an editor has open: positions of the protocol (line and character, from 0, in UTF-16 or UTF-8 units) to bytes
-- (from 1) and back, and edits.
local text = {}
local Text = {}
Text.__index = Text

---A text; `encoding` is "utf-16" or "utf-8".
---@param source string
---@param encoding string
function text.new(source, encoding)
  local t = setmetatable({ encoding = encoding }, Text)
  t:set(source)
  return t
end

function Text:set(source)
  self.source, self.starts = source, { 1 }
  for start in source:gmatch "\n()" do self.starts[#self.starts + 1] = start end
end

---The bytes that Lua does not read: a byte order mark, and a first line for the shell.
function Text:skipped()
  local from = self.source:find "^\xEF\xBB\xBF" and 4 or 1
  return self.source:sub(from, from) == "#" and (self.source:find("\n", from, true) or #self.source + 1) - 1 or from - 1
end

---The text of a line, from 1, without its end; nil where there is none.
function Text:line(number)
  local start = self.starts[number]
  return start and self.source:sub(start, (self.starts[number + 1] or #self.source + 2) - 1):gsub("[\r\n]+$", "") or nil
end

---The line of a byte, from 1.
function Text:line_at(offset)
  local low, high = 1, #self.starts
  while low < high do
    local middle = (low + high + 1) // 2
    if self.starts[middle] <= offset then low = middle else high = middle - 1 end
  end
  return low
end

-- Bytes of the character that begins so; those of no valid one count alone.
local function width(source, at)
  local first = source:byte(at) or 0
  if first < 0xC2 or first > 0xF4 then return 1 end
  local size = first < 0xE0 and 2 or first < 0xF0 and 3 or 4
  return source:find("^" .. ("[\x80-\xBF]"):rep(size - 1), at + 1) and size or 1
end

---The byte that a position is before: behind the end of a line where the line is shorter.
function Text:offset(position)
  local line = position.line + 1
  if line > #self.starts then return #self.source + 1 end
  local at, stop = self.starts[line], (self.starts[line + 1] or #self.source + 2) - 1
  if stop > self.starts[line] and self.source:sub(stop - 1, stop - 1) == "\r" then stop = stop - 1 end
  if self.encoding == "utf-8" then return math.min(at + position.character, stop) end
  local left = position.character
  while left > 0 and at < stop do
    local size = width(self.source, at)
    left = left - (size == 4 and 2 or 1)
    at = at + size
  end
  return math.min(at, stop)
end

function Text:position(offset)
  local line = self:line_at(math.min(offset, #self.source + 1))
  local at, units = self.starts[line], 0
  if self.encoding == "utf-8" then return { line = line - 1, character = offset - at } end
  while at < offset and at <= #self.source do
    local size = width(self.source, at)
    units = units + (size == 4 and 2 or 1)
    at = at + size
  end
  return { line = line - 1, character = units }
end

---The range of the bytes first to last; empty where last is first - 1.
function Text:range(first, last) return { start = self:position(first), ["end"] = self:position(last + 1) } end

-- The part in which two texts differ: its first byte, and its size in each.
local function differing(before, after)
  local first, most, last = 1, math.min(#before, #after), 0
  while first <= most and before:byte(first) == after:byte(first) do first = first + 1 end
  while last <= most - first and before:byte(#before - last) == after:byte(#after - last) do last = last + 1 end
  return first, #before - last - first + 1, #after - last - first + 1
end

---Apply a change of the protocol. Gives the first byte replaced, their number, and the number of bytes in their place.
---@return integer first
---@return integer removed
---@return integer added
function Text:apply(change)
  if not change.range then
    local first, removed, added = differing(self.source, change.text)
    self:set(change.text)
    return first, removed, added
  end
  local first, stop = self:offset(change.range.start), self:offset(change.range["end"])
  if stop < first then first, stop = stop, first end
  self:set(self.source:sub(1, first - 1) .. change.text .. self.source:sub(stop))
  return first, stop - first, #change.text
end

-- Addresses of files -----------------------------------------------------------------------------------------------------------

---The path of "file:///a%20b"; nil for others.
function text.path_of(uri)
  local path = uri:match "^file://[^/]*(/.*)$"
  return path and (path:gsub("%%(%x%x)", function(digits) return string.char(tonumber(digits, 16)) end)) or nil
end

function text.uri_of(path)
  return "file://" .. path:gsub("[^%w/._~-]", function(c) return ("%%%02X"):format(c:byte()) end)
end

---A path without "." and "..".
function text.normal(path)
  local parts = {}
  for part in path:gmatch "[^/]+" do
    if part == ".." then parts[#parts] = nil elseif part ~= "." then parts[#parts + 1] = part end
  end
  return (path:sub(1, 1) == "/" and "/" or "") .. table.concat(parts, "/")
end

return text
