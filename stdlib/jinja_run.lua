-- Chat templates: what a parsed template (jinja.lua) writes for some messages.
local core = require "mlua.core"
local jinja = require "mlua.jinja"
local NONE, UNDEFINED, refuse = jinja.NONE, jinja.UNDEFINED, jinja.refuse

local function list_of(items) return { list = items } end
local function is_list(v) return type(v) == "table" and v.list ~= nil end
local function is_mapping(v) return type(v) == "table" and v.map ~= nil end

local function mapping_of(keys, map) return { keys = keys, map = map } end

-- A Lua value as one of a template's: tables with a first element, and empty ones, are lists.
local function from_lua(value)
  if value == nil or value == core.null then return NONE end
  if type(value) ~= "table" then return value end
  if value[1] ~= nil or next(value) == nil then
    local items = {}
    for i, item in ipairs(value) do items[i] = from_lua(item) end
    return list_of(items)
  end
  local keys, map = {}, {}
  for key, item in pairs(value) do
    keys[#keys + 1], map[tostring(key)] = tostring(key), from_lua(item)
  end
  return mapping_of(keys, map)
end

local function truth(v)
  if is_list(v) then return #v.list > 0 end
  if is_mapping(v) then return #v.keys > 0 end
  return v ~= nil and v ~= false and v ~= NONE and v ~= UNDEFINED and v ~= "" and v ~= 0
end

local text_of

local function quoted(v)
  if type(v) ~= "string" then return text_of(v) end
  return "'" .. v:gsub("\\", "\\\\"):gsub("'", "\\'"):gsub("\n", "\\n") .. "'"
end

-- As Python prints it.
function text_of(v)
  if type(v) == "string" then return v end
  if v == UNDEFINED or v == nil then return "" end
  if v == NONE then return "None" end
  if type(v) == "boolean" then return v and "True" or "False" end
  local shown = {}
  if is_list(v) then
    for i, item in ipairs(v.list) do shown[i] = quoted(item) end
    return "[" .. table.concat(shown, ", ") .. "]"
  elseif is_mapping(v) then
    for i, key in ipairs(v.keys) do shown[i] = quoted(key) .. ": " .. quoted(v.map[key]) end
    return "{" .. table.concat(shown, ", ") .. "}"
  end
  return tostring(v)
end

local JSON_ESCAPES = { ['"'] = '\\"', ["\\"] = "\\\\", ["\n"] = "\\n", ["\r"] = "\\r", ["\t"] = "\\t", ["\b"] = "\\b", ["\f"] = "\\f" }

local function to_json(v, indent, depth)
  if type(v) == "string" then
    return '"' .. v:gsub('[%c"\\]', function(c) return JSON_ESCAPES[c] or (c ~= "\127" and ("\\u%04x"):format(c:byte())) or c end) .. '"'
  end
  if v == NONE or v == UNDEFINED then return "null" end
  if type(v) == "boolean" then return tostring(v) end
  if not is_list(v) and not is_mapping(v) then return text_of(v) end
  local shown, open, close = {}, "{", "}"
  if is_list(v) then
    open, close = "[", "]"
    for i, item in ipairs(v.list) do shown[i] = to_json(item, indent, depth + 1) end
  else
    for i, key in ipairs(v.keys) do shown[i] = to_json(key) .. ": " .. to_json(v.map[key], indent, depth + 1) end
  end
  if #shown == 0 then return open .. close end
  if not indent then return open .. table.concat(shown, ", ") .. close end
  local line = "\n" .. (" "):rep(indent * (depth + 1))
  return open .. line .. table.concat(shown, "," .. line) .. "\n" .. (" "):rep(indent * depth) .. close
end

local function equal(a, b)
  if is_list(a) and is_list(b) or is_mapping(a) and is_mapping(b) then return to_json(a) == to_json(b) end
  return a == b
end

local function characters(text)
  local list = {}
  for c in text:gmatch "[%z\1-\127\192-\255][\128-\191]*" do list[#list + 1] = c end
  return list
end

-- The items of what can be looped over; nil: it cannot.
local function items_of(v)
  if is_list(v) then return v.list end
  if is_mapping(v) then return v.keys end
  if type(v) == "string" then return characters(v) end
  if v == UNDEFINED then return {} end
end

local function strip(text, which, left, right)
  local set = which and which ~= NONE and "[" .. which:gsub("%W", "%%%0") .. "]" or "%s"
  if left then text = text:gsub("^" .. set .. "+", "") end
  while right and text:find(set .. "$") do text = text:sub(1, -2) end
  return text
end

local function replaced(text, from, to, most)
  local out, at, count = {}, 1, 0
  while from ~= "" and (not most or count < most) do
    local first, last = text:find(from, at, true)
    if not first then break end
    out[#out + 1], out[#out + 2], at, count = text:sub(at, first - 1), to, last + 1, count + 1
  end
  return table.concat(out) .. text:sub(at)
end

local function split(text, by, most)
  local out = {}
  if not by or by == NONE then
    for word in text:gmatch "%S+" do out[#out + 1] = word end
    return list_of(out)
  end
  local at = 1
  while not most or #out < most do
    local first, last = text:find(by, at, true)
    if not first then break end
    out[#out + 1], at = text:sub(at, first - 1), last + 1
  end
  out[#out + 1] = text:sub(at)
  return list_of(out)
end

local function capitalized(text) return (text:sub(1, 1):upper() .. text:sub(2):lower()) end
local function titled(text) return (text:gsub("%a+", capitalized)) end

local function pairs_of(v)
  local out = {}
  for i, key in ipairs(v.keys) do out[i] = list_of { key, v.map[key] } end
  return list_of(out)
end

local function field(v, key)
  if is_mapping(v) and v.map[key] ~= nil then return v.map[key] end
  if is_list(v) and math.type(key) == "integer" then
    local item = v.list[key < 0 and #v.list + key + 1 or key + 1]
    if item ~= nil then return item end
  elseif type(v) == "string" and math.type(key) == "integer" then
    local list = characters(v)
    return list[key < 0 and #list + key + 1 or key + 1] or UNDEFINED
  end
  return UNDEFINED
end

jinja.tests = {
  defined = function(v) return v ~= UNDEFINED end,
  undefined = function(v) return v == UNDEFINED end,
  none = function(v) return v == NONE end,
  string = function(v) return type(v) == "string" end,
  number = function(v) return type(v) == "number" end,
  integer = function(v) return math.type(v) == "integer" end,
  boolean = function(v) return type(v) == "boolean" end,
  mapping = is_mapping,
  sequence = function(v) return is_list(v) or is_mapping(v) or type(v) == "string" end,
  iterable = function(v) return is_list(v) or is_mapping(v) or type(v) == "string" end,
  ["true"] = function(v) return v == true end,
  ["false"] = function(v) return v == false end,
  odd = function(v) return v % 2 == 1 end,
  even = function(v) return v % 2 == 0 end,
  equalto = equal,
  eq = equal,
  ["in"] = function(v, all) return jinja.contains(all, v) end,
}

function jinja.contains(all, v)
  if type(all) == "string" then return type(v) == "string" and all:find(v, 1, true) ~= nil end
  if is_mapping(all) then return all.map[v] ~= nil end
  for _, item in ipairs(items_of(all) or {}) do
    if equal(item, v) then return true end
  end
  return false
end

local function selected(wanted, with_attribute)
  return function(v, ...)
    local out, name, test, argument = {}, ...
    if not with_attribute then name, test, argument = nil, ... end
    for _, item in ipairs(items_of(v) or {}) do
      local value = item
      if with_attribute then value = field(item, name) end
      local passes = truth(value)
      if type(test) == "string" then passes = jinja.tests[test](value, argument) end
      if passes == wanted then out[#out + 1] = item end
    end
    return list_of(out)
  end
end

jinja.filters = {
  trim = function(v, which) return strip(text_of(v), type(which) == "string" and which or nil, true, true) end,
  tojson = function(v, named) return to_json(v, type(named) == "table" and math.type(named.indent) and named.indent or nil, 0) end,
  length = function(v) return #(items_of(v) or {}) end,
  upper = function(v) return text_of(v):upper() end,
  lower = function(v) return text_of(v):lower() end,
  capitalize = function(v) return capitalized(text_of(v)) end,
  title = function(v) return titled(text_of(v)) end,
  first = function(v) return items_of(v)[1] or UNDEFINED end,
  last = function(v) return items_of(v)[#items_of(v)] or UNDEFINED end,
  string = text_of,
  safe = function(v) return v end,
  int = function(v) return math.tointeger(tonumber(v)) or math.floor(tonumber(v) or 0) end,
  list = function(v) return list_of(items_of(v)) end,
  items = pairs_of,
  replace = function(v, from, to) return replaced(text_of(v), from, to) end,
  default = function(v, other, named)
    local any = type(named) == "table" and named.boolean or named
    return (v == UNDEFINED or any == true and not truth(v)) and (other == nil and "" or other) or v
  end,
  join = function(v, by)
    local out = {}
    for i, item in ipairs(items_of(v)) do out[i] = text_of(item) end
    return table.concat(out, type(by) == "string" and by or "")
  end,
  map = function(v, name, named)
    local out = {}
    for i, item in ipairs(items_of(v)) do
      out[i] = type(name) == "table" and field(item, name.attribute) or named and jinja.filters[name](item, {}) or UNDEFINED
    end
    return list_of(out)
  end,
  reverse = function(v)
    local out, items = {}, items_of(v)
    for i = #items, 1, -1 do out[#out + 1] = items[i] end
    return list_of(out)
  end,
  indent = function(v, width) return (text_of(v):gsub("\n([^\n])", "\n" .. (" "):rep(math.type(width) and width or 4) .. "%1")) end,
  selectattr = selected(true, true), rejectattr = selected(false, true), select = selected(true), reject = selected(false),
}
jinja.filters.count, jinja.filters.d = jinja.filters.length, jinja.filters.default

local METHODS = {
  strip = function(s, which) return strip(s, which, true, true) end,
  lstrip = function(s, which) return strip(s, which, true, false) end,
  rstrip = function(s, which) return strip(s, which, false, true) end,
  split = split,
  upper = string.upper, lower = string.lower, capitalize = capitalized, title = titled,
  startswith = function(s, with) return s:sub(1, #with) == with end,
  endswith = function(s, with) return with == "" or s:sub(-#with) == with end,
  replace = replaced,
  join = function(s, list) return jinja.filters.join(list, s) end,
  find = function(s, what) return (s:find(what, 1, true) or 0) - 1 end,
}
local MAPPING_METHODS = {
  items = pairs_of,
  keys = function(v) return list_of(v.keys) end,
  values = function(v)
    local out = {}
    for i, key in ipairs(v.keys) do out[i] = v.map[key] end
    return list_of(out)
  end,
  get = function(v, key, other)
    if v.map[key] ~= nil then return v.map[key] end
    return other == nil and NONE or other
  end,
}

local evaluate, run

local function values_of(nodes, scope, line)
  local out = {}
  for i, node in ipairs(nodes) do out[i] = evaluate(node, scope, line) end
  return out
end

local function named_of(nodes, scope, line)
  local out = {}
  for name, node in pairs(nodes) do out[name] = evaluate(node, scope, line) end
  return out
end

local BINARY = {
  ["=="] = equal,
  ["!="] = function(a, b) return not equal(a, b) end,
  ["~"] = function(a, b) return text_of(a) .. text_of(b) end,
  ["+"] = function(a, b)
    if type(a) == "string" and type(b) == "string" then return a .. b end
    if is_list(a) and is_list(b) then return list_of(table.move(b.list, 1, #b.list, #a.list + 1, table.move(a.list, 1, #a.list, 1, {}))) end
    return a + b
  end,
  ["*"] = function(a, b) return type(a) == "string" and a:rep(b) or a * b end,
  ["-"] = function(a, b) return a - b end,
  ["/"] = function(a, b) return a / b end,
  ["//"] = function(a, b) return a // b end,
  ["%"] = function(a, b) return a % b end,
  ["<"] = function(a, b) return a < b end,
  [">"] = function(a, b) return a > b end,
  ["<="] = function(a, b) return a <= b end,
  [">="] = function(a, b) return a >= b end,
}

local function slice(v, first, last, step)
  local items = items_of(v) or {}
  local n, out = #items, {}
  step = step or 1
  local function place(at, default)
    if not at then return default end
    at = at < 0 and at + n or at
    return math.max(step < 0 and -1 or 0, math.min(at, step < 0 and n - 1 or n))
  end
  local from, to = place(first, step < 0 and n - 1 or 0), place(last, step < 0 and -1 or n)
  for i = from, to + (step < 0 and 1 or -1), step do out[#out + 1] = items[i + 1] end
  return type(v) == "string" and table.concat(out) or list_of(out)
end

local function call(node, scope, line)
  local what, list, named = node[2], values_of(node[3], scope, line), named_of(node[4] or {}, scope, line)
  if what[1] == "field" then
    local object, name = evaluate(what[2], scope, line), what[3][2]
    local methods = type(object) == "string" and METHODS or is_mapping(object) and MAPPING_METHODS
    if methods and methods[name] and not (is_mapping(object) and type(object.map[name]) == "function") then
      return methods[name](object, table.unpack(list))
    end
  end
  local f = evaluate(what, scope, line)
  if type(f) ~= "function" then refuse(line, "%s is not a function that is supported", tostring(what[1] == "field" and what[3][2] or what[2])) end
  return f(list, named)
end

local EVALUATE = {
  value = function(node) return node[2] end,
  name = function(node, scope)
    local value = scope[node[2]]
    if value == nil then return UNDEFINED end
    return value
  end,
  list = function(node, scope, line) return list_of(values_of(node[2], scope, line)) end,
  mapping = function(node, scope, line)
    local keys, map = {}, {}
    for i, key in ipairs(values_of(node[2], scope, line)) do keys[i], map[key] = key, evaluate(node[3][i], scope, line) end
    return mapping_of(keys, map)
  end,
  field = function(node, scope, line)
    local object = evaluate(node[2], scope, line)
    if object == UNDEFINED then refuse(line, "there is no value whose %s could be taken", tostring(node[3][2])) end
    return field(object, node[3][2])
  end,
  index = function(node, scope, line)
    local object = evaluate(node[2], scope, line)
    if object == UNDEFINED then refuse(line, "an element of what is not defined") end
    return field(object, evaluate(node[3], scope, line))
  end,
  slice = function(node, scope, line)
    local bounds = {}
    for i = 3, 5 do bounds[i] = node[i] and evaluate(node[i], scope, line) end
    return slice(evaluate(node[2], scope, line), bounds[3], bounds[4], bounds[5])
  end,
  call = call,
  filter = function(node, scope, line)
    local list, named = values_of(node[4], scope, line), named_of(node[5], scope, line)
    list[#list + 1] = named
    return jinja.filters[node[3]](evaluate(node[2], scope, line), table.unpack(list))
  end,
  test = function(node, scope, line)
    return jinja.tests[node[3]](evaluate(node[2], scope, line), node[4] and evaluate(node[4], scope, line)) and true or false
  end,
  ["in"] = function(node, scope, line) return jinja.contains(evaluate(node[3], scope, line), evaluate(node[2], scope, line)) end,
  ["not"] = function(node, scope, line) return not truth(evaluate(node[2], scope, line)) end,
  negative = function(node, scope, line) return -evaluate(node[2], scope, line) end,
  ["and"] = function(node, scope, line)
    local left = evaluate(node[2], scope, line)
    if truth(left) then return evaluate(node[3], scope, line) end
    return left
  end,
  ["or"] = function(node, scope, line)
    local left = evaluate(node[2], scope, line)
    if truth(left) then return left end
    return evaluate(node[3], scope, line)
  end,
  either = function(node, scope, line) return evaluate(node[truth(evaluate(node[2], scope, line)) and 3 or 4], scope, line) end,
  binary = function(node, scope, line) return BINARY[node[2]](evaluate(node[3], scope, line), evaluate(node[4], scope, line)) end,
}

local at_line = 1 -- of what is evaluated, for errors of Lua's operators

function evaluate(node, scope, line)
  at_line = line
  return EVALUATE[node[1]](node, scope, line)
end

local function inner(scope) return setmetatable({}, { __index = scope }) end

local function loop(node, scope, out)
  local names, items, condition = node[2], items_of(evaluate(node[3], scope, node.line)), node[4]
  if not items then refuse(node.line, "what is looped over is not a list") end
  local rounds = {}
  for _, item in ipairs(items) do
    local own = inner(scope)
    for i, name in ipairs(names) do own[name] = #names == 1 and item or field(item, i - 1) end
    if not condition or truth(evaluate(condition, own, node.line)) then rounds[#rounds + 1] = { own, item } end
  end
  for i, round in ipairs(rounds) do
    local previous, following = rounds[i - 1], rounds[i + 1]
    round[1].loop = mapping_of({}, {
      index = i, index0 = i - 1, first = i == 1, last = i == #rounds, length = #rounds, revindex = #rounds - i + 1, revindex0 = #rounds - i,
      previtem = previous and previous[2] or UNDEFINED, nextitem = following and following[2] or UNDEFINED,
    })
    if run(node[5], round[1], out) == "break" then break end
  end
  if #rounds == 0 and node[6] then run(node[6], inner(scope), out) end
end

local RUN = {
  text = function(node, _, out) out[#out + 1] = node[2] end,
  print = function(node, scope, out) out[#out + 1] = text_of(evaluate(node[2], scope, node.line)) end,
  ["if"] = function(node, scope, out)
    for _, branch in ipairs(node[2]) do
      if truth(evaluate(branch[1], scope, node.line)) then return run(branch[2], scope, out) end
    end
  end,
  ["for"] = loop,
  set = function(node, scope)
    local value = evaluate(node[4], scope, node.line)
    if not node[3] then
      scope[node[2]] = value
      return
    end
    local object = scope[node[2]]
    if not is_mapping(object) then refuse(node.line, "%s is no namespace", node[2]) end
    if object.map[node[3]] == nil then table.insert(object.keys, node[3]) end
    object.map[node[3]] = value
  end,
  capture = function(node, scope)
    local own = {}
    run(node[3], inner(scope), own)
    scope[node[2]] = table.concat(own)
  end,
  macro = function(node, scope)
    scope[node[2]] = function(list, named)
      local own, out = inner(scope), {}
      for i, parameter in ipairs(node[3]) do
        local value = list[i]
        if value == nil then value = named[parameter[1]] end
        if value == nil and parameter[2] then value = evaluate(parameter[2], scope, node.line) end
        own[parameter[1]] = value == nil and UNDEFINED or value
      end
      run(node[4], own, out)
      return table.concat(out)
    end
  end,
  ["break"] = function() return "break" end,
  continue = function() return "continue" end,
}

function run(nodes, scope, out)
  for _, node in ipairs(nodes) do
    local ending = RUN[node[1]](node, scope, out)
    if ending then return ending end
  end
end

local FUNCTIONS = {
  raise_exception = function(list) core.fail("the chat template refuses the messages: " .. text_of(list[1])) end,
  strftime_now = function(list) return os.date(list[1]) end,
  range = function(list)
    local out, first, last = {}, list[2] and list[1] or 0, list[2] or list[1]
    for i = first, last - 1, list[3] or 1 do out[#out + 1] = i end
    return list_of(out)
  end,
  namespace = function(_, named)
    local keys = {}
    for key in pairs(named) do keys[#keys + 1] = key end
    return mapping_of(keys, named)
  end,
}
FUNCTIONS.dict = FUNCTIONS.namespace

---The text that a template writes, with these variables.
---@param tree table of jinja.parse
---@param variables table<string, any>
---@return string
return function(tree, variables)
  local scope, out = inner(FUNCTIONS), {}
  for name, value in pairs(variables) do scope[name] = from_lua(value) end
  local ok, problem = pcall(run, tree, scope, out)
  if ok then return table.concat(out) end
  if type(problem) ~= "string" then error(problem, 0) end
  refuse(at_line, "%s", (problem:gsub("^.-:%d+: ", "")))
end
