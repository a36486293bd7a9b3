-- The library as an editor shows it: texts of functions, options with their kinds and values.
local core = require "mlua.core"
local m = require "mlua"
local documentation = require "mlua.documentation"
local library = {}

-- The value of "init.normal" in the library; never raises.
local function value_of(path)
  local value = m
  for name in path:gmatch "[^.]+" do
    value = type(value) == "table" and rawget(value, name) or nil
  end
  return value
end

-- A comment of stdlib/ as Markdown, its parameters as a list.
local function comment_text(comment)
  local lines = {}
  for _, line in ipairs(comment) do
    line = line:match "^[ %-]*(.-)\r?$"
    local tag, rest = line:match "^@(%l+) (.*)$"
    if tag == "param" or tag == "field" then
      lines[#lines + 1] = ("- `%s`"):format(rest)
    elseif tag == "return" then
      lines[#lines + 1] = ("- gives `%s`"):format(rest)
    elseif not tag then
      lines[#lines + 1] = line
    end
  end
  return table.concat(lines, "\n")
end

local function described(head, value, path)
  local signature, text = core.documentation(value)
  if signature then
    local given, result = signature:match "^(.-) *(%-> .*)$"
    return ("```lua\n%s(%s)%s\n```"):format(head, given or signature, result and " " .. result or ""), text
  end
  local known = documentation.of(path)
  if not known or #known.comment == 0 then return nil end
  local arguments = known.parameters
  if not arguments then
    local list = {}
    for _, line in ipairs(known.comment) do list[#list + 1] = line:match "^ *%-%-%-@param ([^ ?]*)" end
    arguments = table.concat(list, ", ")
  end
  return ("```lua\n%s%s\n```"):format(head, type(value) == "function" and "(" .. arguments .. ")" or ""), comment_text(known.comment)
end

---Head and text, as Markdown, of a function or table of the library: "gelu", "init.normal"; nil where there is none.
function library.describe(path)
  local value = value_of(path)
  if value == nil then return nil end
  return described("m." .. path, value, path)
end

---The same of a method of tensors.
function library.method(name)
  local value = core.tensor_methods[name]
  return value and described("t:" .. name, value, name)
end

---The names of the library, or of a table of it: {name, value}, sorted.
function library.members(path)
  local list, value = {}, path == "" and m or value_of(path)
  for name, item in pairs(type(value) == "table" and value or {}) do
    local shown = type(name) == "string" and (type(item) == "function" or type(item) == "table")
    if shown and (documentation.of(path == "" and name or path .. "." .. name) or core.documentation(item)) then list[#list + 1] = { name = name, value = item } end
  end
  table.sort(list, function(a, b) return a.name < b.name end)
  return list
end

local function class_fields(title)
  for _, lines in ipairs(documentation.files) do
    for i, line in ipairs(lines) do
      if line:match "^%-%-%-@class ([%w_]+)" == title then
        local fields = {}
        for k = i + 1, #lines do
          local name, kind, text = lines[k]:match "^%-%-%-@field ([%w_]+)%?? (%S+) ?(.*)$"
          if not name then break end
          fields[#fields + 1] = { name = name, kind = kind, text = text }
        end
        return fields
      end
    end
  end
end

---The options that a function's table takes: {name, kind, text}; an empty list where they are not documented.
function library.options(path)
  local value, list, kind = value_of(path), {}, nil
  local signature = value ~= nil and core.documentation(value)
  local known = documentation.of(path)
  if signature then kind = signature:match "%b{}" end
  for _, line in ipairs(known and known.comment or {}) do
    kind = kind or line:match "@param %S+ (%b{})" or line:match "@param %S+ (%u[%w]*Options)" or line:match "@param %S+ (LayoutPreset)"
  end
  if not kind then return list end
  if kind:sub(1, 1) ~= "{" then return class_fields(kind) or list end
  for _, item in ipairs(documentation.split(kind:sub(2, -2))) do
    local name, of = item:match "^([%a_][%w_]*)%?? *: *(.*)$"
    if name then list[#list + 1] = { name = name, kind = of, text = "" } end
  end
  return list
end

---Values that an option takes, from its kind and text: "ones", true.
function library.values(option)
  local list, seen = {}, {}
  for quoted in (option.kind .. " " .. option.text):gmatch '"[%w_-]+"' do
    if not seen[quoted] then list[#list + 1] = quoted end
    seen[quoted] = true
  end
  if option.kind:find "boolean" then list[#list + 1], list[#list + 2] = "true", "false" end
  return list
end

return library
