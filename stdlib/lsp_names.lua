-- The names of a script: which declaration a variable is, and whose field a name behind a dot is. A light parser over tokens
-- (core.tokens): where the text is broken it continues at the next token, so that it
-- also serves a line that is being typed.
--
-- An owner says whose a field is: "library" (m), "axes" (of m.axes), "config" (of m.config), "class:Block" (self of a module's
-- functions, the class, an instance made by Block()), "option:m.train" (keys of a call's table), "table:N" (declaration N).
local core = require "mlua.core"
local names = {}

-- Of the text that is parsed.
local tokens, at, scope, variables, class, calls, imports, exports

local BINARY = {}
for word in ("+ - * / // % ^ .. == ~= < <= > >= and or & | ~ << >>"):gmatch "%S+" do BINARY[word] = true end
local ENDS = { EOF = true, ["end"] = true, ["else"] = true, ["elseif"] = true, ["until"] = true }

local function kind(ahead) return tokens[at + (ahead or 0)] and tokens[at + (ahead or 0)].kind or "EOF" end
local function advance()
  local token = tokens[at]
  if kind() ~= "EOF" then at = at + 1 end
  return token
end
local function accept(what) return kind() == what and advance() or nil end

-- Scopes -----------------------------------------------------------------------------------------------------------------------

local function open_scope() scope = { outer = scope, names = {} } end
local function close_scope()
  for _, variable in ipairs(scope) do variable.till = tokens[at] and tokens[at].first or math.huge end
  scope = scope.outer
end

local function declare(token, what)
  local variable = { name = token.text, token = token, kind = what, from = tokens[at] and tokens[at].first or token.last, uses = { token }, id = #variables + 1 }
  variables[#variables + 1] = variable
  scope[#scope + 1], scope.names[token.text] = variable, variable
  token.variable = variable
  return variable
end

local function refer(token)
  local s = scope
  while s and not s.names[token.text] do s = s.outer end
  local variable = s and s.names[token.text]
  if not variable then -- a global: of the whole text
    variable = { name = token.text, kind = "global", from = 1, till = math.huge, uses = {}, id = #variables + 1 }
    variables[#variables + 1] = variable
    local outermost = scope
    while outermost.outer do outermost = outermost.outer end
    outermost.names[token.text] = variable
  end
  token.variable = variable
  variable.uses[#variable.uses + 1] = token
  return variable
end

-- Expressions: each gives what is known of its value, {owner=, class=} or an empty table --------------------------------------------

local block, expression

local function field(value, token, sets)
  token.field, token.owner, token.sets = token.text, value.owner, sets
  token.chain = value.chain and value.chain .. "." .. token.text or nil
  local owner = token.owner
  local known = value.fields and value.fields[token.text]
  if known then return { owner = known.owner, makes = known.makes, fields = known.fields, chain = token.chain, first = value.first } end
  return { owner = owner and owner ~= "library" and owner .. "." .. token.text or nil, library = owner == "library" and token.text or nil, chain = token.chain, first = value.first }
end

-- Whose the keys are of a table that is the value of a key: the tables in presets have those of the configuration.
local INNER = { config = { presets = "presets" }, presets = setmetatable({}, { __index = function() return "config" end }) }

-- Gives the values of its keys.
local function table_constructor(owner)
  local fields = {}
  advance()
  while kind() ~= "}" and kind() ~= "EOF" do
    local before = at
    if accept "[" then
      expression()
      accept "]"
      accept "="
      expression()
    elseif kind() == "NAME" and kind(1) == "=" then
      local key = advance()
      key.field, key.owner, key.sets, key.key = key.text, owner, true, true
      advance()
      if kind() == "{" and INNER[owner] then
        table_constructor(INNER[owner][key.text])
      else
        fields[key.text] = expression()
      end
    else
      expression()
    end
    if not accept "," and not accept ";" and at == before then advance() end
  end
  accept "}"
  return fields
end

local function parameters(method, owner)
  open_scope()
  if method then
    local self = declare({ text = "self", first = tokens[at].first, last = tokens[at].first - 1, implicit = true }, "parameter")
    self.value = { owner = owner }
  end
  accept "("
  local first = true
  while kind() == "NAME" or kind() == "..." or kind() == "," do
    local token = advance()
    if token.kind == "NAME" then
      local variable = declare(token, "parameter")
      if first and token.text == "self" then variable.value = { owner = owner } end
      first = false
    end
  end
  accept ")"
  for _, variable in ipairs(scope) do variable.from = tokens[at] and tokens[at].first or variable.from end
end

local function body(method, owner)
  local outer = class
  class = owner or class
  parameters(method, owner)
  block()
  close_scope()
  accept "end"
  class = outer
end

-- The call of `value`: what it gives.
local function arguments(value, method)
  local call = { name = value.library or method or value.chain, library = value.library ~= nil, method = method, first = tokens[at].first }
  calls[#calls + 1] = call
  local made, strings = value.library, {}
  local keys = (made == "axes" or made == "config") and made or made and "option:m." .. made or method and "argument:" .. method or nil
  local function string_token()
    tokens[at].call = call
    strings[#strings + 1] = tokens[at].text:match "^[\"'](.*)[\"']$"
    return advance()
  end
  if kind() == "STRING" then
    string_token()
  elseif kind() == "{" then
    table_constructor(keys)
  else
    advance()
    local outer = class
    while kind() ~= ")" and kind() ~= "EOF" do
      local before = at
      if kind() == "STRING" and not BINARY[kind(1)] then
        string_token()
      elseif kind() == "{" then
        table_constructor(keys)
      elseif kind() == "function" and made == "module" then
        advance()
        body(false, "class:" .. (strings[1] or "?"))
      else
        local first = expression()
        call.config = call.config or first.owner == "config"
      end
      if not accept "," and at == before then advance() end
    end
    class = outer
    accept ")"
  end
  call.last = tokens[at - 1].last
  call.class = made == "module" and strings[1] or nil
  if made == "axes" or made == "config" then return { owner = made } end
  if made == "module" then return { owner = "class:" .. (strings[1] or "?"), makes = "class:" .. (strings[1] or "?") } end
  if value.makes and not method then return { owner = value.makes } end
  if call.name == "require" and strings[1] == "mlua" then return { owner = "library" } end
  return call.name == "require" and imports[strings[1]] or {}
end

local function suffixed(assigned)
  local value, first = {}, tokens[at]
  if accept "(" then
    expression()
    accept ")"
  elseif kind() == "NAME" then
    local variable = refer(advance())
    local known = variable.value or {}
    value = { owner = known.owner, makes = known.makes, fields = known.fields, chain = variable.name, first = first.first }
  else
    return nil
  end
  while true do
    local what = kind()
    if what == "." then
      advance()
      if kind() ~= "NAME" or tokens[at].line > tokens[at - 1].line then return {} end
      local token = advance()
      value = field(value, token, assigned and (kind() == "=" or kind() == ","))
    elseif what == "[" then
      advance()
      expression()
      accept "]"
      value = {}
    elseif what == ":" then
      advance()
      if kind() ~= "NAME" then return {} end
      local token = advance()
      field(value, token)
      token.method = true
      if kind() ~= "(" and kind() ~= "{" and kind() ~= "STRING" then return {} end
      value = arguments(value, token.text)
    elseif what == "(" and tokens[at].line > tokens[at - 1].line and assigned then
      return value
    elseif what == "(" or what == "{" or what == "STRING" then
      value = arguments(value)
    else
      return value
    end
  end
end

function expression()
  local value
  while kind() == "not" or kind() == "-" or kind() == "#" or kind() == "~" do advance() end
  local what = kind()
  if what == "function" then
    advance()
    body(false, class)
    value = {}
  elseif what == "{" then
    value = { owner = "table:" .. at }
    value.fields = table_constructor(value.owner)
  elseif what == "NAME" or what == "(" then
    value = suffixed(false)
  elseif what == "STRING" or what == "NUMBER" or what == "nil" or what == "true" or what == "false" or what == "..." then
    advance()
  end
  if BINARY[kind()] then
    advance()
    expression()
    return {}
  end
  return value or {}
end

-- Statements --------------------------------------------------------------------------------------------------------------------

local function expressions()
  local list = {}
  repeat
    local first = tokens[at]
    local value = expression()
    list[#list + 1] = { value = value, first = first.first, last = tokens[at - 1] and tokens[at - 1].last or first.last }
  until not accept ","
  return list
end

local function local_statement()
  if accept "function" then
    if kind() == "NAME" then declare(advance(), "function") end
    return body(false)
  end
  local list = {}
  repeat
    if kind() == "NAME" then list[#list + 1] = advance() end
    if accept "<" then advance() accept ">" end
  until not accept ","
  local values = accept "=" and expressions() or {}
  for i, token in ipairs(list) do
    local variable, given = declare(token, "local"), values[i]
    if given then variable.value, variable.made = given.value, { first = given.first, last = given.last } end
  end
end

local function function_statement()
  local owner, method
  if kind() == "NAME" then
    local variable = refer(advance())
    local value = { owner = (variable.value or {}).owner, chain = variable.name }
    owner = value.owner
    while kind() == "." or kind() == ":" do
      method = advance().kind == ":"
      if kind() == "NAME" then
        local token = advance()
        token.body = true
        value = field(value, token, true)
      end
    end
  end
  body(method, owner and owner:find "^class:" and owner or nil)
end

local function for_statement()
  local list = {}
  repeat
    if kind() == "NAME" then list[#list + 1] = advance() end
  until not accept ","
  if not accept "=" then accept "in" end
  expressions()
  accept "do"
  open_scope()
  for _, token in ipairs(list) do declare(token, "for") end
  block()
  close_scope()
  accept "end"
end

local function inner_block(stop)
  open_scope()
  block()
  if stop == "until" and accept "until" then
    expression()
    close_scope()
  else
    close_scope()
    accept(stop)
  end
end

local function statement()
  local what = kind()
  if what == "local" then
    advance()
    local_statement()
  elseif what == "function" then
    advance()
    function_statement()
  elseif what == "for" then
    advance()
    for_statement()
  elseif what == "if" then
    repeat
      advance()
      if kind() ~= "then" then expression() end
      accept "then"
      open_scope()
      block()
      close_scope()
    until kind() ~= "elseif"
    if accept "else" then
      open_scope()
      block()
      close_scope()
    end
    accept "end"
  elseif what == "while" then
    advance()
    expression()
    accept "do"
    inner_block "end"
  elseif what == "do" then
    advance()
    inner_block "end"
  elseif what == "repeat" then
    advance()
    inner_block "until"
  elseif what == "return" then
    advance()
    local given = not ENDS[kind()] and kind() ~= ";" and expressions()
    if given and not scope.outer then exports = given[1].value end
  elseif what == "NAME" or what == "(" then
    local targets = {}
    repeat
      local first = tokens[at]
      suffixed(true)
      targets[#targets + 1] = { token = tokens[at - 1], first = first }
    until not accept ","
    if accept "=" then
      for i, given in ipairs(expressions()) do
        local target = targets[i] and targets[i].token
        if target then target.made = { first = given.first, last = given.last } end
        if target and target.variable and target == targets[i].first then target.sets = true end
      end
    end
  else
    advance()
  end
end

local DEEPEST = 150
local depth = 0
function block()
  depth = depth + 1
  while not ENDS[kind()] and depth < DEEPEST do
    local before = at
    statement()
    if at == before then advance() end
  end
  if depth >= DEEPEST then at = #tokens end
  depth = depth - 1
end

---The tokens of a text, with variable, field, owner, chain, call; the variables; the calls.
---`exports` is what is known of the value that the file returns; `given` that of required files, by name.
---@param source string
---@param given? table
function names.parse(source, given)
  tokens, at, scope, variables, class, calls, depth = core.tokens(source), 1, nil, {}, nil, {}, 0
  imports, exports = given or {}, nil
  open_scope()
  repeat
    block()
    if kind() ~= "EOF" then advance() end -- an end too many
  until kind() == "EOF"
  close_scope()
  local result = { tokens = tokens, variables = variables, calls = calls, exports = exports }
  for _, variable in ipairs(variables) do variable.till = variable.till or math.huge end
  tokens, variables, calls = nil, nil, nil
  return result
end

---The token that a byte is in, or directly behind; and its number.
function names.token_at(parsed, offset)
  local low, high = 1, #parsed.tokens
  while low < high do
    local middle = (low + high + 1) // 2
    if parsed.tokens[middle].first <= offset then low = middle else high = middle - 1 end
  end
  local token = parsed.tokens[low]
  if token and token.kind ~= "EOF" and token.first <= offset and offset <= token.last then return token, low end
  local before = token and token.first == offset and parsed.tokens[low - 1] or token
  if before and before.kind == "NAME" and before.last + 1 == offset then return before, before == token and low or low - 1 end
end

---The variables that are visible at a byte; inner ones hide outer ones of their name.
function names.visible(parsed, offset)
  local by_name = {}
  for _, variable in ipairs(parsed.variables) do
    if variable.kind ~= "global" and variable.from <= offset and offset <= variable.till then by_name[variable.name] = variable end
  end
  return by_name
end

return names
