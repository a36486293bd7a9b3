-- What an editor shows at a place: of an expression its tensor, of a function of the library its text; at the end of a line
-- the type of what the line computes.
local core = require "mlua.core"
local format = require "mlua.lsp_format"
local library = require "mlua.lsp_library"
local names = require "mlua.lsp_names"
local hover = {}

-- The value that a variable has where it is used: that of this use, of the expression that it was set from, or of its next use.
local function value_of_variable(facts, path, variable, token)
  local own = facts:at(path, token.first, token.last)
  if own then return own end
  local made, best = variable.made or token.made, nil
  if made then
    local value = facts:at(path, made.first, made.last)
    if value and (token == variable.token or token.made) then return value end
    best = value
  end
  for _, use in ipairs(variable.uses) do
    local value = facts:at(path, use.first, use.last) or use.made and facts:at(path, use.made.first, use.made.last)
    if value and (not best or math.abs(use.first - token.first) < math.abs(best.first - token.first)) then best = value end
  end
  return best
end

-- The value of "self.wq", of which the token is the last name; of an assignment, that of its right side.
local function value_of_field(parsed, number, facts, path)
  local token = parsed.tokens[number]
  local first = number
  while parsed.tokens[first - 1] and parsed.tokens[first - 1].kind == "." and parsed.tokens[first - 2].kind == "NAME" do first = first - 2 end
  local value = facts:at(path, parsed.tokens[first].first, token.last)
  if value then return value end
  if token.made then return facts:at(path, token.made.first, token.made.last) end
  if not token.owner then return nil end
  for _, other in ipairs(parsed.tokens) do -- another place of the same field
    if other.field == token.field and other.owner == token.owner then
      value = other.made and facts:at(path, other.made.first, other.made.last)
      if not value and other.chain then value = facts:at(path, other.last - #other.chain + 1, other.last) end
      if value then return value end
    end
  end
end

-- The bytes of the call whose function token `number` names, its receiver included.
local function call_of(parsed, number)
  local after = parsed.tokens[number + 1]
  local first = number
  local function name_before() return parsed.tokens[first - 1] and parsed.tokens[first - 1].kind:find "^[.:]$" end
  for _, call in ipairs(parsed.calls) do
    if after and call.first == after.first then
      while name_before() and parsed.tokens[first - 2].kind == "NAME" do first = first - 2 end
      if name_before() then return { last = call.last } end
      return { first = parsed.tokens[first].first, last = call.last }
    end
  end
end

-- The value of a call; where its receiver is more than names, of the widest that ends there.
local function value_of_call(facts, path, call)
  if call.first then return facts:at(path, call.first, call.last) end
  for _, value in ipairs(facts:around(path, call.last)) do
    if value.last == call.last then return value end
  end
end

---The value that a token names, and what it is called.
---@return table? value
---@return string? name
function hover.value_of(document, facts, token, number)
  local path = document.path
  if not facts or not token or token.kind ~= "NAME" then return nil end
  if token.variable then return value_of_variable(facts, path, token.variable, token), token.text end
  if token.field and not token.method and token.owner ~= "library" then return value_of_field(document.parsed, number, facts, path), token.chain or token.text end
end

local function library_path(token)
  if token.owner == "library" then return token.field end
  return token.chain and token.chain:match "^m%.(.+)$"
end

-- The name between quotes that is an axis of the script, and its size where it has one.
local function axis_text(facts, token)
  local name = token.kind == "STRING" and token.text:match "^[\"']([%w_]+)[\"']$"
  if not name or not facts then return nil end
  for _, list in pairs(facts.values) do
    for _, value in ipairs(list) do
      for _, axis in ipairs(value.axes or {}) do
        if axis.name == name then return ("```lua\naxis %s = %d\n```"):format(name, axis.size) end
      end
    end
  end
end

local function markdown(lines, range) return { contents = { kind = "markdown", value = table.concat(lines, "\n\n") }, range = range } end

---@return table? of the protocol
function hover.at(document, facts, offset)
  local token, number = names.token_at(document.parsed, offset)
  if not token then return nil end
  local range, path = document.text:range(token.first, token.last), document.path
  if token.kind == "NAME" then
    local inside = library_path(token)
    local head, text = nil, nil
    if inside then head, text = library.describe(inside) end
    if token.method then head, text = library.method(token.text) end
    local value, name = hover.value_of(document, facts, token, number)
    if not value and (head or token.method) and facts then -- the call's result
      local call = call_of(document.parsed, number)
      name = nil
      value = call and value_of_call(facts, path, call)
    end
    local lines = value and format.value(name, value, facts:steps_at(path, value.line), facts.object.pending) or {}
    if head then table.move({ head, text ~= "" and text or nil }, 1, 2, #lines + 1, lines) end
    if #lines > 0 then return markdown(lines, range) end
    if token.owner and token.owner:find "^option:m%." then
      for _, option in ipairs(library.options(token.owner:sub(10))) do
        if option.name == token.text then return markdown({ ("```lua\n%s: %s\n```"):format(option.name, option.kind), option.text }, range) end
      end
    end
  end
  local axis = axis_text(facts, token)
  if axis then return markdown({ axis }, range) end
  for _, value in ipairs(facts and facts:around(path, offset) or {}) do -- an operator, a bracket, a number
    if value.kind ~= "other" then
      return markdown(format.value(nil, value, facts:steps_at(path, value.line), facts.object.pending), document.text:range(value.first, value.last))
    end
  end
end

-- Inlay hints ------------------------------------------------------------------------------------------------------------------

---The types of what lines compute, behind their ends.
function hover.hints(document, facts, range)
  local list, text = {}, document.text
  local by_line = {}
  for _, value in ipairs(facts and facts.values[document.path] or {}) do
    if value.first and (value.kind == "tensor" or value.kind == "state") then
      local line = text:line_at(value.last)
      local code = (text:line(line) or ""):gsub("%s*%-%-[^%]\"']*$", "")
      local ends = text.starts[line] + #code - 1
      local best = by_line[line]
      local reaches = value.last >= ends - 1 -- also before a closing bracket or comma
      if reaches and (not best or value.first < best.first) then by_line[line] = value end
    end
  end
  for line, value in pairs(by_line) do
    local source = text:line(line)
    local at = text:position(text.starts[line] + #source)
    local plain = source:match "^%s*[%w_.]+$" -- a name alone in a list
    if line - 1 >= range.start.line and line - 1 <= range["end"].line and not plain then
      list[#list + 1] = { position = at, label = "  " .. value.type, paddingLeft = true, kind = 1 }
    end
  end
  table.sort(list, function(a, b) return a.position.line < b.position.line end)
  return core.list(list)
end

return hover
