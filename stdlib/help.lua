-- help(m.gelu), and a bare m.gelu, at the prompt: signature and text of a function, from the rows that bindings register and
-- from the comments above the functions of stdlib/ and of the script; of other values, what they have.
local core = require "mlua.core"
local m = require "mlua"
local documentation = require "mlua.documentation"
local prompt = require "mlua.prompt"

local WIDTH = 96
local PROMPT = [[
EXPRESSION         types, bytes and lines of tensors; other values as they are
= EXPRESSION       the numbers, too: small tensors are computed here, with initial parameters
m.gelu             signature and text of a function; help(m.gelu), help "gelu" and help(x) too
:check EXPRESSION  work, memory and kernels of what computes it; without one, the last value or
                   the script's programs, as mlua check has them
:mem EXPRESSION    its memory
:shard EXPRESSION  its tensors' placement under the layout, and what ranks send
_                  the last value; [3] in errors and origins is the third input
local x = 1        stays: locals of the prompt are globals
m is the library, help(m) lists its functions. Tab completes, ^R searches the history, ^D ends.]]

-- Functions of the prompt, in C: print, source, global (vm/repl/repl_help.c).
local functions

local function write(format, ...) io.write(format:format(...)) end

local function write_wrapped(text)
  local line = " "
  for word in text:gmatch "[^ ]+" do
    if #line > 1 and #line + 1 + #word > WIDTH then
      write("%s\n", line)
      line = " "
    end
    line = line .. " " .. word
  end
  write("%s\n", line)
end

-- "---@param x Tensor" as "x Tensor".
local TAGS = { ["@param "] = "", ["@return "] = "gives ", ["@field "] = "." }
local function write_comment(comment)
  for _, line in ipairs(comment) do
    line = line:match "^[ %-]*(.-)\r?$"
    local tag = line:match "^@%l+ "
    if TAGS[tag] then
      write("    %s%s\n", TAGS[tag], line:sub(#tag + 1))
    elseif line:find "^[^@]" then
      write("  %s\n", line)
    end
  end
end

-- "Block:forward(x)" of "function Block:forward(x)".
local function head_of(line)
  line = line:match "^%s*(.-%))" or line:match "^%s*(.-)\r?$"
  return (line:gsub("^local ", ""):gsub("^function ", ""))
end

local function key_of(t, value)
  for key, other in pairs(t) do
    if rawequal(other, value) and type(key) == "string" then return key end
  end
end

-- The comment of a value of the library.
local function write_library_text(value)
  local name = key_of(m, value)
  local known = name and documentation.of(name)
  if not known or #known.comment == 0 then return false end
  if known.head:find "^function" then
    write("%s\n", head_of(known.head))
  else
    local names = {}
    for _, line in ipairs(known.comment) do names[#names + 1] = line:match "^%-%-%-@param ([^ ?]*)" end
    write("m.%s%s\n", name, type(value) == "function" and "(" .. table.concat(names, ", ") .. ")" or "")
  end
  write_comment(known.comment)
  return true
end

local function write_function(value)
  local signature, text, name = core.documentation(value)
  if signature then
    local given, result = signature:match "^(.-) *(%-> .*)$"
    local key, method = key_of(m, value), key_of(core.tensor_methods, value)
    write("%s(%s)%s\n", key and "m." .. key or method and "x:" .. method or name, given or signature, result and " " .. result or "")
    return write_wrapped(text)
  end
  if write_library_text(value) then return end
  local source, at, file = functions.source(value)
  if not source then return write "a function of Lua: see the manual of Lua 5.4\n" end
  local lines = {}
  for line in (source .. "\n"):gmatch "([^\n]*)\n" do lines[#lines + 1] = line end
  write("%s%s\n", head_of(lines[at]), file and ("  from %s:%d"):format(file, at) or "")
  local comment = documentation.above(lines, at, "--")
  if not (comment[1] or ""):find "^%s*%-%-%[" then write_comment(comment) end
end

local function write_names(title, set)
  local names = {}
  for name in pairs(set) do names[#names + 1] = type(name) == "string" and name or nil end
  write("%s", title)
  write_wrapped(table.concat(names, " "))
end

local function write_members(title, t)
  local set = {}
  for name, value in pairs(t) do set[name] = (type(value) == "function" or type(value) == "table") or nil end
  write_names(title, set)
end

local function write_class(value, what)
  functions.print(value)
  write("%s\n", what)
  write_names("methods\n", prompt.methods(value))
end

local help = {}

---Signature and text of a function, what else there is to know of another value.
---@param value any
function help.describe(value)
  if type(value) == "function" then
    write_function(value)
  elseif getmetatable(value) == "state" then
    write_class(value, "a state: what lives across steps; used as a tensor it is its value")
  elseif core.is_tensor(value) then
    write_class(value, "a tensor; help(x.sum) describes a method")
  elseif type(value) == "userdata" then
    write_class(value, "help(x.name) describes a method")
  elseif type(value) ~= "table" then
    functions.print(value)
  elseif m.is_module(value) or m.is_class(value) then
    write("%s\n", tostring(value))
    local ok, forward = pcall(function() return value.forward end)
    if ok and type(forward) == "function" then write_function(forward) end
    write_names("fields\n", prompt.fields(value))
  elseif write_library_text(value) then
    write_members("functions\n", value)
  elseif rawequal(value, m) then
    write_members("mlua; help(m.gelu) describes one\n", value)
  else
    functions.print(value)
  end
end

-- What a text names: "gelu", "m.gelu", "x:sum", "math.floor".
local function named(text)
  local name, list = text:match "[.:](.*)$" or text, {}
  for _, t in ipairs { m, core.tensor_methods } do
    if rawget(t, name) ~= nil then return t[name] end
    for key in pairs(t) do list[#list + 1] = key end
  end
  local value = functions.global(text)
  if value ~= nil then return value end
  local guess = core.suggest(name, list)
  core.fail(('there is no help on "%s"'):format(text), { help = guess and ("did you mean %s?"):format(guess) or "help(m) lists the functions" })
end

---The same of each value, of what texts name; of the prompt without any.
function help.explain(...)
  if select("#", ...) == 0 then write("%s\n", PROMPT) end
  for i = 1, select("#", ...) do
    local value = select(i, ...)
    if type(value) == "string" then value = named(value) end
    help.describe(value)
  end
end

---What `help` is at the prompt: prints itself, or describes its arguments.
function help.start(given)
  functions = given
  return setmetatable({}, { __call = function(_, ...) help.explain(...) end, __tostring = function() return PROMPT end })
end

return help
