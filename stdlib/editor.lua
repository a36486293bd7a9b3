-- Definitions for editors (LuaCATS), made of what the program is made of: the rows that bindings register, the table m, and
-- the comments above its functions in stdlib/.
local core = require "mlua.core"
local m = require "mlua"
local documentation = require "mlua.documentation"

local out = {}
local function add(...) table.move({ ... }, 1, select("#", ...), #out + 1, out) end

-- A row of C, "axis: Axis|string, start?: integer -> Tensor", as the function NAME of `owner`.
local function add_row(owner, separator, name, signature, text)
  local given, result = signature:match "^(.-)%-> (.*)$"
  local names = {}
  add("---", text, "\n")
  for _, parameter in ipairs(documentation.split(given or signature)) do
    local key, kind = parameter:match "^(.-): ?(.*)$"
    if not key then break end
    add("---@param ", key, " ", kind, "\n")
    names[#names + 1] = key:gsub("%?$", "")
  end
  for _, kind in ipairs(result and documentation.split(result) or {}) do add("---@return ", kind, "\n") end
  add("function ", owner, separator, name, "(", table.concat(names, ", "), ") end\n\n")
end

-- The comment without its first `skip` parameters; the names of the others.
local function add_comment(comment, skip)
  local names = {}
  for _, line in ipairs(comment) do
    local name = line:match "^ *%-%-%-@param ([^ ?]*)"
    if name and skip > 0 then
      skip = skip - 1
    else
      add(line:match "^ *(.*)$", "\n")
      names[#names + 1] = name
    end
  end
  return table.concat(names, ", ")
end

-- The function of stdlib/ that m has at `path`; as a method it has its first parameter in front.
local function add_function(owner, separator, name, path)
  local known = documentation.of(path)
  if not known or #known.comment == 0 then return end
  local names = add_comment(known.comment, separator == ":" and 1 or 0)
  if separator == "." then names = known.parameters or names end
  add("function ", owner, separator, name, "(", names, ") end\n\n")
end

local function add_class(class, title, base, fields)
  add("---@class ", title, base and ": " .. base or "", "\n", fields, "local ", title, " = {}\n\n")
  for name, method in pairs(core.class_methods(class)) do
    local signature, text = core.documentation(method)
    if signature then add_row(title, ":", name, signature, text) end
  end
end

-- What the comments of stdlib/ declare.
local function add_classes()
  for _, lines in ipairs(documentation.files) do
    local at = 1
    while lines[at] do
      local first, declares = at, nil
      while lines[at] and lines[at]:find "^%-%-%-" do
        if declares == nil and lines[at]:find "^%-%-%-@class " then declares = lines[at] ~= "---@class mlua" end
        at = at + 1
      end
      if declares then add(table.concat(lines, "\n", first, at - 1), "\n\n") end
      at = at + 1
    end
  end
end

-- What scripts see: the functions of m, and its tables.
local function add_library()
  add "---@class mlua\nlocal m = {}\n\n"
  for name, value in pairs(m) do
    local signature, text = core.documentation(value)
    local known = documentation.of(name)
    if signature then
      add_row("m", ".", name, signature, text)
    elseif type(value) == "function" then
      add_function("m", ".", name, name)
    elseif type(value) == "table" and known and #known.comment > 0 then
      add_comment(known.comment, 0)
      add("m.", name, " = {}\n\n")
      for key in pairs(value) do add_function("m." .. name, ".", key, name .. "." .. key) end
    end
  end
  add "return m\n"
end

add "---@meta mlua\n-- Written by `mlua editor` from the program's own tables: do not edit.\n\n"
add "---@class Axis\n---@field name string\n---@field size integer\n\n"
add [[
---A dtype and named axes. It has no value while the script runs.
---
---Elementwise operands match by the names of their axes: one has all axes of the others.
---
---Dtypes: floats of several (bf16, f32, f64) are promoted to the widest. Integers, bools and floats do not mix:
---t:cast(dtype) converts. A Lua number takes the dtype of the tensor beside it (an integer tensor takes integers
---alone); where all operands are numbers it is i32 or i64 if they are integers, else f32. Forward functions read
---parameters in the compute dtype (m.compute_dtype); p:read() gives the stored f32. Sums and products accumulate
---in f32 or wider.
]]
add "---@class Tensor\n"
for _, name in ipairs { "add", "sub", "mul", "div", "idiv", "mod", "pow" } do add("---@operator ", name, "(Tensor|number): Tensor\n") end
add "---@operator unm: Tensor\nlocal Tensor = {}\n\n"
for name, method in pairs(core.tensor_methods) do
  local signature, text = core.documentation(method)
  if signature then
    if signature:find "^a: Tensor" then signature = signature:match "^[^,]*, (.*)$" or signature:match "%->.*$" end -- an elementwise op
    add_row("Tensor", ":", name, signature, text)
  else
    add_function("Tensor", ":", name, name)
  end
end
add_class("state", "State", "Tensor", "")
add_class("host", "Host", nil, "---@field [integer] number\n")
add_class("program", "Program", nil, "---@overload fun(inputs: table): table<string, number|Host>\n")
add_class("corpus", "Corpus", nil, "")
add_class("random", "Random", nil, "")
add_classes()
add_library()

---The definitions, into a file or to standard output.
---@param path? string
return function(path)
  local file, problem = io.stdout, nil
  if path then file, problem = io.open(path, "w") end
  if not file or not file:write(table.concat(out)) or not file:flush() then
    core.fail("cannot write " .. (problem or path or "the definitions"))
  end
end
