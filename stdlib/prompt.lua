-- Values as the prompt prints them, and the names that may continue an input.
local core = require "mlua.core"
local prompt = {}

local ITEMS = 24 -- of a table that are printed

---The fields of a table or module, as a set of names.
---@param value any
---@return table<string, boolean>
function prompt.fields(value)
  local set = {}
  pcall(function()
    for name in pairs(value) do set[name] = type(name) == "string" or nil end
  end)
  return set
end

---What may follow "value:", as a set of names.
---@param value any
---@return table<string, boolean>
function prompt.methods(value)
  local set, meta = {}, getmetatable(value)
  local own = type(meta) == "string" and core.class_methods(meta) or type(meta) == "table" and rawget(meta, "__index")
  for _, t in ipairs { type(own) == "table" and own or {}, core.is_tensor(value) and core.tensor_methods or {} } do
    for name in next, t do set[name] = type(name) == "string" or nil end
  end
  return set
end

-- A value on one line, as an item of a table.
local function short(value)
  if type(value) == "string" then return ("%q"):format(value) end
  local text = tostring(value)
  return type(value) == "table" and text:find "^table: 0x%x+$" and "{...}" or text
end

-- The list first, then the names in order, then all other keys.
local function items(value)
  local list, length, others = {}, rawlen(value), 0
  for i = 1, math.min(length, ITEMS) do list[i] = short(rawget(value, i)) end
  for key in next, value do others = others + (type(key) == "string" and 0 or 1) end
  for name in pairs(prompt.fields(value)) do
    if #list == ITEMS then
      others = math.huge
      break
    end
    local ok, item = pcall(function() return value[name] end)
    list[#list + 1] = ("%s = %s"):format(name, ok and short(item) or "?")
  end
  if others > length or length > ITEMS then list[#list + 1] = "..." end
  return "{" .. table.concat(list, ", ") .. "}"
end

---Print a value that is neither a tensor nor a function.
---@param value any
function prompt.write(value)
  local text = short(value)
  io.write(text == "{...}" and items(value) or text, "\n")
end

local WORDS = {}
for word in ("and break do else elseif end false for function goto if in local nil not or repeat return then true until while"):gmatch "%a+" do
  WORDS[word] = true
end

-- The part of a text behind the quote of a string that it ends in.
local function in_string(text)
  local quote, start, at = nil, nil, 1
  while at <= #text do
    local c = text:sub(at, at)
    if quote and c == "\\" then
      at = at + 1
    elseif quote and c == quote then
      quote = nil
    elseif not quote and c:find "[\"']" then
      quote, start = c, at + 1
    end
    at = at + 1
  end
  return quote and text:sub(start)
end

-- The value of "a.b"; nil where there is none.
local function value_of(path, globals)
  local value = globals
  for name, rest in path:gmatch "([%w_]*)([.:]?)" do
    if name == "" and rest == "" then break end
    local ok, field = pcall(function() return value[name] end)
    if not ok or field == nil then return nil end
    value = field
  end
  return value
end

---The names that could continue a text, sorted, and the length of the part that they replace.
---@param text string
---@param commands string[] ":check" and others, without the colon
---@param globals table
---@return string[] names
---@return integer length
function prompt.candidates(text, commands, globals)
  local sets, part = {}, text:match "^:([^: ][^ ]*)$" or text == ":" and "" or nil
  if part then
    sets[1] = {}
    for _, name in ipairs(commands) do sets[1][name] = true end
  elseif in_string(text) then
    part, sets[1] = in_string(text), {}
    for _, name in ipairs(core.axis_names()) do sets[1][name] = true end
  else
    local path
    path, part = text:match "([%w_.:]*)[.:]([%w_]*)$"
    part = part or text:match "[%w_]*$"
    if not path then
      sets = { WORDS, prompt.fields(globals) }
    else
      local value = value_of(path, globals)
      if value ~= nil then sets = { prompt.methods(value), prompt.fields(value) } end
    end
  end
  local all, list = {}, {}
  for _, set in ipairs(sets) do
    for name in pairs(set) do all[name] = name:sub(1, #part) == part or nil end
  end
  for name in pairs(all) do list[#list + 1] = name end
  return list, #part
end

return prompt
