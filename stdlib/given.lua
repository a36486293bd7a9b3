-- Inputs that a prompt gives a model beside the tokens that grow: the text that an encoder reads, an image. What depends on them and on no
-- token is computed once a prompt (core.increment_give).
local core = require "mlua.core"
local m = require "mlua"

local given = {}

---The inputs of m.train by model: their axes, the batch's first, and dtype.
---@type table<Module, table<string, table>>
given.of_model = setmetatable({}, { __mode = "k" })

---What m.train's option `generate` says of a model that reads inputs: {input =, axis =, prompt =, stop =, encode =, names =, model =}.
---@type table<Module, table>
given.declared = setmetatable({}, { __mode = "k" })

local FIELDS = { "input", "axis", "prompt", "stop", "encode", "names", "model" }

---Note how a model of m.train generates.
---@param model Module
---@param inputs? table<string, table>
---@param how? table
function given.declare(model, inputs, how)
  given.of_model[model] = inputs
  if how == nil then return end
  m.check_options("train's generate", how, FIELDS)
  if not inputs or not inputs[how.input] then
    core.fail(("m.train's generate.input is the name of one of its inputs, got %s"):format(m.shown(how.input)), { help = 'generate = { input = "source", axis = A.target, prompt = { 0 }, stop = { 1 } }' })
  end
  if type(how.prompt) ~= "table" or #how.prompt == 0 then core.fail "m.train's generate.prompt is a list of token ids, with which answers begin" end
  if type(how.axis) ~= "userdata" or core.is_tensor(how.axis) then core.fail "m.train's generate.axis is the axis of positions that grows" end
  given.declared[model] = how
end

---The axis of positions that grows, where it is given by its name: of m.train's inputs.
---@param model Module
---@param axis any
---@return any
function given.axis(model, axis)
  if type(axis) ~= "string" then return axis end
  local found
  for _, spec in pairs(given.of_model[model] or {}) do
    for _, one in ipairs(spec) do
      if one.name == axis and found and found.size ~= one.size then
        core.fail(("m.generate's axis %q has the sizes %d and %d among the inputs of m.train"):format(axis, found.size, one.size), { help = "axis = A.target names one" })
      end
      if one.name == axis then found = one end
    end
  end
  return found or core.fail(("m.generate's axis %q is of no input of m.train"):format(axis), { help = "axis = A.target" })
end

-- The axes of an input but the batch's, and its dtype.
local function spec_of(model, name, value)
  local list, first, spec = {}, 1, type(value) == "table" and value.value ~= nil and value or nil
  if not spec then
    spec, first = (given.of_model[model] or {})[name], 2
  end
  if not spec then
    core.fail(("m.generate does not know the axes of inputs.%s"):format(name), { help = ('those of m.train\'s inputs are known; inputs = { %s = { A.source, dtype = "i32", value = "a text" } } names them'):format(name) })
  end
  for i = first, #spec do list[#list + 1] = spec[i] end
  return { name = name, axes = list, dtype = spec.dtype or "f32" }
end

---What a model reads beside its tokens: {name, axes, dtype} of each, in the order of their names.
---@param model Module
---@param inputs table<string, any>
---@return table[]
function given.specs(model, inputs)
  local names, specs = {}, {}
  for name in pairs(inputs) do
    if type(name) ~= "string" then core.fail("m.generate's inputs are named, got the key " .. m.shown(name), { help = 'inputs = { source = "a text" }' }) end
    names[#names + 1] = name
  end
  table.sort(names)
  for i, name in ipairs(names) do specs[i] = spec_of(model, name, inputs[name]) end
  return specs
end

local function flatten(value, list)
  if type(value) == "number" or type(value) == "boolean" then
    list[#list + 1] = value
  else
    for i = 1, #value do flatten(value[i], list) end
  end
  return list
end

---The elements of an input, in one list: texts as tokens, what is shorter than a line of integers with 0 behind it.
---@param spec table
---@param value any
---@param encode fun(text: string): integer[]
---@return number[]
function given.elements(spec, value, encode)
  if type(value) == "table" and value.value ~= nil then value = value.value end
  if type(value) == "string" then value = encode(value) end
  if type(value) ~= "table" and type(value) ~= "userdata" then core.fail(("m.generate's inputs.%s is a text or a list, got %s"):format(spec.name, m.shown(value))) end
  local list, count = flatten(value, {}), 1
  for _, axis in ipairs(spec.axes) do count = count * axis.size end
  local fills = #spec.axes == 1 and spec.dtype == "i32"
  if #list > count or #list < count and not fills then
    core.fail(("m.generate's inputs.%s has %d elements, and its axes %d"):format(spec.name, #list, count), {
      help = fills and ("a longer %s: on the command line, or in the script"):format(spec.axes[1].name) or nil,
    })
  end
  for i = #list + 1, count do list[i] = 0 end
  return list
end

---The model's logits. A function, or that of m.train's `generate`, gets the tokens and a table of the inputs. A module's forward gets each input as its parameter of that name,
---and the tokens as the one that is left.
---@param model Module|fun(tokens: Tensor, inputs: table<string, Tensor>): Tensor
---@param tokens Tensor
---@param tensors table<string, Tensor>
---@return Tensor
function given.call(model, tokens, tensors)
  local how = given.declared[model]
  if how and how.model then return how.model(tokens, tensors) end
  if not m.is_module(model) then return model(tokens, tensors) end
  local arguments, names, used, grows = {}, core.parameters(model.forward), 0, nil
  table.remove(names, 1) -- self
  for i, name in ipairs(names) do
    arguments[i] = tensors[name]
    if tensors[name] then used = used + 1 elseif not grows then grows = i end
  end
  for _ in pairs(tensors) do used = used - 1 end
  if used ~= 0 or not grows then
    core.fail(("forward has the parameters %s: inputs names all but the tokens that grow"):format(table.concat(names, ", ")), { help = "a function calls it otherwise: m.generate(function(tokens, inputs) return model(...) end, ...)" })
  end
  arguments[grows] = tokens
  return model(table.unpack(arguments, 1, #names))
end

return given
