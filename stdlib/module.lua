-- Modules: a named tree of parameters, and forward functions that carry their path into the graph.
--
-- An instance keeps its fields in order. Names are given from the root when the tree is first used
-- (called, or asked for its parameters): "blocks.3.wq". A parameter's randomness is keyed by its
-- name, so its initial values depend on nothing else. Where two trees would share names, the later
-- one's begin with its class and number: "GPT2.blocks.3.wq".
local core = require "mlua.core"
local m = require "mlua"

local attributes = setmetatable({}, { __mode = "k" }) -- of parameters: init, decay, frozen
local is_instance = {} -- marks metatables of module instances
local is_class = {} -- likewise of their classes

local function instance_of(value)
  local meta = getmetatable(value)
  return type(value) == "table" and type(meta) == "table" and meta[is_instance] and rawget(value, is_instance) or nil
end

---A parameter: an f32 tensor that training changes; a forward function reads it in the compute
---dtype. `init` is a standard deviation, "zeros", "ones" or a function of (axes, key); by default
---normal with 0.02 for two or more axes, zeros for fewer. `decay=false` exempts it from weight
---decay (default: parameters of fewer than two axes are exempt). `frozen=true` makes one that m.train
---leaves as it is, such as the weights that an adapter is added to. `name` names a parameter that no
---module holds.
---@param spec {init: any, decay: boolean, frozen: boolean, name: string, [integer]: Axis}
---@return State
function m.param(spec)
  m.check_options("param", spec, { "init", "decay", "frozen", "name" }, "A.embed, A.ffn")
  local axes = {}
  for i, axis in ipairs(spec) do axes[i] = axis end
  local init = spec.init
  if init == nil then init = #axes >= 2 and 0.02 or "zeros" end
  if type(init) == "number" then init = m.init.normal(init) end
  if init == "zeros" then init = m.init.constant(0) end
  if init == "ones" then init = m.init.constant(1) end
  if type(init) ~= "function" then
    core.fail("a parameter's init is a number, \"zeros\", \"ones\" or a function of (axes, key)")
  end
  local p = core.state { axes = axes, dtype = "f32", kind = "parameter", name = spec.name }
  local decay = spec.decay
  if decay == nil then decay = #axes >= 2 end
  attributes[p] = { init = init, decay = decay, axes = axes, frozen = spec.frozen }
  if spec.name then m.name_parameter(p, spec.name) end
  return p
end

---A bias: a parameter that is zero at first and exempt from weight decay, unless the options of
---m.param say otherwise.
---@param spec {init: any, decay: boolean, frozen: boolean, name: string, [integer]: Axis}
---@return State
function m.bias(spec)
  m.check_options("bias", spec, { "init", "decay", "frozen", "name" }, "A.embed")
  local all = { init = "zeros", decay = false }
  for key, value in pairs(spec) do all[key] = value end
  return m.param(all)
end

---A state of a module that forward passes assign and no gradient changes, such as a running mean:
---named as parameters are, kept in checkpoints, no parameter. `init` as for m.param (default zeros). Assigned at each
---microbatch of a step (accum, pipeline stages); m.step_total is for what a step assigns once.
---@param spec {init: any, name: string, [integer]: Axis}
---@return State
function m.buffer(spec)
  m.check_options("buffer", spec, { "init", "name" }, "A.experts")
  local axes = { table.unpack(spec) }
  local init = spec.init or 0
  if type(init) ~= "function" then init = m.init.constant(init == "ones" and 1 or init == "zeros" and 0 or init) end
  local p = core.state { axes = axes, dtype = "f32", kind = "other", name = spec.name }
  attributes[p] = { init = init, decay = false, axes = axes, frozen = true }
  if spec.name then m.name_parameter(p, spec.name) end
  return p
end

---What m.param was told about a parameter: {decay=, axes=, frozen=}.
function m.attributes(p) return attributes[p] or {} end

local taken = {} -- the names that parameters have

-- Name a parameter and give it the initial values that its name determines.
function m.name_parameter(p, name)
  local a = attributes[p]
  if a.named then return end
  a.named = name
  p:set_name(name)
  taken[name] = true
  p:set_init(a.init(a.axes, core.hash(("%d parameter %s"):format(core.options().seed, name))))
end

local function join(path, key) return path == "" and tostring(key) or path .. "." .. tostring(key) end

-- Visit every module instance and parameter below `value`, in the order of assignment.
local function walk(value, path, seen, on_module, on_parameter)
  if type(value) ~= "table" then
    if attributes[value] then on_parameter(value, path) end
    return
  end
  if seen[value] then return end
  seen[value] = true
  local record = instance_of(value)
  if record then
    on_module(record, path)
    for _, key in ipairs(record.order) do walk(record.fields[key], join(path, key), seen, on_module, on_parameter) end
  elseif getmetatable(value) == nil then
    for i, item in ipairs(value) do walk(item, join(path, i), seen, on_module, on_parameter) end
    local keys = {}
    for key in pairs(value) do if type(key) == "string" then keys[#keys + 1] = key end end
    table.sort(keys)
    for _, key in ipairs(keys) do walk(value[key], join(path, key), seen, on_module, on_parameter) end
  end
end

-- The second tree of a script whose names would be those of the first is called Class2, and so on.
local function free_prefix(record)
  local paths = {}
  walk(record.instance, "", {}, function() end, function(p, path)
    if not attributes[p].named then paths[#paths + 1] = path end
  end)
  local function clashes(prefix)
    for _, path in ipairs(paths) do
      if taken[join(prefix, path)] then return true end
    end
  end
  local prefix, count = "", 1
  while clashes(prefix) do
    count = count + 1
    prefix = record.class.name .. count
  end
  return prefix
end

local function name_tree(record)
  while record.parent do record = record.parent end
  record.prefix = record.prefix or free_prefix(record)
  walk(record.instance, record.prefix, {}, function(r, path) r.path = path end, m.name_parameter)
end

local function is_above(record, other)
  while other and other ~= record do other = other.parent end
  return other ~= nil
end

-- A module that is put into a field knows its parent, also through plain tables of modules; one that
-- refers to itself or to a module above it (such as one that is still being built) stays where it is.
local function adopt(parent, value)
  local child = instance_of(value)
  if child then
    if not child.parent and not child.building and not is_above(child, parent) then child.parent = parent end
  elseif type(value) == "table" and getmetatable(value) == nil then
    for _, item in pairs(value) do adopt(parent, item) end
  end
end

local function call(instance, ...)
  local record = instance_of(instance)
  if not record.path then name_tree(record) end
  if not record.path then record.path = record.class.name end
  if type(instance.forward) ~= "function" then
    local name = record.class.name
    core.fail(("%s has no function forward"):format(name), { help = ("define function %s:forward(x)"):format(name) })
  end
  local outer, free = core.module_path(record.path), not m.context.losses
  local results = table.pack(pcall(instance.forward, instance, ...))
  core.module_path(outer)
  if free and outer == "" then core.take_updates() end -- outside of a program a call only tells types
  if not results[1] then error(results[2], 0) end
  if m.context.probe and core.is_tensor(results[2]) then m.context.probe(record.path, results[2]) end
  return table.unpack(results, 2, results.n)
end

---Call fn(...) with `name` added to the module path: that is where messages and --profile place the
---tensors that it makes.
---@param name string such as "router"
---@param fn function
---@return any ... what fn returns
function m.scope(name, fn, ...)
  local outer = core.module_path ""
  core.module_path(outer == "" and name or outer .. "." .. name)
  local results = table.pack(pcall(core.from_here, fn, ...))
  core.module_path(outer)
  if not results[1] then error(results[2], 0) end
  return table.unpack(results, 2, results.n)
end

---A class of modules. `build(self, ...)` makes the fields of an instance; define `:forward(...)` on
---the class, and call the instance to run it.
---@param name string
---@param build fun(self: table, ...)
---@return table class calling it makes an instance
function m.module(name, build)
  if type(name) ~= "string" or type(build) ~= "function" then
    core.fail(("m.module takes a name and a function, got %s and %s"):format(type(name), type(build)), {
      help = 'm.module("Block", function(self) self.w = m.param{A.embed} end)',
    })
  end
  local class = { name = name }
  local meta = { [is_instance] = true, __name = name }
  meta.__index = function(self, key)
    local record = rawget(self, is_instance)
    local value = record.fields[key]
    if value == nil then value = class[key] end
    if value == nil and type(key) == "string" then
      local known = {}
      for field in pairs(record.fields) do known[#known + 1] = tostring(field) end
      for field in pairs(class) do known[#known + 1] = field end
      local guess = core.suggest(key, known)
      if guess then core.fail(("%s has no field %q"):format(name, key), { help = "did you mean " .. guess .. "?" }) end
    end
    return value
  end
  meta.__newindex = function(self, key, value)
    local record = rawget(self, is_instance)
    if attributes[record.fields[key]] and core.is_tensor(value) and not attributes[value] then
      core.fail(("%s.%s is a parameter, and cannot become a tensor"):format(name, tostring(key)), {
        help = "call the tensor otherwise: local y = ...; a buffer of m.buffer is set by self.mean:assign(y)",
      })
    end
    if record.fields[key] == nil then record.order[#record.order + 1] = key end
    record.fields[key] = value
    adopt(record, value)
  end
  meta.__call = call
  meta.__tostring = function(self)
    local n = 0
    for _, p in ipairs(m.parameters(self)) do n = n + p:elements() end
    return ("%s with %d parameters"):format(name, n)
  end
  return setmetatable(class, {
    [is_class] = true,
    __tostring = function() return "the class " .. name end,
    __call = function(_, ...)
      local instance = {}
      rawset(instance, is_instance, { instance = instance, class = class, fields = {}, order = {}, building = true })
      setmetatable(instance, meta)
      build(instance, ...)
      rawget(instance, is_instance).building = nil
      return instance
    end,
  })
end

---A list of `count` modules, each made by class(i, ...), a class or a function that gives a module.
---@param count integer
---@param class table|fun(i: integer, ...): table
---@return table[]
function m.stack(count, class, ...)
  if not math.tointeger(count) or count < 0 then core.fail("m.stack takes a count, 0 or more, and a class, got " .. m.shown(count)) end
  if type(class) ~= "function" and type(class) ~= "table" then core.fail("m.stack takes a count and a class, got " .. m.shown(class)) end
  local list = {}
  for i = 1, count do
    list[i] = class(i, ...)
    if list[i] == nil then
      core.fail(("m.stack: layer %d is nil"):format(i), { help = "a function in the place of the class returns the layer" })
    end
  end
  return list
end

---Whether x is an instance of a module.
---@param x any
---@return boolean
function m.is_module(x) return instance_of(x) ~= nil end

---Whether x is a class of m.module.
---@param x any
---@return boolean
function m.is_class(x)
  local meta = getmetatable(x)
  return type(meta) == "table" and meta[is_class] == true
end

---The parameters of a module that training changes, in the order of the tree; their names in the second
---list.
---@param model table a module instance
---@return State[] parameters
---@return string[] names
function m.parameters(model)
  local record = instance_of(model)
  if not record then
    core.fail("m.parameters takes a module, got " .. tostring(model), { help = "calling a class makes one: local model = GPT()" })
  end
  name_tree(record)
  local list, names, seen = {}, {}, {}
  walk(model, "", {}, function() end, function(p)
    if not seen[p] and not attributes[p].frozen then
      seen[p] = true
      list[#list + 1], names[#names + 1] = p, p:name()
    end
  end)
  return list, names
end
