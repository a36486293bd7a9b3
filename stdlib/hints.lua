-- Help lines for errors of plain Lua: what a name that a script never set was probably meant to be, what Lua 5.4 has in place
-- of what other versions and languages have.
local core = require "mlua.core"

local hints = {}

-- {help = "word word ..."} by word.
local function by_word(list)
  local result = {}
  for help, words in pairs(list) do
    for word in words:gmatch "%S+" do result[word] = help end
  end
  return result
end

-- Of other Lua versions and of the lua command: libraries ask for them, so reading one is no error.
local ABSENT = by_word {
  ["Lua 5.4's is table.unpack"] = "unpack",
  ["Lua 5.4's is load"] = "loadstring",
  ['load(text, name, "t", environment) sets an environment'] = "setfenv getfenv",
  ["return a table from the file, and require it"] = "module",
  ["setmetatable({}, {...}) makes one"] = "newproxy",
  ['collectgarbage("count") is the memory in KiB'] = "gcinfo",
  ["Lua 5.4 has operators: a & b, a | b, a ~ b, ~a, a << n, a >> n"] = "bit bit32",
  ["mlua runs Lua 5.4"] = "jit ffi",
  ["settings are written key=value on the command line: m.config { steps = 100 }"] = "arg",
}

-- Of other languages, and what a script's beginning defines.
local FOREIGN = by_word {
  ["Lua's is true"] = "True TRUE",
  ["Lua's is false"] = "False FALSE",
  ["Lua's is nil"] = "None none nill Nil null NULL nullptr undefined",
  ["Lua's is math.huge"] = "inf Inf Infinity",
  ["Lua's is 0/0"] = "nan NaN",
  ["Lua's is math.pi"] = "pi",
  ["#t is the length of a list or text, t:size(axis) that of a tensor's axis"] = "len",
  ["for i = 1, n do ... end counts; m.iota(axis) is a tensor"] = "range",
  ["for i, item in ipairs(list) do ... end"] = "enumerate",
  ["for i, a in ipairs(list) do local b = other[i] ... end"] = "zip",
  ['math.floor(x) or x // 1 of a number, t:cast("i32") of a tensor, tonumber(s) of a text'] = "int",
  ['tonumber(s) of a text, t:cast("f32") of a tensor'] = "float",
  ["tostring(x)"] = "str",
  ["a list is { 1, 2, 3 }, a table of names { name = value }"] = "list dict tuple",
  ["a set is a table: set[item] = true"] = "set",
  ['type(x) == "number", m.is_module(x)'] = "isinstance",
  ["x.name ~= nil"] = "hasattr",
  ["x[name]"] = "getattr",
  ["x[name] = value"] = "setattr",
  ["call it by its class: Base.forward(self, x)"] = "super",
  ['("%d of %d"):format(i, n) makes a text'] = "printf sprintf format",
  ['a text with values in it is ("loss %g"):format(loss)'] = "f",
  ["print(...)"] = "console",
  ["io.open(path)"] = "open",
  ["os.exit(code)"] = "exit quit",
  ['begin with local m = require "mlua"'] = "import include from m mlua",
  ['mlua\'s functions are in one table: local m = require "mlua"'] = "torch nn F np numpy jax jnp tf",
  ["optimizers are m.adamw{...}, m.sgd{...}, m.lion{...}, m.muon{...}"] = "optim",
  ["local cfg = m.config { steps = 100 } declares settings"] = "cfg",
  ["local A = m.axes { batch = 8, seq = 128 } makes axes"] = "A",
  ["define the function with a colon: function Net:forward(x)"] = "self",
  ["a method's first argument is self: function Net:forward(x)"] = "this",
  ["function(x) return ... end"] = "lambda",
  ["error(message) raises, pcall(function() ... end) catches"] = "raise throw try",
  ["math.max(a, b) of numbers, m.maximum(a, b) of tensors, t:max(axis) along an axis"] = "max",
  ["math.min(a, b) of numbers, m.minimum(a, b) of tensors, t:min(axis) along an axis"] = "min",
  ["t:sum(axis)"] = "sum",
  ["os.time() in seconds, os.clock() of this process"] = "time",
  ["math.random() of a script, m.uniform(axes, key) in a tensor"] = "random",
}

-- Functions of Lua's libraries, texts and tables that other languages or versions have.
local FIELDS = by_word {
  ["math.floor(x + 0.5)"] = "round",
  ["math.log(x, 2)"] = "log2",
  ["math.log(x, 10)"] = "log10",
  ["m.tanh of tensors; of numbers (math.exp(2 * x) - 1) / (math.exp(2 * x) + 1)"] = "tanh",
  ["#t is the length of a list or text"] = "getn len length size",
  ["table.insert(list, item), or list[#list + 1] = item"] = "append push",
  ["table.move(other, 1, #other, #list + 1, list)"] = "extend",
  ['table.concat(list, ", ")'] = "join",
  ['for word in s:gmatch("%S+") do ... end'] = "split",
  ['s:match("^%s*(.-)%s*$")'] = "strip trim",
  ["s:gsub(old, new)"] = "replace",
  ["s:sub(1, #prefix) == prefix"] = "startswith",
  ["s:sub(-#suffix) == suffix"] = "endswith",
  ["for key in pairs(t) do ... end"] = "keys",
  ["for _, value in pairs(t) do ... end"] = "values",
  ["for key, value in pairs(t) do ... end"] = "items",
}

-- Names that a script never set --------------------------------------------------------------------------------------------------

-- Where a text first declares a name: lines of a `local` outside of all blocks, of an `inner` one, a parameter or a variable of a
-- loop, and where it is `assigned`; and the list of the names of all other locals.
local function survey(text, name)
  local tokens, i, blocks, found, names = core.tokens(text), 1, 0, {}, {}
  local function at(kind) return tokens[i].kind == kind end
  local function see_local(inner)
    local place = (inner or blocks > 0) and "inner" or "locally"
    if tokens[i].text == name then found[place] = found[place] or tokens[i].line else names[#names + 1] = tokens[i].text end
  end
  -- A list of names: `a <const>, b`, (a, b, ...).
  local function see_names(inner)
    while at "NAME" or at "," do
      if at "NAME" then see_local(inner) end
      if tokens[i + 1].kind == "<" then
        while not at ">" and not at "EOF" do i = i + 1 end
      end
      i = math.min(i + 1, #tokens)
    end
  end
  -- After the word `function`.
  local function see_function(is_local)
    local first = i
    if is_local and at "NAME" then see_local(false) end
    while at "." or at ":" or at "NAME" do i = i + 1 end
    if not is_local and i == first + 1 and tokens[first].text == name then found.assigned = found.assigned or tokens[first].line end
    blocks = blocks + 1
    if at "(" then i = i + 1 end
    see_names(true)
  end
  local braces, before = 0, nil
  while not at "EOF" do
    local kind, line = tokens[i].kind, tokens[i].line
    local word = kind == "NAME" and before ~= "." and before ~= ":" and tokens[i].text == name
    before = kind
    if kind == "{" then braces = braces + 1 elseif kind == "}" then braces = braces - 1 end
    if kind == "if" or kind == "do" or kind == "repeat" then blocks = blocks + 1 end
    if kind == "end" or kind == "until" then blocks = blocks - 1 end
    i = i + 1
    if kind == "function" then
      see_function(false)
    elseif kind == "local" and at "function" then
      i = i + 1
      see_function(true)
    elseif kind == "local" or kind == "for" then
      see_names(kind == "for")
    elseif word and braces == 0 and at "=" then
      found.assigned = found.assigned or line
    end
  end
  return found, names
end

local function place_help(name, found, line)
  if found.locally and found.locally > line then return ("line %d declares the local %s: move that above"):format(found.locally, name) end
  if found.inner and found.inner < line then return ("the local %s of line %d ends with its block"):format(name, found.inner) end
  if found.assigned and found.assigned > line then return ("line %d sets %s: move that above"):format(found.assigned, name) end
end

local function library_help(name)
  local library, numbers = package.loaded.mlua, math[name] ~= nil
  local tensors = library ~= nil and rawget(library, name) ~= nil
  if tensors and numbers then return ("m.%s of tensors, math.%s of numbers"):format(name, name) end
  if tensors or numbers then return ("did you mean %s.%s?"):format(tensors and "m" or "math", name) end
end

-- The nearest of a list of names, and of a table's keys. Typing errors seldom change the first letter: of names that the script
-- did not choose, only those that begin alike.
local function nearest(name, names, keys)
  local words = table.move(names, 1, #names, 1, {})
  for key in next, keys do
    local first = type(key) == "string" and key:sub(1, 1)
    if first and (first == name:sub(1, 1) or first == name:sub(2, 2)) then words[#words + 1] = key end
  end
  table.sort(words)
  return core.suggest(name, words)
end

---Help for a name that was never set; nil for one that may be asked for.
---@param name string
---@param globals table
---@param fields fun(name: string, names: string[]): string? which variables have it as a field; adds their names to the list
---@param text? string of the script that reads it
---@param line? integer
---@return string? help
function hints.undefined(name, globals, fields, text, line)
  if ABSENT[name] then return nil end
  if FOREIGN[name] then return FOREIGN[name] end
  local found, names = {}, {}
  if text then found, names = survey(text, name) end
  local help = line and (place_help(name, found, line) or fields(name, names)) or library_help(name)
  if help then return help end
  local guess = nearest(name, names, globals)
  if guess then return ("did you mean %s?"):format(guess) end
  guess = nearest(name, {}, package.loaded.mlua or {})
  return guess and ("did you mean m.%s?"):format(guess) or ('set it before; where it may be unset: rawget(_G, "%s") or false'):format(name)
end

-- Errors of plain Lua ------------------------------------------------------------------------------------------------------------

local NUMBERS = "functions of math take Lua numbers; for tensors use those of mlua: m.exp, m.sqrt, m.maximum"
local NOTES = {
  { "'format'", "got tensor", "a tensor has no value while the script runs; tostring(t) is its type" },
  { "number expected, got ", "tensor)", NUMBERS },
  { "number expected, got ", "state)", NUMBERS },
  { "on a axis value", "", "an Axis has .name and .size" },
  { "on a host value", "", "the values of a host array are read one by one: h[1] to h[#h]; tensors compute in programs" },
  {
    "attempt to index a number value (field 'integer index')", "",
    "an element of a host array has one index, in row-major order: h[(row - 1) * columns + column]",
  },
}

-- What holds of errors with this message, whatever the script is.
local function note_on(message)
  for _, note in ipairs(NOTES) do
    if message:find(note[1], 1, true) and message:find(note[2], 1, true) then return note[3] end
  end
  local module = message:match "module '([^.']*).*' not found:"
  if module then
    return core.suggest(module, { "mlua", "torch", "numpy", "jax", "tensorflow", "nn" }) and FOREIGN.mlua
      or "NAME.lua and NAME/init.lua are looked for beside the script and in this folder"
  end
  local name = message:match "a nil value %(global '([^']*)"
  if name then return ABSENT[name] or FOREIGN[name] end
  local field = message:match "call a nil value %(field '([^']*)" or message:match "call a nil value %(method '([^']*)"
  return field and FIELDS[field]
end

---Help for an error of plain Lua.
---@param message string
---@param text? string of the script
---@param line integer
---@return string? help
function hints.note(message, text, line)
  return note_on(message) or text and require "mlua.syntax".hint(text, line, message)
end

return hints
