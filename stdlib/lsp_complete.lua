-- What may follow the text before the cursor: functions and options of the library, fields, settings, axes, methods, variables.
local core = require "mlua.core"
local hover = require "mlua.lsp_hover"
local library = require "mlua.lsp_library"
local names = require "mlua.lsp_names"
local complete = {}

local METHOD, FUNCTION, FIELD, VARIABLE, PROPERTY, VALUE, KEYWORD, CONSTANT = 2, 3, 5, 6, 10, 12, 14, 21
local KEYWORDS = "and break do else elseif end false for function if in local nil not or repeat return then true until while"
local LUA = { "assert", "error", "ipairs", "math", "next", "os", "pairs", "pcall", "print", "require", "select", "string", "table", "tonumber", "tostring", "type" }

-- A list of items without repetitions, in the order of their adding.
local function collector()
  local list, seen = {}, {}
  return function(label, kind, detail, data)
    if seen[label] then return end
    seen[label] = true
    list[#list + 1] = { label = label, kind = kind, detail = detail, data = data, sortText = ("%04d"):format(#list) }
  end, list
end

-- The names of a chain ("self", "blocks") before token `number`, which is a dot or a colon, and the number of the first.
local function chain_before(parsed, number)
  local chain, at = {}, number
  while parsed.tokens[at - 1] and parsed.tokens[at - 1].kind == "NAME" do
    table.insert(chain, 1, parsed.tokens[at - 1])
    if not (parsed.tokens[at - 2] and parsed.tokens[at - 2].kind == ".") then break end
    at = at - 2
  end
  return chain, at - 1
end

-- The value of a method call's receiver; `number`: of the call's bracket.
local function receiver(document, facts, number)
  local parsed = document.parsed
  local colon = parsed.tokens[number - 2]
  if not facts or not colon or colon.kind ~= ":" then return nil end
  local value = hover.value_of(document, facts, parsed.tokens[number - 3], number - 3)
  if value or not parsed.tokens[number - 3] then return value end
  for _, around in ipairs(facts:around(document.path, parsed.tokens[number - 3].last)) do
    if around.last == parsed.tokens[number - 3].last then return around end
  end
end

-- Inside of a string: axes of the receiver first, those of the script, values of the option, parameter paths.
local function in_string(document, facts, token, number)
  local add, list = collector()
  local parsed = document.parsed
  local key = parsed.tokens[number - 1] and parsed.tokens[number - 1].kind == "=" and parsed.tokens[number - 2]
  if key and key.owner and key.owner:find "^option:m%." then
    for _, option in ipairs(library.options(key.owner:sub(10))) do
      if option.name == key.text then
        for _, value in ipairs(library.values(option)) do
          if value:sub(1, 1) == '"' then add(value:sub(2, -2), VALUE, option.kind) end
        end
      end
    end
    if #list > 0 then return list end
  end
  if token.call and token.call.config then
    for _, other in ipairs(parsed.tokens) do
      if other.owner == "config" and other.key then add(other.text, PROPERTY, "setting") end
    end
    return list
  end
  local _, bracket = names.token_at(parsed, token.call and token.call.first or 0)
  local value = bracket and receiver(document, facts, bracket)
  for _, axis in ipairs(value and value.axes or {}) do add(axis.name, CONSTANT, value.type) end
  for _, name in ipairs(facts and facts.object.axes or {}) do
    if not name:find "'" then add(name, CONSTANT, "axis") end
  end
  for _, other in ipairs(parsed.tokens) do
    if other.owner == "axes" then add(other.text, CONSTANT, "axis") end
  end
  for _, parameter in ipairs(facts and facts.object.parameters or {}) do add(parameter.name, FIELD, parameter.type) end
  return list
end

-- Fields that tokens of the text name with this owner.
local function add_fields(add, parsed, owner, facts, document, except)
  for number, token in ipairs(parsed.tokens) do
    if token.owner == owner and token.field and token ~= except then
      local value = hover.value_of(document, facts, token, number)
      add(token.field, token.body and METHOD or FIELD, value and (value.type or value.text or value.axes and ("axis of %d"):format(value.axes[1].size)) or nil)
    end
  end
end

local function owner_of(chain)
  local first = chain[1]
  local variable = first.variable
  local owner = variable and variable.value and variable.value.owner
  for i = 2, #chain do
    if owner == "library" or not owner then return nil end
    owner = owner .. "." .. chain[i].text
  end
  return owner
end

local function after_dot(document, facts, number, except)
  local add, list = collector()
  local parsed = document.parsed
  local chain = chain_before(parsed, number)
  if #chain == 0 then return list end
  local variable = chain[1].variable
  if variable and variable.value and variable.value.owner == "library" then
    local path = {}
    for i = 2, #chain do path[#path + 1] = chain[i].text end
    path = table.concat(path, ".")
    for _, member in ipairs(library.members(path)) do
      add(member.name, FUNCTION, nil, { library = path == "" and member.name or path .. "." .. member.name })
    end
    return list
  end
  local owner = owner_of(chain)
  if owner == "config" then
    for _, setting in ipairs(facts and facts.object.settings or {}) do add(setting.name, PROPERTY, setting.value) end
  end
  if owner then add_fields(add, parsed, owner, facts, document, except) end
  local builtin = #chain == 1 and ({ math = math, string = string, table = table, os = os, utf8 = utf8 })[chain[1].text]
  for name in pairs(builtin or {}) do add(name, FUNCTION, "Lua") end
  return list
end

-- Methods of what is before a colon.
local function after_colon(document, facts, number)
  local add, list = collector()
  local parsed = document.parsed
  local chain = chain_before(parsed, number)
  local last = parsed.tokens[number - 1]
  local value
  if #chain > 0 then
    local owner = owner_of(chain)
    value = hover.value_of(document, facts, last, number - 1)
    if owner and owner:find "^class:[^.]*$" then
      for _, token in ipairs(parsed.tokens) do
        if token.owner == owner and token.body then add(token.field, METHOD, owner:sub(7)) end
      end
    end
  end
  value = value or receiver(document, facts, number + 2)
  if value and (value.kind == "axis" or value.kind == "other" and not value.text:find '^"') then return list end
  if value and value.kind == "other" then
    for name in pairs(string) do add(name, METHOD, "Lua") end
    return list
  end
  if value and value.kind == "state" then
    for name in pairs(core.class_methods "state") do
      if not name:find "^__" then add(name, METHOD, "parameter") end
    end
  end
  local type_text = value and value.type
  for name in pairs(core.tensor_methods) do add(name, METHOD, type_text, { method = name }) end
  return list
end

-- The innermost bracket that is open behind token `number`: its number and kind.
local function open_bracket(parsed, number)
  local depth = 0
  for i = number, 1, -1 do
    local what = parsed.tokens[i].kind
    if what:find "^[%)%]}]$" then
      depth = depth + 1
    elseif what:find "^[%(%[{]$" then
      if depth == 0 then return i, what end
      depth = depth - 1
    end
  end
end

-- The function of the library whose table is open behind token `number`: "train", "layout.megatron".
local function enclosing_call(parsed, number)
  local at, what = open_bracket(parsed, number)
  if what ~= "{" then return nil end
  local before = parsed.tokens[at - 1]
  if before and (before.kind == "(" or before.kind == ",") then -- m.rope(x, { |
    at, what = open_bracket(parsed, at - 1)
    if what ~= "(" then return nil end
  end
  local chain = chain_before(parsed, at)
  local variable = chain[1] and chain[1].variable
  if #chain < 2 or not (variable and variable.value and variable.value.owner == "library") then return nil end
  local path = {}
  for k = 2, #chain do path[#path + 1] = chain[k].text end
  return table.concat(path, ".")
end

-- Where a value or a key may begin. `before`: the number of the last token before what is typed.
local function anywhere(document, facts, before, offset)
  local add, list = collector()
  local parsed = document.parsed
  local last = parsed.tokens[before]
  local called = enclosing_call(parsed, before)
  local key = last and last.kind == "=" and parsed.tokens[before - 1]
  if called then
    local options = library.options(called)
    for _, option in ipairs(options) do
      if last.kind == "{" or last.kind == "," or last.kind == ";" then
        add(option.name, PROPERTY, option.kind, { text = option.text })
      elseif key and key.text == option.name then
        for _, value in ipairs(library.values(option)) do add(value, VALUE, option.name) end
      end
    end
  end
  local visible = names.visible(parsed, offset)
  local sorted = {}
  for name in pairs(visible) do sorted[#sorted + 1] = name end
  table.sort(sorted)
  for _, name in ipairs(sorted) do
    local variable = visible[name]
    local value = facts and variable.token and variable.token.first <= variable.token.last and hover.value_of(document, facts, variable.token, 0)
    add(name, variable.kind == "function" and FUNCTION or VARIABLE, value and (value.type or value.text) or variable.kind)
  end
  for _, variable in ipairs(parsed.variables) do
    local sets = false
    for _, use in ipairs(variable.kind == "global" and variable.uses or {}) do sets = sets or use.sets end
    if sets then add(variable.name, VARIABLE, "global") end
  end
  for _, name in ipairs(LUA) do add(name, FUNCTION, "Lua") end
  for word in KEYWORDS:gmatch "%a+" do add(word, KEYWORD) end
  return list
end

---@return table of the protocol
function complete.at(document, facts, offset)
  local parsed = document.parsed
  local _, number = names.token_at(parsed, offset - 1)
  local token = number and parsed.tokens[number]
  local list
  local open = token and token.kind == "STRING" and offset > token.first and (offset <= token.last or not token.text:find "^([\"']).*%1$" or #token.text == 1)
  if open then
    list = in_string(document, facts, token, number)
  else
    -- The last token that ends before the word at the cursor begins.
    local before = #parsed.tokens
    local word = document.text.source:sub(1, offset - 1):match "[%w_]*$"
    while before > 0 and (parsed.tokens[before].kind == "EOF" or parsed.tokens[before].first >= offset - #word) do before = before - 1 end
    local mark = parsed.tokens[before] and parsed.tokens[before].kind
    local typed = parsed.tokens[before + 1]
    if mark == "." then
      list = after_dot(document, facts, before, typed)
    elseif mark == ":" then
      list = after_colon(document, facts, before)
    else
      list = anywhere(document, facts, before, offset - #word)
    end
    if #word > 0 then -- a word's own place is no candidate of it
      local kept = {}
      for _, item in ipairs(list) do
        if item.label:sub(1, 1):lower() == word:sub(1, 1):lower() then kept[#kept + 1] = item end
      end
      list = kept
    end
  end
  return { isIncomplete = false, items = core.list(list) }
end

---The text of an item, when it is looked at.
function complete.resolve(item)
  local data = type(item.data) == "table" and item.data or {}
  local head, text = nil, type(data.text) == "string" and data.text or nil
  if type(data.library) == "string" then head, text = library.describe(data.library) end
  if type(data.method) == "string" then head, text = library.method(data.method) end
  if head or text then item.documentation = { kind = "markdown", value = table.concat({ head or text, head and text or nil }, "\n\n") } end
  return item
end

return complete
