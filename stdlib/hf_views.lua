-- Where the elements of a parameter lie in a published model's tensors.
--
-- An entry is a list of forms, each {"name of the tensor", "its dimensions by axis"}; the first is the one that
-- exports write, all are read:
--   ["blocks.*.wq"] = { "model.layers.*.self_attn.q_proj.weight", "(heads head_dim) embed" }
-- In names, `*` is a number of the parameter's path less one (lists begin with 1 here, with 0 there), and {experts}
-- spreads an axis over as many tensors. In dimensions, 1 is one of size 1, (a b) merges axes, (a | b) joins them end to end, and the part
-- in [ ] is the parameter's: "embed ([heads head_dim] | heads head_dim | heads head_dim)" is q in a joined qkv.
local core = require "mlua.core"

local views = {}

local function wrong(spec, what) core.fail(("in the dimensions %q of an hf table: %s"):format(spec, what)) end

-- The dimensions as a list of sequences; a sequence is a list of axis names and groups, a group a list of alternatives
-- with the number of the one that is chosen.
local function parse(spec)
  local at = 1
  local function peek()
    at = spec:find("%S", at) or #spec + 1
    return spec:sub(at, at)
  end
  local function name()
    local word = spec:match("^[%w_]+", at)
    if not word then wrong(spec, ("%q is no axis"):format(spec:sub(at))) end
    at = at + #word
    return word
  end
  local item
  local function sequence(stop)
    local list = {}
    while not stop[peek()] do
      if at > #spec then wrong(spec, "a bracket is not closed") end
      list[#list + 1] = item()
    end
    return list
  end
  function item()
    local c = peek()
    if c ~= "(" then return name() end
    at = at + 1
    local group = { chosen = 1 }
    repeat
      if peek() == "[" then
        at = at + 1
        group.chosen = #group + 1
        group[#group + 1] = sequence { ["]"] = true }
        at = at + 1
      else
        group[#group + 1] = sequence { ["|"] = true, [")"] = true }
      end
      c = peek()
      if c ~= "|" and c ~= ")" then wrong(spec, "( ) holds axes, and | between parts") end
      at = at + 1
    until c == ")"
    return group
  end
  local dims = {}
  while peek() ~= "" do dims[#dims + 1] = { item() } end
  return dims
end

local parsed = {}

---The shape of a tensor of these dimensions, and where the parameter's elements lie in it: `offset`, and `stride` by
---axis. `size_of(axis)` gives sizes.
---@param spec string
---@param size_of fun(axis: string): integer
---@return integer[] shape
---@return integer offset
---@return table<string, integer> stride
function views.place(spec, size_of)
  parsed[spec] = parsed[spec] or parse(spec)
  local stride, offset, shape = {}, 0, {}
  -- from the right: `unit` is the stride of one step of the sequence; gives its length
  local function walk(sequence, unit, chosen)
    local length = 1
    for i = #sequence, 1, -1 do
      local item = sequence[i]
      if type(item) == "string" then
        if chosen and item ~= "1" then stride[item] = unit * length end
        length = item == "1" and length or length * size_of(item)
      else
        local whole = 0
        for k, part in ipairs(item) do
          if k == item.chosen and chosen then offset = offset + whole * unit * length end
          whole = whole + walk(part, unit * length, chosen and k == item.chosen)
        end
        length = length * whole
      end
    end
    return length
  end
  local unit = 1
  for i = #parsed[spec], 1, -1 do
    shape[i] = walk(parsed[spec][i], unit, true)
    unit = unit * shape[i]
  end
  return shape, offset, stride
end

-- Whether a form is for a parameter of these axes: it names each of them, and no other as the parameter's.
local function fits(form, axes)
  local spread = form.name:match "{([%w_]+)}"
  local _, _, stride = views.place(form.dims, function() return 1 end)
  local count = spread and 1 or 0
  for name in pairs(stride) do count = count + (name ~= spread and 1 or 0) end
  for _, axis in ipairs(axes) do
    if axis.name ~= spread and not stride[axis.name] then return false end
    if axis.name == spread then spread = nil end
  end
  return count == #axes
end

-- "blocks.*.wq" as a Lua pattern with a capture for each star.
local function pattern_of(path)
  return "^" .. path:gsub("[%-%.%+%[%]%(%)%$%^%%%?]", "%%%0"):gsub("%*", "(%%d+)") .. "$"
end

local function fill(name, numbers)
  local i = 0
  return (name:gsub("%*", function()
    i = i + 1
    return ("%d"):format(math.tointeger(numbers[i]) - 1)
  end))
end

---The forms of a parameter in an hf table that have its axes: a list of {name=, dims=} with the numbers of its path filled
---in; nil where no entry is for it.
---@param map table<string, table>
---@param name string
---@param axes Axis[]
---@return table[]?
function views.forms(map, name, axes)
  for path, entry in pairs(map) do
    if path:find("^[%a_][%w_%.%*]*$") and type(entry) == "table" then
      local numbers = table.pack(name:match(pattern_of(path)))
      if numbers[1] then
        local forms = {}
        local tried = {}
        for i, form in ipairs(type(entry[1]) == "table" and entry or { entry }) do
          local filled = { name = fill(form[1], numbers), dims = form[2] or "" }
          tried[i] = ("%q"):format(filled.dims)
          if fits(filled, axes) then forms[#forms + 1] = filled end
        end
        if #forms == 0 then
          local names = {}
          for i, axis in ipairs(axes) do names[i] = axis.name end
          core.fail(("the entry %q of the table hf has other axes than %s"):format(path, name), {
            help = ("%s has %s; the entry: %s"):format(name, table.concat(names, ", "), table.concat(tried, ", ")),
          })
        end
        return forms
      end
    end
  end
end

---The views of a parameter by one form: a list of {name=, shape=, offset=, stride=, start=, count=}, one for each
---tensor that it takes from.
---@param form {name: string, dims: string}
---@param axes Axis[] of the parameter
---@param sizes table<string, Axis> of axes that the parameter lacks
---@return table[]
function views.of(form, axes, sizes)
  local size = {}
  for _, axis in ipairs(axes) do size[axis.name] = axis.size end
  local function size_of(name)
    local n = size[name] or sizes and rawget(sizes, name) and sizes[name].size
    if not n then wrong(form.dims, ("the axis %q has no size: hf.axes = A gives it"):format(name)) end
    return n
  end
  local shape, offset, stride = views.place(form.dims, size_of)
  local spread = form.name:match "{([%w_]+)}"
  local list = {}
  for e = 0, spread and size_of(spread) - 1 or 0 do
    local view = { name = form.name:gsub("{[%w_]+}", e), shape = shape, offset = offset, stride = {}, start = {}, count = {} }
    for i, axis in ipairs(axes) do
      local fixed = axis.name == spread
      if not fixed and not stride[axis.name] then wrong(form.dims, ("they lack the parameter's axis %q"):format(axis.name)) end
      view.stride[i], view.start[i], view.count[i] = fixed and 0 or stride[axis.name], fixed and e or 0, fixed and 1 or axis.size
    end
    list[#list + 1] = view
  end
  return list
end

return views
