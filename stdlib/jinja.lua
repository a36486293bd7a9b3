-- Chat templates: the part of Jinja that published models' templates use, with trim_blocks and lstrip_blocks as
-- transformers sets them. What is not known is refused by its name and line.
--
-- Values: strings, numbers and booleans are Lua's; NONE and UNDEFINED; a list is {list = {...}}, with n; a mapping
-- {keys = {...}, map = {...}} in its order.
local core = require "mlua.core"

local NONE, UNDEFINED = { none = true }, { undefined = true }
local jinja = { none = NONE }

local function refuse(line, format, ...) core.fail(("line %d of the chat template: " .. format):format(line, ...)) end

-- Text to tokens ----------------------------------------------------------------------------------------

local ESCAPES = { n = "\n", t = "\t", r = "\r", ["\\"] = "\\", ["'"] = "'", ['"'] = '"' }
local SYMBOLS = { "==", "!=", "<=", ">=", "//", "**", "+", "-", "*", "/", "%", "~", "<", ">", "=", "(", ")", "[", "]", "{", "}", ".", ",", ":", "|" }

-- The tokens {kind, value} of an expression or statement.
local function words(code, line)
  local list, at = {}, 1
  local function add(kind, value, last)
    list[#list + 1], at = { kind = kind, value = value, line = line }, last + 1
  end
  while true do
    at = code:find("%S", at)
    if not at then return list end
    local c = code:sub(at, at)
    local _, last = code:find("^[%a_][%w_]*", at)
    if last then
      add("name", code:sub(at, last), last)
    elseif c:find "%d" then
      _, last = code:find("^%d+%.?%d*", at)
      add("value", math.tointeger(tonumber(code:sub(at, last))) or tonumber(code:sub(at, last)), last)
    elseif c == "'" or c == '"' then
      local text, i = {}, at + 1
      while code:sub(i, i) ~= c do
        local piece = code:sub(i, i)
        if piece == "" then refuse(line, "a text has no end") end
        if piece == "\\" then
          i = i + 1
          piece = ESCAPES[code:sub(i, i)] or "\\" .. code:sub(i, i)
        end
        text[#text + 1], i = piece, i + 1
      end
      add("value", table.concat(text), i)
    else
      local symbol
      for _, s in ipairs(SYMBOLS) do
        if code:sub(at, at + #s - 1) == s then symbol = s break end
      end
      if not symbol then refuse(line, "%q is no part of an expression", c) end
      add("symbol", symbol, at + #symbol - 1)
    end
  end
end

-- A template as parts: {text}, {print = words} and {statement = words}.
local function parts_of(source)
  local parts, at, line, trims = {}, 1, 1, false
  source = source:gsub("\r\n", "\n"):gsub("\n$", "")
  while true do
    local open = source:find("{[{%%#]", at)
    local text = source:sub(at, (open or 0) - 1)
    if trims == "all" then text = text:gsub("^%s+", "") elseif trims == "line" then text = text:gsub("^\n", "") end
    local kind = open and source:sub(open, open + 1)
    local strip = open and source:sub(open + 2, open + 2) == "-"
    if strip then
      text = text:gsub("%s+$", "")
    elseif kind == "{%" or kind == "{#" then -- spaces before a block that begins a line
      local before = text:match "\n[ \t]*$" or (at == 1 and text:match "^[ \t]*$") or (trims == "line" and source:sub(at, at) == "\n" and text:match "^[ \t]*$")
      if before then text = text:gsub("[ \t]+$", "") end
    end
    if text ~= "" then parts[#parts + 1] = { text = text } end
    if not open then return parts end
    local _, before = source:sub(at, open):gsub("\n", "")
    line = line + before
    local ends = kind == "{{" and "}}" or kind == "{%" and "%}" or "#}"
    local close = source:find(ends, open + 2, true)
    while close and kind ~= "{#" do -- an end within a text is none
      local inside = source:sub(open + 2, close - 1):gsub("\\.", "__"):gsub("'[^']*'", ""):gsub('"[^"]*"', "")
      if not inside:find "['\"]" then break end
      close = source:find(ends, close + 1, true)
    end
    if not close then refuse(line, "%s has no %s", kind, ends) end
    while kind == "{{" and source:sub(close + 2, close + 2) == "}" do close = close + 1 end
    local code = source:sub(open + 2 + (strip and 1 or 0), close - 1)
    trims = kind ~= "{{" and "line" or false
    if code:sub(-1) == "-" then code, trims = code:sub(1, -2), "all" end
    if kind ~= "{#" then parts[#parts + 1] = { [kind == "{{" and "print" or "statement"] = words(code, line), line = line } end
    local _, within = source:sub(open, close):gsub("\n", "")
    line, at = line + within, close + 2
  end
end

-- Tokens to a tree --------------------------------------------------------------------------------------

local Parser = {}
Parser.__index = Parser

function Parser:peek(value, kind)
  local word = self.list[self.at]
  return word and word.value == value and word.kind == (kind or "symbol")
end

function Parser:take(value, kind)
  if self:peek(value, kind) then
    self.at = self.at + 1
    return true
  end
end

function Parser:expect(value, kind)
  if not self:take(value, kind) then
    local word = self.list[self.at]
    refuse(self.line, "%s is expected, not %s", value, word and tostring(word.value) or "the end")
  end
end

function Parser:name()
  local word = self.list[self.at]
  if not word or word.kind ~= "name" then refuse(self.line, "a name is expected") end
  self.at = self.at + 1
  return word.value
end

function Parser:arguments()
  local list, named = {}, {}
  while not self:take ")" do
    local word, following = self.list[self.at], self.list[self.at + 1]
    if word and word.kind == "name" and following and following.value == "=" and following.kind == "symbol" then
      self.at = self.at + 2
      named[word.value] = self:expression()
    else
      list[#list + 1] = self:expression()
    end
    if not self:peek ")" then self:expect "," end
  end
  return list, named
end

function Parser:items(close)
  local list = {}
  while not self:take(close) do
    list[#list + 1] = self:expression()
    if not self:peek(close) then self:expect "," end
  end
  return list
end

function Parser:primary()
  local word = self.list[self.at]
  if not word then refuse(self.line, "an expression ends too early") end
  self.at = self.at + 1
  if word.kind == "value" then
    local value = word.value
    while type(value) == "string" and self.list[self.at] and self.list[self.at].kind == "value" do
      value, self.at = value .. self.list[self.at].value, self.at + 1
    end
    return { "value", value }
  elseif word.kind == "name" then
    local lower = word.value:lower()
    if lower == "true" or lower == "false" then return { "value", lower == "true" } end
    if lower == "none" or lower == "null" then return { "value", NONE } end
    return { "name", word.value }
  elseif word.value == "(" then
    if self:take ")" then return { "list", {} } end
    local first = self:expression()
    if not self:peek "," then
      self:expect ")"
      return first
    end
    self:expect ","
    local list = self:items ")"
    table.insert(list, 1, first)
    return { "list", list }
  elseif word.value == "[" then
    return { "list", self:items "]" }
  elseif word.value == "{" then
    local keys, values = {}, {}
    while not self:take "}" do
      keys[#keys + 1] = self:expression()
      self:expect ":"
      values[#values + 1] = self:expression()
      if not self:peek "}" then self:expect "," end
    end
    return { "mapping", keys, values }
  end
  refuse(self.line, "%s begins no expression", tostring(word.value))
end

function Parser:postfix()
  local node = self:primary()
  while true do
    if self:take "." then
      node = { "field", node, { "value", self:name() } }
    elseif self:take "[" then
      local first = not self:peek ":" and self:expression() or nil
      if self:take ":" then
        local last, step
        if not self:peek "]" and not self:peek ":" then last = self:expression() end
        if self:take ":" and not self:peek "]" then step = self:expression() end
        node = { "slice", node, first or false, last or false, step or false }
      else
        node = { "index", node, first }
      end
      self:expect "]"
    elseif self:take "(" then
      node = { "call", node, self:arguments() }
    elseif self:take "|" then
      local name, list, named = self:name(), {}, {}
      if self:take "(" then list, named = self:arguments() end
      if not jinja.filters[name] then refuse(self.line, "the filter %s is not supported", name) end
      node = { "filter", node, name, list, named }
    else
      return node
    end
  end
end

function Parser:unary()
  if self:take "-" then return { "negative", self:unary() } end
  if self:take "+" then return self:unary() end
  return self:postfix()
end

local function chain(name, following, symbols)
  Parser[name] = function(self)
    local node = self[following](self)
    while true do
      local word, found = self.list[self.at], nil
      for _, s in ipairs(symbols) do
        if word and word.kind == "symbol" and word.value == s then found = s end
      end
      if not found then return node end
      self.at = self.at + 1
      node = { "binary", found, node, self[following](self) }
    end
  end
end
chain("product", "unary", { "*", "/", "//", "%" })
chain("sum", "product", { "+", "-" })
chain("joined", "sum", { "~" })

function Parser:comparison()
  local node = self:joined()
  while true do
    local word, found = self.list[self.at], nil
    for _, s in ipairs { "==", "!=", "<", ">", "<=", ">=" } do
      if word and word.kind == "symbol" and word.value == s then found = s end
    end
    if found then
      self.at = self.at + 1
      node = { "binary", found, node, self:joined() }
    elseif self:take("in", "name") then
      node = { "in", node, self:joined() }
    elseif self:peek("not", "name") and self.list[self.at + 1] and self.list[self.at + 1].value == "in" then
      self.at = self.at + 2
      node = { "not", { "in", node, self:joined() } }
    elseif self:take("is", "name") then
      local negated, name, argument = self:take("not", "name"), self:name(), nil
      if not jinja.tests[name:lower()] then refuse(self.line, "the test %s is not supported", name) end
      if self:take "(" then argument = self:arguments()[1] end
      node = { "test", node, name:lower(), argument }
      if negated then node = { "not", node } end
    else
      return node
    end
  end
end

function Parser:negation()
  if self:take("not", "name") then return { "not", self:negation() } end
  return self:comparison()
end

function Parser:conjunction()
  local node = self:negation()
  while self:take("and", "name") do node = { "and", node, self:negation() } end
  return node
end

function Parser:choice()
  local node = self:conjunction()
  while self:take("or", "name") do node = { "or", node, self:conjunction() } end
  return node
end

function Parser:expression()
  local node = self:choice()
  if self:take("if", "name") then
    local condition = self:choice()
    return { "either", condition, node, self:take("else", "name") and self:expression() or { "value", UNDEFINED } }
  end
  return node
end

local function parser(list, line) return setmetatable({ list = list, at = 1, line = line }, Parser) end

local function ended(p)
  if p.list[p.at] then refuse(p.line, "%s is not expected", tostring(p.list[p.at].value)) end
end

-- Parts from `at` to a tree of statements, up to a statement of `ends`; its word and the next place.
local function block(parts, at, ends)
  local list = {}
  while parts[at] do
    local part = parts[at]
    at = at + 1
    if part.text then
      list[#list + 1] = { "text", part.text }
    elseif part.print then
      local p = parser(part.print, part.line)
      list[#list + 1] = { "print", p:expression(), line = part.line }
      ended(p)
    else
      local p = parser(part.statement, part.line)
      local word = p:name()
      if ends and ends[word] then return list, word, at, p end
      local read = jinja.statements[word]
      if not read then refuse(part.line, "the statement %s is not supported", word) end
      local node
      node, at = read(p, parts, at)
      node.line = part.line
      list[#list + 1] = node
    end
  end
  if ends then refuse(parts[#parts] and parts[#parts].line or 1, "a statement has no %s", next(ends)) end
  return list, nil, at
end

jinja.statements = {
  ["if"] = function(p, parts, at)
    local branches, condition = {}, p:expression()
    ended(p)
    while true do
      local body, word, q
      body, word, at, q = block(parts, at, { elif = true, ["else"] = true, endif = true })
      branches[#branches + 1] = { condition, body }
      if word == "endif" then return { "if", branches }, at end
      condition = word == "elif" and q:expression() or { "value", true }
    end
  end,
  ["for"] = function(p, parts, at)
    local names = { p:name() }
    while p:take "," do names[#names + 1] = p:name() end
    p:expect("in", "name")
    local list, condition, otherwise = p:choice(), nil, nil
    if p:take("if", "name") then condition = p:expression() end
    ended(p)
    local body, word
    body, word, at = block(parts, at, { ["else"] = true, endfor = true })
    if word == "else" then otherwise, word, at = block(parts, at, { endfor = true }) end
    return { "for", names, list, condition or false, body, otherwise or false }, at
  end,
  set = function(p, parts, at)
    local name, field = p:name(), p:take "." and p:name() or nil
    if p:take "=" then
      local node = { "set", name, field or false, p:expression() }
      ended(p)
      return node, at
    end
    local body
    body, _, at = block(parts, at, { endset = true })
    return { "capture", name, body }, at
  end,
  macro = function(p, parts, at)
    local name, parameters = p:name(), {}
    p:expect "("
    while not p:take ")" do
      local parameter = { p:name() }
      if p:take "=" then parameter[2] = p:expression() end
      parameters[#parameters + 1] = parameter
      if not p:peek ")" then p:expect "," end
    end
    local body
    body, _, at = block(parts, at, { endmacro = true })
    return { "macro", name, parameters, body }, at
  end,
  generation = function(_, parts, at)
    local body
    body, _, at = block(parts, at, { endgeneration = true })
    return { "if", { { { "value", true }, body } } }, at
  end,
  ["break"] = function(_, _, at) return { "break" }, at end,
  continue = function(_, _, at) return { "continue" }, at end,
}

---A template as a tree, for require "mlua.jinja_run". The tables `filters` and `tests` say which are known.
---@param source string
---@return table
function jinja.parse(source) return (block(parts_of(source), 1)) end

jinja.NONE, jinja.UNDEFINED, jinja.refuse = NONE, UNDEFINED, refuse
return jinja
