-- Modules: a named tree of parameters, and forward functions that carry their path into the graph.
--
-- An instance orders its fields. Names are assigned from the root when the tree is first used
-- (called, or asked for its parameters): "blocks.3.wq". A parameter's randomness is keyed by its
-- name, so its initial values depend on nothing else. Where two trees would share names, the later
-- one's begin with its class and number: "GPT2.blocks.3.wq".
local core = require "mlua.core"
local m = require "mlua"
local synonyms = require "mlua.synonyms"
local universal = require "mlua.universal"

local attributes = setmetatable({}, { __mode = "k" }) -- of parameters: the results of m.attributes
local makers = setmetatable({}, { __mode = "k" }) -- the record of the module whose forward function created a parameter or buffer
local holders = setmetatable({}, { __mode = "k" }) -- the record of the tree of modules that has named a parameter
local records = setmetatable({}, { __mode = "k" }) -- of module instances, which are empty tables themselves
local is_class = {} -- marks metatables of classes
local running -- the record of the innermost module whose forward runs

-- Record the forward function that creates p now, if one does.
local function created_by_forward(p)
  makers[p] = running
  if running and m.context.made then m.context.made[#m.context.made + 1] = p end
end

local function instance_of(value) return type(value) == "table" and records[value] or nil end

-- Training adds small updates to f32 weights. Where nothing trains, matrices are stored in the dtype that products read.
local function stored_dtype(spec, decay)
  local task = core.options().task
  return (task == "generate" or task == "serve") and decay and not spec.f32 and core.compute_dtype() or "f32"
end

local PARAM_OPTIONS, BIAS_OPTIONS = { "init", "decay", "frozen", "f32", "fp8", "name" }, { "init", "decay", "frozen", "name" }

---A parameter: an f32 tensor that training changes; a forward function reads it in the compute
---dtype. `init` is a standard deviation, "zeros", "ones" or a function of (axes, key); by default
---normal with 0.02 for two or more axes, zeros for fewer. `decay=false` exempts it from weight
---decay (default: parameters of fewer than two axes are exempt). `frozen=true` creates one that m.train
---leaves as it is, such as the weights that an adapter is added to. `mlua generate` stores a parameter with weight decay in the
---compute dtype, unless `f32=true` says that forward reads it in f32 (p:read()). `fp8=false` keeps its products in bf16 with
---`--dtype fp8`. `name` names a parameter that no module holds.
---@param spec {init: any, decay: boolean, frozen: boolean, f32: boolean, fp8: boolean, name: string, [integer]: Axis}
---@return State
function m.param(spec)
  m.check_options("param", spec, PARAM_OPTIONS, "A.embed, A.ffn")
  local axes = {}
  for i, axis in ipairs(spec) do axes[i] = axis end
  local init = spec.init
  if init == nil then init = #axes >= 2 and 0.02 or "zeros" end
  if type(init) == "number" then init = m.init.normal(init) end
  if init == "zeros" then init = m.init.constant(0) end
  if init == "ones" then init = m.init.constant(1) end
  if type(init) ~= "function" then
    core.fail("a parameter's init is a number, \"zeros\", \"ones\" or a function of (axes, key), got " .. m.shown(init), {
      help = "0.02 is a standard deviation; m.init.normal(std) and m.init.uniform(bound) are functions",
    })
  end
  local decay = spec.decay
  if decay == nil then decay = #axes >= 2 end
  local p = core.state { axes = axes, dtype = stored_dtype(spec, decay), kind = "parameter", name = spec.name }
  if spec.fp8 == false then p:keep_wide() end
  attributes[p] = { init = init, decay = decay, axes = axes, frozen = spec.frozen }
  created_by_forward(p)
  if spec.name then m.name_parameter(p, spec.name) end
  return p
end

---A bias: a parameter that is zero at first and exempt from weight decay, unless the options of
---m.param say otherwise.
---@param spec {init: any, decay: boolean, frozen: boolean, name: string, [integer]: Axis}
---@return State
function m.bias(spec)
  m.check_options("bias", spec, BIAS_OPTIONS, "A.embed")
  local all = { init = "zeros", decay = false }
  for key, value in pairs(spec) do all[key] = value end
  return m.param(all)
end

---A state of a module that forward passes assign and no gradient changes, such as a running mean:
---named as parameters are, saved in checkpoints, not a parameter. `init` as for m.param (default zeros). Assigned at each
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
  created_by_forward(p)
  if spec.name then m.name_parameter(p, spec.name) end
  return p
end

---What is known of a parameter beside its value.
---@class ParameterAttributes
---@field axes Axis[]
---@field init fun(axes: Axis[], key: integer): Tensor
---@field decay boolean whether weight decay applies
---@field named? string the name, once it has one
---@field frozen? boolean
---@field adapts? boolean one of m.lora's

---What is known of a parameter beside its value; an empty table for other states.
---@param p State
---@return ParameterAttributes
function m.attributes(p) return attributes[p] or {} end

local taken = {} -- the names that parameters have

-- Whether the setting fp8_except has a pattern for this name: "*.wo,blocks.0.*".
local function excepted_from_fp8(name)
  for pattern in (universal.value "fp8_except" or ""):gmatch "[^,]+" do
    if name:find("^" .. pattern:gsub("[%^%$%(%)%%%.%[%]%+%-]", "%%%0"):gsub("%*", ".*"):gsub("%?", ".") .. "$") then return true end
  end
  return false
end

---Name a parameter and assign the initial values that its name determines, if it has none yet.
---@param p State
---@param name string
function m.name_parameter(p, name)
  local a = attributes[p]
  if a.named then return end
  a.named = name
  p:set_name(name)
  if excepted_from_fp8(name) then p:keep_wide() end
  taken[name] = true
  local exact = core.exact(true) -- the same initial values on every device
  local ok, value = pcall(a.init, a.axes, core.hash(("%d parameter %s"):format(core.options().seed, name)))
  core.exact(exact)
  if not ok then error(value, 0) end
  p:set_init(value)
end

-- A class where an instance is meant, in a field or a list: `where` says which place of the tree that is.
local function refuse_class(value, where)
  if not m.is_class(value) then return end
  local class = value.name
  core.fail(("%s is the class %s, and an instance is meant"):format(where, class), { help = ("calling the class makes one: %s()"):format(class) })
end

local function join(path, key)
  if key == nil then return path end
  return path == "" and tostring(key) or path .. "." .. key
end

-- Visit every module instance and parameter below `value`, in the order of assignment: on_module(record, path),
-- on_parameter(p, path, key) with the path of what holds p. Without `path` (nil) none is made, and no class refused: large trees are walked often.
local function walk(value, path, key, seen, on_module, on_parameter)
  if type(value) ~= "table" then
    if attributes[value] then on_parameter(value, path, key) end
    return
  end
  if seen[value] then return end
  seen[value] = true
  local own = path and join(path, key)
  local record = instance_of(value)
  if record then
    if on_module then on_module(record, own) end
    local fields = record.fields
    for _, name in ipairs(record.order) do walk(fields[name], own, name, seen, on_module, on_parameter) end
  elseif getmetatable(value) == nil then
    for i, item in ipairs(value) do
      if own then refuse_class(item, join(own, i)) end
      walk(item, own, i, seen, on_module, on_parameter)
    end
    for name, item in pairs(value) do
      if type(name) == "string" then walk(item, own, name, seen, on_module, on_parameter) end
    end
  end
end

-- The second tree of a script whose names would be those of the first is called Class2, and so on. `list` has {p, path} of what is to be named.
local function free_prefix(record, list)
  local function clashes(prefix)
    for _, item in ipairs(list) do
      if taken[join(prefix, item[2])] then return true end
    end
  end
  local prefix, count = record.prefix or "", 1 -- a parameter created late takes the prefix of the others, where it can
  while clashes(prefix) do
    count = count + 1
    prefix = record.class.name .. count
  end
  return prefix
end

local function root_of(record)
  while record.parent do record = record.parent end
  return record
end

-- All states of the tree of modules to which `record` belongs, in its order, some of them twice; those that have no name yet get
-- theirs. Large trees are asked often: one whose modules have paths and whose states names is walked once.
local function name_tree(record)
  record = root_of(record)
  local states, named = {}, true
  walk(record.instance, nil, nil, {}, function(r)
    named = named and r.path and not r.moved and (r == record or r.parent or not r.forward)
  end, function(p)
    states[#states + 1] = p
    named = named and attributes[p].named and holders[p] == record
  end)
  if named then return states end
  local modules, unnamed = {}, {} -- with paths from the root
  walk(record.instance, "", nil, {}, function(r, path) modules[#modules + 1] = { r, path } end, function(p, path, key)
    holders[p] = record
    if not attributes[p].named then unnamed[#unnamed + 1] = { p, join(path, key) } end
  end)
  record.prefix = free_prefix(record, unnamed)
  for _, item in ipairs(modules) do
    local r, path = item[1], item[2]
    r.path, r.moved = path == "" and record.prefix or join(record.prefix, path), nil
    if r ~= record and r.forward and not r.parent then r.parent = record end -- created late and put into a list
  end
  for _, item in ipairs(unnamed) do
    if not attributes[item[1]].named then m.name_parameter(item[1], join(record.prefix, item[2])) end
  end
  return states
end

-- The states of a module, in the order of the tree, each once, all named.
local function states_of(model)
  local record = instance_of(model)
  local all = name_tree(record)
  if record.parent then
    all = {}
    walk(model, nil, nil, {}, nil, function(p) all[#all + 1] = p end)
  end
  local list, seen = {}, {}
  for _, p in ipairs(all) do
    if not seen[p] then list[#list + 1] = p end
    seen[p] = true
  end
  return list
end

local function is_above(record, other)
  while other and other ~= record do other = other.parent end
  return other ~= nil
end

-- A module that is put into a field knows its parent, also through plain tables of modules; one that
-- refers to itself or to a module above it (such as one that is still being built) stays where it is.
local function adopt(parent, value, where)
  local child = instance_of(value)
  if child then
    child.moved = true -- its path is another now
    if not child.parent and not child.building and not is_above(child, parent) then child.parent = parent end
  elseif type(value) == "table" and getmetatable(value) == nil then
    for key, item in pairs(value) do
      if math.type(key) then refuse_class(item, join(where, key)) end
      adopt(parent, item, join(where, key))
    end
  end
end

-- "Block (blocks.3)": a module in messages.
local function title(record)
  local class, path = record.class.name, record.path
  return path == "" and class or ("%s (%s)"):format(class, path)
end

-- Run the forward function of a module, with its path in the origins of its tensors, and states assignable.
local function run_forward(record, ...)
  local path, outer, traced = core.module_path(record.path), running, core.tracing(true)
  running = record
  local results = table.pack(pcall(record.instance.forward, record.instance, ...))
  running = outer
  core.module_path(path)
  core.tracing(traced)
  if not traced then core.take_updates() end -- outside of a program a call only infers types
  return results
end

-- Whether a forward function has just created this parameter or module: it has no name yet, and no owner.
local function is_fresh(value)
  local record, a = instance_of(value), attributes[value]
  if record then return record.forward ~= nil and record.parent == nil end
  return a ~= nil and makers[value] ~= nil and a.named == nil
end

local function call(instance, ...)
  local record = instance_of(instance)
  if not record.path and record.forward then name_tree(record.forward) end -- whose fields or lists may hold it by now
  if not record.path then name_tree(record) end
  if not record.path then record.path = record.class.name end
  if type(instance.forward) ~= "function" then
    local name = record.class.name
    core.fail(("%s has no function forward"):format(name), { help = ("define function %s:forward(x)"):format(name) })
  end
  local results = run_forward(record, ...)
  if not results[1] then error(results[2], 0) end
  if results[2] == nil then
    core.fail(("the function forward of %s returns nothing"):format(title(record)), { at = instance.forward, help = "end it with return x" })
  end
  if m.context.probe and core.is_tensor(results[2]) then m.context.probe(record.path, results[2]) end
  return table.unpack(results, 2, results.n)
end

---Call fn(...) with `name` added to the module path: that is where messages and --profile place the
---tensors that it creates.
---@param name string such as "router"
---@param fn function
---@param ... any what fn is given
---@return any ... what fn returns
function m.scope(name, fn, ...)
  if type(name) ~= "string" or type(fn) ~= "function" then
    core.fail(("m.scope takes a name and a function, got %s and %s"):format(m.shown(name), m.shown(fn)), { help = 'm.scope("router", function() ... end)' })
  end
  local outer = core.module_path ""
  core.module_path(outer == "" and name or outer .. "." .. name)
  local results = table.pack(pcall(core.from_here, fn, ...))
  core.module_path(outer)
  if not results[1] then error(results[2], 0) end
  return table.unpack(results, 2, results.n)
end

---An instance of a class of m.module. Calling it runs its function forward. Its fields are those that `build` and
---forward functions set; pairs visits them in the order in which they were set.
---@class Module
---@operator call: any
---@field forward fun(self: Module, ...): any

---A class of modules. `build(self, ...)` sets the fields of an instance; define `:forward(...)` on
---the class, and call the instance to run it.
---@param name string
---@param build fun(self: Module, ...)
---@return fun(...): Module class calling it creates an instance
function m.module(name, build)
  if type(name) ~= "string" or type(build) ~= "function" then
    core.fail(("m.module takes a name and a function, got %s and %s"):format(type(name), type(build)), {
      help = 'm.module("Block", function(self) self.w = m.param{A.embed} end)',
    })
  end
  local class, optional = { name = name }, {} -- optional: the fields that any instance was given
  local meta = { __name = name }
  meta.__index = function(self, key)
    local record = records[self]
    local value = record.fields[key]
    if value == nil then value = class[key] end
    if value == nil and type(key) == "string" then
      local known = {}
      -- A field that other instances have, or that differs in a number alone (norm1, norm2), is one that this one lacks.
      local function is_misspelt(field) return not optional[key] and key:gsub("%d", "") ~= tostring(field):gsub("%d", "") end
      for field in pairs(record.fields) do known[#known + 1] = is_misspelt(field) and tostring(field) or nil end
      for field in pairs(class) do known[#known + 1] = field ~= "name" and is_misspelt(field) and field or nil end
      local elsewhere = synonyms.for_module(key)
      if elsewhere then core.fail(("%s has no function %q"):format(name, key), { help = elsewhere }) end
      local guess = core.suggest(key, known)
      if guess then core.fail(("%s has no field %q"):format(name, key), { help = "did you mean " .. guess .. "?" }) end
    end
    return value
  end
  meta.__newindex = function(self, key, value)
    local record = records[self]
    if attributes[record.fields[key]] and core.is_tensor(value) and not attributes[value] then
      core.fail(("%s.%s is a parameter, and cannot become a tensor"):format(name, tostring(key)), {
        help = "call the tensor otherwise: local y = ...; a buffer of m.buffer is set by self.mean:assign(y)",
      })
    end
    refuse_class(value, join(name, key))
    optional[key] = true
    local same = rawequal(value, record.fields[key]) -- self.w = self.w or m.param{...}
    if running and not same and is_fresh(value) and (attributes[record.fields[key]] or instance_of(record.fields[key])) then
      core.fail(("%s makes %s anew each time that its function forward runs"):format(name, join("self", key)), {
        help = ("make it where %s is built, or only where there is none: if not self.%s then ... end"):format(name, tostring(key)),
      })
    end
    if record.fields[key] == nil and value ~= nil then record.order[#record.order + 1] = key end
    if record.fields[key] ~= nil and value == nil then
      for i, other in ipairs(record.order) do
        if other == key then table.remove(record.order, i) end
      end
    end
    record.fields[key] = value
    adopt(record, value, join(name, key))
  end
  meta.__pairs = function(self) -- the fields, in the order of their first assignment
    local record, i = records[self], 0
    return function()
      i = i + 1
      return record.order[i], record.fields[record.order[i]]
    end
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
      for i = 1, select("#", ...) do
        local argument = select(i, ...)
        if (running or m.context.losses) and getmetatable(argument) == "tensor" then
          core.fail(("%s is a class, and is called with a tensor"):format(name), {
            help = ("an instance is called: local layer = %s() where the model is built, then layer(x)"):format(name),
          })
        end
      end
      local instance = setmetatable({}, meta)
      local record = { instance = instance, class = class, fields = {}, order = {}, building = true, forward = running }
      records[instance] = record
      build(instance, ...)
      record.building = nil
      return instance
    end,
  })
end

local function stack_help(value)
  local tensors = core.is_tensor(value) or type(value) == "table" and core.is_tensor(value[1])
  return tensors and 'it makes layers; m.concat({a, b}, "seq") joins tensors' or "m.stack(cfg.layers, Block)"
end

---A list of `count` modules, each created by class(i, ...), a class or a function that returns a module.
---@param count integer
---@param class fun(i: integer, ...): Module
---@param ... any
---@return Module[]
function m.stack(count, class, ...)
  if not math.tointeger(count) or count < 0 then core.fail("m.stack takes a count, 0 or more, and a class, got " .. m.shown(count), { help = stack_help(count) }) end
  local most = 100000 -- each is built and traced: a few milliseconds, and its parameters' memory
  if count > most then core.fail(("m.stack makes %d modules at most, not %d"):format(most, count)) end
  local meta = type(class) == "table" and getmetatable(class)
  if type(class) ~= "function" and not (type(meta) == "table" and meta.__call) then
    core.fail("m.stack takes a count and a class, got " .. m.shown(class), { help = stack_help(class) })
  end
  local list = {}
  for i = 1, count do
    list[i] = class(i, ...)
    if list[i] == nil then
      core.fail(("m.stack: layer %d is nil"):format(i), { help = "a function in the place of the class returns the layer" })
    end
    refuse_class(list[i], ("m.stack: layer %d"):format(i))
  end
  return list
end

---The modules that have a path, which they get where their tree is first used.
---@return {path: string, class: string}[] modules sorted by path
function m.module_records()
  local list = {}
  for _, record in pairs(records) do
    if record.path then list[#list + 1] = { path = record.path, class = record.class.name } end
  end
  table.sort(list, function(a, b) return a.path < b.path end)
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
---list. `frozen=true` lists the frozen ones too.
---@param model Module
---@param options? {frozen: boolean}
---@return State[] parameters
---@return string[] names
function m.parameters(model, options)
  m.check_options("parameters", options, { "frozen" })
  local record = instance_of(model)
  if not record then
    core.fail("m.parameters takes a module, got " .. m.shown(model), { help = "calling a class makes one: local model = GPT()" })
  end
  local list, names, all = {}, {}, options and options.frozen
  for _, p in ipairs(states_of(model)) do
    if p:kind() == "parameter" and (all or not attributes[p].frozen) then list[#list + 1], names[#names + 1] = p, p:name() end
  end
  return list, names
end

---All states of a module, in the order of the tree: parameters, frozen ones too, and buffers.
---@param model Module
---@return State[]
function m.module_states(model)
  local record = instance_of(model)
  if not record then core.fail("m.module_states takes a module, got " .. m.shown(model)) end
  return states_of(model)
end

---Leave a parameter, or all that a module, or a table of modules and parameters, has now, as they are from now on:
---m.parameters and m.train pass over them. `frozen=false` trains them again. Adapters beside given weights: m.lora,
---or m.freeze(model) and layers added to it.
---@param x State|Module|table
---@param frozen? boolean default true
---@return State|Module|table x
function m.freeze(x, frozen)
  local found = 0
  if not m.is_class(x) and not core.is_tensor(x) or attributes[x] then
    walk(x, nil, nil, {}, nil, function(p)
      if p:kind() == "parameter" then attributes[p].frozen, found = frozen ~= false, found + 1 end
    end)
  end
  if found == 0 and not instance_of(x) then
    core.fail("m.freeze takes a module, a parameter or a table of them, got " .. m.shown(x), { help = "calling a class makes a module: local model = GPT()" })
  end
  return x
end

-- Gradients -----------------------------------------------------------------------------------------

-- Whether the tree of modules to which `record` belongs holds p.
local function holds(record, p)
  local found = false
  walk(root_of(record).instance, nil, nil, {}, nil, function(q) found = found or q == p end)
  return found
end

---The parameters, none of `known` and none frozen, to which gradients of `loss` flow; with `created` only those that
---forward functions have created.
---@param loss Tensor
---@param known State[]
---@param created? boolean
---@return State[]
---@return string[] names of the classes of the models that hold them; "" where none does
function m.other_parameters(loss, known, created)
  local set, candidates, found, classes = {}, {}, {}, {}
  for _, p in ipairs(known) do set[p] = true end
  for _, p in ipairs(core.parameters_behind(loss)) do
    local frozen = attributes[p] and attributes[p].frozen
    if not set[p] and not frozen and (makers[p] or not created) then candidates[#candidates + 1] = p end
  end
  if #candidates == 0 then return found, classes end
  for i, g in ipairs(core.grad(loss, candidates)) do
    if not core.is_zero(g) then
      found[#found + 1] = candidates[i]
      classes[#found] = holders[candidates[i]] and holders[candidates[i]].class.name or ""
    end
  end
  return found, classes
end

-- A parameter or buffer that a forward function creates and stores in no field is a new one at each run.
local function refuse_created_in_forward(p)
  local maker, what = makers[p], p:kind() == "parameter" and "parameter" or "buffer"
  if not maker or holds(maker, p) then return end
  core.fail(("the function forward of %s makes a %s (%s) that no field keeps: it is a new one each time, and never %s"):format(
    title(maker), what, core.origin(p) or "?", what == "parameter" and "trained" or "read again"), {
    at = maker.instance.forward, help = ("make it where %s is built: self.layer = ...; then forward reads self.layer"):format(maker.class.name),
  })
end

---Name what forward functions have created while a program was traced, such as layers that wait for their first
---input (m.compile does).
---@param list State[]
function m.name_created(list)
  for _, p in ipairs(list) do
    if not attributes[p].named then name_tree(makers[p]) end
    if not attributes[p].named then refuse_created_in_forward(p) end
  end
end

---The gradients of a scalar with respect to tensors or states; zeros where it does not depend on them. Where
---`xs` are parameters, it is an error if it depends on none of them. An input of m.scan that is computed elementwise is computed
---again in the scan's steps, past the tensor that the script has: take gradients by what it is computed of.
---@param loss Tensor
---@param xs (Tensor|State)[]
---@return Tensor[]
function m.grad(loss, xs)
  if m.is_module(xs) then
    core.fail("m.grad takes a list of tensors, got " .. m.shown(xs), { help = "m.grad(loss, m.parameters(model))" })
  end
  local gradients = core.grad(loss, xs)
  local parameters, reached = 0, false
  for i, x in ipairs(xs) do
    if getmetatable(x) == "state" and x:kind() == "parameter" then parameters = parameters + 1 end
    reached = reached or not core.is_zero(gradients[i])
  end
  if parameters == 0 then return gradients end
  for _, p in ipairs(m.other_parameters(loss, xs, true)) do refuse_created_in_forward(p) end
  if not reached and parameters == #xs then
    local which = #xs == 1 and "the parameter " .. xs[1]:name() or ("any of the %d parameters"):format(#xs)
    core.fail(("the loss has no gradient with respect to %s: it does not depend on %s"):format(which, #xs == 1 and "it" or "them"), {
      help = "does it use what the model returns? t:detach(), comparisons, argmax and gradients that are constant pass none on",
    })
  end
  return gradients
end
