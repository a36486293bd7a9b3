-- Low-rank adapters (Hu et al. 2022): a frozen weight w is read as w + scale * a b, where a and b are narrow and alone learn.
--
-- Products and lookups read a weight so: x:dot(w, ...) becomes x:dot(w, ...) + scale * x:dot(a, ...):dot(b, "rank"), which
-- costs little beside x:dot(w, ...) and makes no gradient of w's size. Both methods are wrapped when the first adapter is made.
local core = require "mlua.core"
local m = require "mlua"
local methods = core.tensor_methods

local adapters = setmetatable({}, { __mode = "k" }) -- by weight: {a =, b =, scale =, dropout =, first = the axes of a}
local wrapped = false
local of_model = setmetatable({}, { __mode = "k" }) -- by model: found = {{holder =, key =, weight =}...}, trained before, options

local function name_of(axis) return type(axis) == "userdata" and not core.is_tensor(axis) and axis.name or axis end

-- What x reads beside the weight, where it is contracted over these axes: over those of a first, as far as a has them.
local function beside(dot, adapter, x, ...)
  local of_a, of_b, options = {}, { "rank" }, nil
  for _, axis in ipairs { ... } do
    local name = name_of(axis)
    if type(name) == "table" then options = axis elseif adapter.first[name] then of_a[#of_a + 1] = name else of_b[#of_b + 1] = name end
  end
  x = m.dropout(x, adapter.dropout)
  local narrow, back, last = adapter.a, adapter.b, of_b
  if #of_a == 0 then -- such as logits by a table of embeddings
    table.remove(of_b, 1)
    narrow, back, of_a, last = adapter.b, adapter.a, of_b, { "rank" }
  end
  of_a[#of_a + 1], last[#last + 1] = options, options
  return dot(dot(x, narrow, table.unpack(of_a)) * adapter.scale, back, table.unpack(last))
end

local function wrap()
  local dot, gather = methods.dot, methods.gather
  function methods.dot(x, y, ...)
    local result = dot(x, y, ...)
    local left, right = adapters[x], adapters[y]
    if right then result = result + beside(dot, right, x, ...) end
    if left then result = result + beside(dot, left, y, ...) end
    if left and right then result = result + beside(dot, right, left.a:dot(left.b, "rank") * left.scale, ...) end
    return result
  end
  function methods.gather(x, index, axis)
    local result, adapter = gather(x, index, axis), adapters[x]
    if not adapter then return result end
    local in_a = adapter.first[name_of(axis)]
    local rows = gather(in_a and adapter.a or adapter.b, index, axis) * adapter.scale
    return result + dot(rows, in_a and adapter.b or adapter.a, "rank")
  end
end

-- Visit the parameters of a model with what holds them: a module or a plain table, and the key there.
local function each_parameter(value, seen, visit)
  if type(value) ~= "table" or seen[value] or m.is_class(value) then return end
  if not m.is_module(value) and getmetatable(value) ~= nil then return end
  seen[value] = true
  local fields = {}
  for key, field in pairs(value) do fields[#fields + 1] = { key, field } end
  for _, field in ipairs(fields) do
    if m.attributes(field[2]).axes and field[2]:kind() == "parameter" then visit(value, field[1], field[2]) end
    each_parameter(field[2], seen, visit)
  end
end

local HEADS = { heads = true, kv_heads = true, head_dim = true }

-- A parameter lists first what its product reads: one axis, or heads with their dimension.
local function split_axes(name, axes)
  local first = {}
  for i, axis in ipairs(axes) do
    if axis.name == "experts" then
      core.fail(("m.lora: %s holds the weights of experts, which adapters cannot be added to"):format(name), { help = "match = {...} names others" })
    end
    if i == 1 or HEADS[axes[1].name] and HEADS[axis.name] and #first < #axes - 1 then first[i] = axis end
  end
  return first, table.move(axes, #first + 1, #axes, 1, {})
end

local function adapter(name, axes, o)
  if #axes < 2 then
    core.fail(("m.lora: %s has one axis, and an adapter is for weights of two or more"):format(name), { help = "m.freeze(parameter, false) trains it itself" })
  end
  local first, last = split_axes(name, axes)
  local rank, fan_in, of_a = core.axis("rank", o.rank), 1, {}
  for _, axis in ipairs(first) do fan_in, of_a[axis.name] = fan_in * axis.size, true end
  local a, b = table.move(first, 1, #first, 1, { init = m.init.uniform(fan_in ^ -0.5) }), table.move(last, 1, #last, 2, { rank, init = "zeros" })
  a[#a + 1] = rank
  a, b = m.param(a), m.param(b)
  m.attributes(a).adapts, m.attributes(b).adapts = true, true
  return { a = a, b = b, scale = o.alpha / o.rank, dropout = o.dropout, first = of_a }
end

-- Which of the patterns a name meets: by its last part, or as a whole by a Lua pattern.
local function matching(name, match)
  local last = name:match "[^.]*$"
  for _, pattern in ipairs(match) do
    if last == pattern or name:match("^" .. pattern .. "$") then return pattern end
  end
end

local function complete(options)
  m.check_options("lora", options, { "rank", "alpha", "match", "dropout" })
  local o = {}
  for key, value in pairs(options or {}) do o[key] = value end
  o.rank, o.match, o.dropout = o.rank or 8, o.match or { "wq", "wv" }, o.dropout or 0
  o.alpha = o.alpha or 2 * o.rank
  if type(o.match) == "string" then o.match = { o.match } end
  if not math.tointeger(o.rank) or o.rank < 1 then core.fail("m.lora's rank must be a positive integer, got " .. m.shown(o.rank)) end
  if type(o.alpha) ~= "number" or not (o.alpha > 0) then core.fail("m.lora's alpha must be a number above 0, got " .. m.shown(o.alpha)) end
  if type(o.match) ~= "table" or #o.match == 0 then
    core.fail("m.lora's match lists parameters, got " .. m.shown(o.match), { help = 'match = {"wq", "wv"}, or patterns of whole names: "blocks%.%d+%.up"' })
  end
  return o
end

---Add low-rank adapters (Hu et al. 2022) to the weights of a model and freeze all else: where `match` meets a
---parameter w, products and lookups read w + alpha/rank * a b. a begins with small numbers, b with zeros, so that the model
---computes what it did; they are called NAME_lora.a and NAME_lora.b, and are trained, sharded and saved as any parameter.
---`match` (default {"wq", "wv"}) lists last parts of names, or Lua patterns of whole ones; `rank` is 8, `alpha` twice the rank,
---`dropout` of what adapters read 0 unless given. m.merge_lora(model) adds them to the weights; m.freeze(model.head, false)
---trains a part as a whole.
---@param model Module
---@param options? {rank: integer, alpha: number, match: string|string[], dropout: number}
---@return Module model
function m.lora(model, options)
  if not m.is_module(model) then core.fail("m.lora takes a module, got " .. m.shown(model), { help = "m.lora(model, {rank = 8})" }) end
  if of_model[model] then core.fail("the model has adapters already", { help = "m.merge_lora(model) adds them to its weights, and others may follow" }) end
  local o, met, lasts, found = complete(options), {}, {}, {}
  local trained = m.parameters(model) -- which names them
  each_parameter(model, {}, function(holder, key, weight)
    local name = weight:name()
    local pattern = matching(name, o.match)
    lasts[#lasts + 1] = name:match "[^.]*$"
    if pattern and not adapters[weight] then
      met[pattern] = true
      found[#found + 1] = { holder = holder, key = key, weight = weight }
    end
  end)
  for _, pattern in ipairs(o.match) do
    if not met[pattern] then
      local guess = core.suggest(pattern, lasts)
      core.fail(("m.lora: no parameter is called %s"):format(m.shown(pattern)), {
        help = guess and ("did you mean %s?"):format(guess) or "names end as these do: " .. table.concat(lasts, ", ", 1, math.min(#lasts, 12)),
      })
    end
  end
  for _, f in ipairs(found) do f.adapter = adapter(f.weight:name(), m.attributes(f.weight).axes, o) end
  m.freeze(model)
  if not wrapped then wrap() end
  wrapped = true
  for _, f in ipairs(found) do
    adapters[f.weight] = f.adapter
    f.holder[f.key .. "_lora"] = { a = f.adapter.a, b = f.adapter.b }
  end
  of_model[model] = { found = found, trained = trained, options = o }
  m.parameters(model) -- names the adapters
  return model
end

---Add a model's adapters to its weights, remove them, and have training change what it changed before m.lora. It
---computes what it did, also in programs that were made before.
---@param model Module
---@return Module model
function m.merge_lora(model)
  local own = of_model[model]
  if not own then core.fail("m.merge_lora takes a module that m.lora was given, got " .. m.shown(model)) end
  m.compile(function()
    for _, f in ipairs(own.found) do
      local made = adapters[f.weight]
      f.weight:assign(f.weight:read() + made.a:read():dot(made.b:read(), "rank", { dtype = "f32" }) * made.scale)
      made.b:assign(m.zeros(m.axes_of(made.b)))
    end
  end, {}, { name = "merge" }) {}
  for _, f in ipairs(own.found) do
    adapters[f.weight] = nil
    f.holder[f.key .. "_lora"] = nil
  end
  for _, p in ipairs(own.trained) do m.freeze(p, false) end
  of_model[model] = nil
  return model
end

---A model's adapters: {rank, alpha, dropout, adapters = {[weight] = {a =, b =}}}; nil without any.
---@param model Module
---@return table?
local function of(model)
  local own = of_model[model]
  if not own then return nil end
  local by_weight = {}
  for _, f in ipairs(own.found) do by_weight[f.weight] = adapters[f.weight] end
  return { rank = own.options.rank, alpha = own.options.alpha, dropout = own.options.dropout, adapters = by_weight }
end

return { of = of, split_axes = split_axes }
