-- Layouts: a mesh of ranks, and which axes of tensors are split over which mesh axis.
local core = require "mlua.core"
local m = require "mlua"

local TABLES = { "mesh", "params", "acts", "state", "reshard", "stages", "exchange", "cp_tokens" }
local MOST = 1 << 30 -- ranks, microbatches

local function names_of(mesh)
  local names = {}
  for i, axis in ipairs(mesh) do names[i] = axis.name end
  return names
end

-- What the mesh axes of presets, and what other programs call so, are for: help for a layout that lacks one.
local MEANINGS = {
  ep = "m.layout.megatron{ep = 1} and m.layout.fsdp{ep = 1} have ep, over which m.moe's experts are split",
  pp = "m.layout.megatron{} has pp, which cuts the model into stages", dp = "m.layout.megatron{}, .fsdp{} and .ddp{} have dp",
  tp = "m.layout.megatron{} and .fsdp{} have tp, which splits heads, ffn and vocab",
  cp = "m.layout.megatron{} and .fsdp{} have cp, which splits seq",
  sp = "sequence parallelism is a part of tp: m.layout.megatron{sp = true}", fsdp = "m.layout.fsdp{} splits parameters over dp",
  ddp = "the axis of data parallelism is dp", zero = "m.layout.megatron{zero = true} splits optimizer states over dp and cp",
  data = "the axis of data parallelism is dp", tensor = "the axis of tensor parallelism is tp", model = "the axis of tensor parallelism is tp",
  mp = "the axis of tensor parallelism is tp", pipe = "the axis of pipeline stages is pp", pipeline = "the axis of pipeline stages is pp",
  expert = "the axis of expert parallelism is ep: m.layout.megatron{ep = 1}", context = "the axis of context parallelism is cp",
  sequence = "the axis of context parallelism is cp", seq = "the axis of context parallelism is cp",
}

local function unknown(what, name, known, rest)
  local meant = MEANINGS[name] -- a name of its own, however near to others
  local guess = not meant and core.suggest(tostring(name), known)
  core.fail(("%s %q%s"):format(what, tostring(name), rest or ""), {
    help = guess and ("did you mean %s?"):format(guess)
      or ("the mesh has %s%s"):format(table.concat(known, ", "), meant and ("; {%q, 1} in mesh adds %s"):format(name, name) or ""),
  })
end

-- --mesh names an axis that the layout has not.
local function unknown_size(name, mesh)
  local known = names_of(mesh)
  local guess = not MEANINGS[name] and core.suggest(name, known)
  core.fail(("--mesh: the layout has no mesh axis %q"):format(name), {
    help = ("its mesh has %s; %s"):format(table.concat(known, ", "), MEANINGS[name] or guess and ("did you mean %s?"):format(guess)
      or ("mesh = { {%q, 1}, ... } in m.layout adds one"):format(name)),
  })
end

-- {{"dp", 4}, {"tp", 2}} with the sizes of --mesh.
local function read_mesh(mesh)
  local first = type(mesh) == "table" and #mesh == 0 and next(mesh)
  if type(first) == "string" then
    core.fail("the mesh is a list of pairs, as its order counts, and not a table by name", {
      help = ("mesh = { {%q, %s}, ... }, outermost first"):format(first, tostring(mesh[first])),
    })
  end
  if type(mesh) ~= "table" or #mesh == 0 then
    core.fail("a layout needs a mesh", { help = [[mesh = { {"dp", 4}, {"tp", 2} }, outermost first]] })
  end
  local list, seen = {}, {}
  for i, pair in ipairs(mesh) do
    local name, size, dynamic = nil, nil, false
    if type(pair) == "table" and type(pair[2]) == "number" then name, size = pair[1], math.tointeger(pair[2]) end
    if type(pair) == "table" and pair[2] == "dynamic" then name, size, dynamic = pair[1], 1, true end
    if type(pair) == "table" and type(pair[1]) == "string" and not (size and size >= 1) then
      core.fail(("the mesh axis %s cannot have size %s"):format(pair[1], m.shown(pair[2])), {
        help = 'a size is a positive integer, or "dynamic" for an axis that splits seq',
      })
    end
    if type(name) ~= "string" or not size or size < 1 then
      core.fail(("axis %d of the mesh is no pair of a name and a size"):format(i), { help = [[{"dp", 4}]] })
    end
    if seen[name] then core.fail(("the mesh has two axes %q"):format(name)) end
    seen[name] = true
    list[i] = { name = name, size = size, dynamic = dynamic }
  end
  for name, size in pairs(core.options().mesh) do
    if not seen[name] then unknown_size(name, list) end
    for _, axis in ipairs(list) do
      if axis.name == name then axis.size = size end
    end
  end
  local ranks = 1
  for _, axis in ipairs(list) do
    if axis.size > MOST // ranks then core.fail(("a mesh has at most %d ranks"):format(MOST)) end
    ranks = ranks * axis.size
  end
  return list
end

local function check_list(table_name, axis, list)
  if type(list) ~= "table" then
    core.fail(("%s.%s is a list of axes, got %s"):format(table_name, axis, type(list)), {
      help = ("%s = { %s = { \"heads\", \"ffn\" } }"):format(table_name, axis),
    })
  end
  for key in pairs(list) do
    if math.type(key) ~= "integer" or key < 1 or key > #list then
      core.fail(("%s.%s is a list of axes, got the key %s"):format(table_name, axis, tostring(key)))
    end
  end
  for i = 1, #list do
    local name = list[i]
    if type(name) ~= "string" then
      core.fail(("%s.%s lists names of axes, got %s"):format(table_name, axis, tostring(name)), { help = "write them as texts" })
    end
  end
end

-- One of a layout's tables: empty where it is not given.
local function table_of(spec, name)
  local value = spec[name]
  if value == nil then return {} end
  if type(value) ~= "table" then core.fail(("a layout's %s is a table, got %s"):format(name, m.shown(value))) end
  return value
end

-- The entries of one of a layout's tables, each of an axis of the mesh, by name; `read` converts each.
local function read_by_axis(spec, name, mesh, read)
  local known, copy = names_of(mesh), {}
  for axis, value in pairs(table_of(spec, name)) do
    local found = false
    for _, other in ipairs(known) do found = found or other == axis end
    if not found then unknown(name .. " speaks of the mesh axis", axis, known, ", which the mesh has not") end
    copy[axis] = read(axis, value)
  end
  return copy
end

-- params and acts: lists of axes by mesh axis.
local function read_lists(spec, table_name, mesh)
  return read_by_axis(spec, table_name, mesh, function(axis, list)
    check_list(table_name, axis, list)
    return table.move(list, 1, #list, 1, {})
  end)
end

local function read_state(spec, mesh)
  return read_by_axis(spec, "state", mesh, function(axis, how)
    if how ~= "flat" then
      core.fail(("state.%s cannot be %s"):format(axis, tostring(how)), { help = ('state = { %s = "flat" }'):format(axis) })
    end
    return how
  end)
end

local function read_reshard(spec, mesh)
  return read_by_axis(spec, "reshard", mesh, function(axis, value)
    if type(value) ~= "boolean" then
      core.fail(("reshard.%s is true or false, got %s"):format(axis, tostring(value)), { help = ("reshard = { %s = false }"):format(axis) })
    end
    return value
  end)
end

-- {pp = "layers", schedule =, chunks =, microbatches = }: which mesh axis cuts which list of modules.
local function read_stages(spec, mesh)
  local stages, found = table_of(spec, "stages"), nil
  for key, value in pairs(stages) do
    if key ~= "schedule" and key ~= "microbatches" and key ~= "chunks" then
      local known = false
      for _, axis in ipairs(mesh) do known = known or axis.name == key end
      if not known then unknown("stages speaks of the mesh axis", key, names_of(mesh), ", which the mesh has not") end
      if found then core.fail(("stages has two mesh axes, %s and %s"):format(found.axis, key)) end
      if type(value) ~= "string" then
        core.fail(("stages.%s names a list of modules, got %s"):format(key, type(value)), {
          help = ('stages = { %s = "layers" }, the longest list of modules that the model has'):format(key),
        })
      end
      found = { axis = key, list = value }
    end
  end
  for _, key in ipairs { "chunks", "microbatches" } do
    local value = stages[key]
    local number = type(value) == "number" and math.tointeger(value) or 0
    if value ~= nil and (number < 1 or number > MOST) then
      core.fail(("stages.%s must be an integer from 1 to %d, got %s"):format(key, MOST, m.shown(value)))
    end
  end
  local schedule = stages.schedule or (stages.chunks or 1) > 1 and "interleaved" or "1f1b"
  local schedules, names = core.schedules(), {}
  for i, known in ipairs(schedules) do names[i] = known.name end
  local rules = type(schedule) == "string" and schedules[schedule]
  if not rules then core.fail(("there is no schedule %q"):format(tostring(schedule)), { help = table.concat(names, ", ") }) end
  local chunks = stages.chunks or rules.virtual_stages and 2 or 1
  if chunks > 1 ~= rules.virtual_stages then
    core.fail(("the schedule %s takes %s"):format(schedule, chunks > 1 and "one chunk a rank" or "several chunks a rank"), {
      help = 'stages = { pp = "layers", schedule = "interleaved", chunks = 2 }',
    })
  end
  if not found then return nil end
  return { axis = found.axis, list = found.list, schedule = schedule, chunks = chunks, microbatches = stages.microbatches or 0 }
end

local function read_exchange(spec)
  local value = spec.exchange
  if value ~= nil and (type(value) ~= "number" or not (value >= 0) or value == math.huge) then
    core.fail(("a layout's exchange is a factor, 0 or more, got %s"):format(tostring(value)), {
      help = "1.5: ranks send the tokens of experts, with room for half more than an even share; 0: they gather weights",
    })
  end
  return value or 0
end

-- Sizes of groups of so many ranks, each a multiple of the one before, from 1: the next one is as small as divides.
local function group_sizes(ranks)
  local sizes, size = { 1 }, 1
  while size < ranks do
    local factor = 2
    while (ranks // size) % factor ~= 0 do factor = factor + 1 end
    size = size * factor
    sizes[#sizes + 1] = size
  end
  return sizes
end

local MOST_MESH = 8 -- axes of a mesh

-- cp = "dynamic": all ranks of dp x cp are dp's, and each size of groups of them has a mesh axis of its own, the last ones, that
-- splits what cp would (runtime/shard/groups.h).
local function spread(parts)
  local mesh, of, cp = parts.mesh, nil, nil
  for i, axis in ipairs(mesh) do
    if axis.name == "dp" then of = i end
    if axis.dynamic then
      if cp then core.fail(("the mesh axes %s and %s are both dynamic"):format(mesh[cp].name, axis.name)) end
      cp = i
    end
  end
  local tokens = parts.cp_tokens
  if tokens ~= nil and (not cp or math.type(tokens) ~= "integer" or tokens < 1) then
    core.fail(('cp_tokens is a number of tokens, with cp="dynamic", got %s with cp=%s'):format(m.shown(tokens), cp and '"dynamic"' or "a size"))
  end
  if not cp then return end
  local name = mesh[cp].name
  local what = ('%s="dynamic"'):format(name)
  if not of or of > cp then core.fail(what .. " needs the mesh axis dp before it, whose ranks it groups", { help = 'mesh = { {"dp", 4}, {"cp", "dynamic"} }' }) end
  local batch, slots, stages = 1, 0, parts.stages -- rows of a microbatch: one for each rank of axes that split the batch too
  for i, axis in ipairs(mesh) do
    local splits_batch = i ~= of and (parts.acts[axis.name] or {})[1] == "batch"
    if axis.size > 1 and i > of and i < cp and not splits_batch then
      core.fail(("%s is not supported with %s=%d between"):format(what, axis.name, axis.size), { help = ("%s=1"):format(axis.name) })
    end
    if splits_batch then batch = batch * axis.size end
    if axis.size > 1 and stages and stages.axis == axis.name then slots = stages.chunks > 1 and axis.size or 1 end
  end
  if slots > 0 and parts.exchange > 0 then core.fail(("%s is not supported with stages and exchange=%g"):format(what, parts.exchange), { help = "no exchange: weights of experts are gathered" }) end
  local over = parts.acts.dp or {}
  if #over ~= 1 or over[1] ~= "batch" then core.fail(what .. " needs acts.dp to be { \"batch\" }, got { " .. table.concat(over, ", ") .. " }") end
  if #(parts.acts[name] or {}) == 0 then core.fail(("%s: acts.%s says what it splits"):format(what, name), { help = ('acts = { %s = { "seq" } }'):format(name) }) end
  if #(parts.params[name] or {}) > 0 then
    core.fail(("%s is not supported where parameters are split over %s"):format(what, name), { help = "m.layout.fsdp{} splits them over dp" })
  end
  local together = #(parts.params.dp or {}) > 0 -- all groups run programs at once, and gather parameters from one another
  mesh[of].size, mesh[cp].size, mesh[of].grouped = mesh[of].size * mesh[cp].size, 1, together and "together" or true
  local sizes, inner = group_sizes(mesh[of].size), 1
  for i = of + 1, #mesh do inner = inner * mesh[i].size end
  parts.groups = { ranks = mesh[of].size, sizes = sizes, inner = inner, batch = batch, slots = slots, together = together, split = parts.params.dp, tokens = tokens }
  for k = 2, #sizes do
    local size, count = sizes[k], parts.groups.ranks // sizes[k]
    if #mesh + (together and count > 1 and 2 or 1) > MOST_MESH then
      for i = k, #sizes do sizes[i] = nil end
      break
    end
    local function add(axis, acts, params)
      mesh[#mesh + 1], axis.size, axis.group = axis, 1, size
      parts.acts[axis.name], parts.params[axis.name], parts.reshard[axis.name] = acts, params, parts.reshard.dp
    end
    if together and count > 1 then add({ name = ("dp/%d"):format(size), ranks = count, step = size }, parts.acts.dp, parts.params.dp) end
    add({ name = name .. size, ranks = size, step = 1 }, parts.acts[name], together and parts.params.dp or nil)
  end
end

-- What is cut into stages is whole within each: ranks of other stages hold nothing to meet with.
local function check_stages(parts)
  if not parts.stages then return end
  local axis = parts.stages.axis
  for _, name in ipairs { "params", "acts", "state" } do
    if parts[name][axis] then
      core.fail(("%s.%s: the mesh axis %s cuts the model into stages and splits nothing else"):format(name, axis, axis), {
        help = "another mesh axis may split tensors, such as tp",
      })
    end
  end
end

local CONTEXT = { gathered = { "seq" }, ring = { "seq", "kv_seq" }, exchanged = { "heads", "kv_heads", "seq" } }

local function boolean(text) return ({ ["true"] = true, ["false"] = false })[text] end

-- Whether a list has a name, and the list with it or without.
local function with_name(list, name, wanted)
  local out = {}
  for _, other in ipairs(list or {}) do
    if other ~= name then out[#out + 1] = other end
  end
  if wanted then out[#out + 1] = name end
  return out
end

-- A layout's reshard entry: false, or no entry.
local function retained(on)
  if on then return false end
end

-- What --layout changes: each option's value of its text, or nil; its values in words; the mesh axis that it needs; and its
-- effect on the specification of a layout, of presets and others.
local OVERRIDES = {
  { "preset", function(t) return (t == "megatron" or t == "fsdp") and t or nil end, "megatron or fsdp", "dp", function(spec, value)
    spec.params.dp = value == "fsdp" and { "embed" } or nil
    spec.reshard.dp = retained(value ~= "fsdp" and spec.state.dp)
  end },
  { "zero", boolean, "true or false", "dp", function(spec, value)
    for _, axis in ipairs { "dp", "cp" } do
      if spec.names[axis] then
        spec.state[axis] = value and "flat" or nil
        if not spec.params[axis] then spec.reshard[axis] = retained(value) end
      end
    end
  end },
  { "reshard", boolean, "true or false", "dp", function(spec, value)
    for _, axis in ipairs { "dp", "cp", "tp" } do
      local kept = spec.state[axis] and not spec.params[axis] -- ZeRO-1's
      if spec.names[axis] and not kept then spec.reshard[axis] = retained(not value) end
    end
  end },
  { "sp", boolean, "true or false", "tp", function(spec, value) spec.acts.tp = with_name(spec.acts.tp, "seq", value) end },
  { "context", function(t) return CONTEXT[t] and t end, "gathered, ring or exchanged", "cp", function(spec, value) spec.acts.cp = CONTEXT[value] end },
  { "cp", function(t) return t == "dynamic" and t or nil end, "dynamic; --mesh cp=2 gives it a size", "cp", function(spec)
    for i, pair in ipairs(spec.mesh) do
      if pair[1] == "cp" then spec.mesh[i] = { "cp", "dynamic" } end
    end
  end },
  { "cp_tokens", function(t) return math.tointeger(tonumber(t)) end, "a number of tokens", "cp", function(spec, value) spec.cp_tokens = value end },
  { "exchange", function(t) return tonumber(t) end, "a factor, 0 or more", "ep", function(spec, value) spec.exchange = value end },
  { "schedule", function(t) return t end, "a schedule", "pp", function(spec, value) spec.stages.schedule, spec.stages.chunks = value, nil end },
  { "chunks", function(t) return math.tointeger(tonumber(t)) end, "a number of stages a rank", "pp", function(spec, value) spec.stages.chunks = value end },
  { "microbatches", function(t) return math.tointeger(tonumber(t)) end, "a number", "pp", function(spec, value) spec.stages.microbatches = value end },
}

-- The specification as --layout changes it.
local function overridden(spec)
  local given, known, seen = core.options().layout, {}, {}
  if not next(given) then return spec end
  local out = { names = {} }
  for key, value in pairs(spec) do out[key] = value end
  for _, key in ipairs { "mesh", "params", "acts", "state", "reshard", "stages" } do
    out[key] = {}
    for name, value in pairs(table_of(spec, key)) do out[key][name] = value end
  end
  for _, pair in ipairs(type(spec.mesh) == "table" and spec.mesh or {}) do out.names[pair[1]] = true end
  for i, row in ipairs(OVERRIDES) do
    local name, read, values, axis, change = table.unpack(row)
    known[i], seen[name] = name, true
    if given[name] then
      local value = read(given[name])
      if value == nil then core.fail(("--layout %s=%s: it is %s"):format(name, given[name], values)) end
      if not out.names[axis] then
        core.fail(("--layout %s is of the mesh axis %s, which the layout has not"):format(name, axis), { help = MEANINGS[axis] })
      end
      change(out, value)
    end
  end
  for name in pairs(given) do
    if not seen[name] then
      local guess = core.suggest(name, known)
      core.fail(("--layout has no option %q"):format(name), { help = guess and ("did you mean %s?"):format(guess) or table.concat(known, ", ") })
    end
  end
  out.names = nil
  return out
end

local meta = { __name = "layout" }

function meta:__tostring()
  local parts = {}
  for i, axis in ipairs(self.mesh) do parts[i] = not axis.group and ("%s=%s"):format(axis.name, axis.dynamic and "dynamic" or axis.size) or nil end
  return "layout " .. table.concat(parts, " ")
end

local function layout(_, spec)
  m.check_options("layout", spec or {}, TABLES)
  spec = overridden(spec or {})
  local mesh = read_mesh(spec.mesh)
  local parts = {
    mesh = mesh, params = read_lists(spec, "params", mesh), acts = read_lists(spec, "acts", mesh), state = read_state(spec, mesh),
    reshard = read_reshard(spec, mesh), exchange = read_exchange(spec), stages = read_stages(spec, mesh),
    cp_tokens = spec.cp_tokens,
  }
  check_stages(parts)
  spread(parts)
  return setmetatable(parts, meta)
end

local SIZES = { "pp", "dp", "ep", "cp", "tp" }

local function preset(options)
  m.check_options("layout.megatron", options or {}, {
    "pp", "dp", "ep", "cp", "tp", "sp", "zero", "context", "cp_tokens", "exchange", "schedule", "chunks", "microbatches", "reshard",
  })
  options = options or {}
  for _, key in ipairs { "sp", "zero", "reshard" } do
    if options[key] ~= nil and type(options[key]) ~= "boolean" then
      core.fail(("m.layout's %s is true or false, got %s"):format(key, m.shown(options[key])), { help = ("%s = true; the sizes are those of pp, dp, ep, cp and tp"):format(key) })
    end
  end
  local mesh = {}
  for _, axis in ipairs(SIZES) do
    if axis ~= "ep" or options.ep then mesh[#mesh + 1] = { axis, options[axis] or 1 } end
  end
  return options, mesh
end

---The result of m.layout; its fields are the options, and may be changed before it is used.
---@class Layout: LayoutOptions

---@class LayoutOptions
---@field mesh table[] {{"dp", 4}, {"tp", 2}}: the axes of the mesh and their sizes, outermost first; {"cp", "dynamic"}: groups of the ranks of dp x cp
---@field params? table<string, string[]> by mesh axis: axes along which parameters are split, in order
---@field acts? table<string, string[]> likewise for all other tensors
---@field state? table<string, string> {dp = "flat"}: optimizer states are split over dp (ZeRO-1)
---@field reshard? table<string, boolean> {dp = false}: parameters that are gathered over dp are retained for the backward pass
---@field stages? {schedule: string, chunks: integer, microbatches: integer, [string]: string} pipeline stages: {pp = "layers"}
---@field exchange? number room for the tokens of experts, as a factor of an even share; 0: weights are gathered
---@field cp_tokens? integer with cp = "dynamic": how many tokens of a sequence a rank computes at most (a multiple of 8, of 128 from 1,024, or less); else as many as rows that fit in memory

---@class LayoutPreset
---@field pp? integer stages
---@field dp? integer ranks over which the batch is split
---@field cp? integer|string ranks over which seq is split; "dynamic": for each sequence as many as its length needs (pack = "document")
---@field tp? integer ranks over which heads, ffn and vocab are split
---@field ep? integer|boolean ranks over which experts are split
---@field sp? boolean activations between tensor-parallel parts are split over seq too
---@field zero? boolean optimizer states, and without stages parameters, are split over dp and cp
---@field context? string "gathered", "ring" or "exchanged": how cp splits attention
---@field reshard? boolean false: parameters that the forward pass gathers are retained for the backward pass
---@field cp_tokens? integer as in m.layout
---@field exchange? number as in m.layout
---@field schedule? string "1f1b", "interleaved", "zero-bubble" or "gpipe"
---@field chunks? integer stages a rank, of "interleaved"
---@field microbatches? integer into how many a step is cut by the stages

---How tensors are sharded: {mesh = {{"dp", 4}, {"tp", 2}}, params = , acts = , state = , stages = }. For
---each mesh axis `params` and `acts` list axes in order; a tensor is split over the mesh axis along
---the first that it has. state = {dp = "flat"} splits optimizer states over dp. reshard =
---{dp = false} retains the parameters that the forward pass gathers over dp for the backward pass; with both, they
---are sharded too from one step to the next. stages =
---{pp = "layers", schedule = "1f1b", microbatches = 16} assigns the layers of the model (its longest
---list of modules, or the list of that name) to the ranks of pp. --mesh sets sizes.
---exchange = 1.5 has ranks send one another the tokens of m.moe's experts that no capacity bounds,
---with room for 1.5 times an even share, instead of gathering the experts' weights; a step that needs
---more is done again with gathered weights.
---m.layout.megatron, .fsdp and .ddp are presets.
---@overload fun(options: LayoutOptions): Layout
m.layout = {}

local function megatron(options)
  local o, mesh = preset(options)
  local context = CONTEXT[o.context or "gathered"]
  if not context then core.fail(("there is no context %q"):format(tostring(o.context)), { help = "gathered, ring or exchanged" }) end
  return {
    mesh = mesh,
    params = { tp = { "heads", "kv_heads", "ffn", "vocab" }, ep = o.ep and { "experts" } },
    acts = {
      tp = { "heads", "kv_heads", "ffn", "vocab", o.sp and "seq" or nil }, cp = context, dp = { "batch" },
      ep = o.ep and { "batch", "experts" },
    },
    state = o.zero and { dp = "flat", cp = "flat" } or {},
    reshard = o.reshard == false and { dp = false, cp = false, tp = false } or o.zero and { dp = false, cp = false } or {},
    stages = { pp = "layers", schedule = o.schedule, chunks = o.chunks, microbatches = o.microbatches },
    exchange = o.exchange, cp_tokens = o.cp_tokens,
  }
end

---Megatron's: tensor parallel over heads, ffn and vocab; `sp` splits activations between them over
---seq too; `zero` splits optimizer states over dp and cp (ZeRO-1) and, without stages, parameters from
---one step to the next: they are gathered ahead of use, once a step; `context` is how cp splits attention: "gathered"
---(default), "ring" or "exchanged" (all-to-all). With `ep` the mesh has an axis ep that splits experts,
---and the batch elsewhere; `exchange` as in m.layout; `reshard` = false retains the parameters that the
---forward pass gathers over dp, cp and tp for the backward pass, for memory. `schedule` ("1f1b",
---"interleaved" with `chunks` stages a rank, "zero-bubble", "gpipe") and `microbatches` are those of
---the stages of pp.
---@param options? LayoutPreset
---@return Layout
function m.layout.megatron(options) return m.layout(megatron(options)) end

---Megatron's, with the parameters split over dp along embed too: gathered ahead of use, in the
---backward pass again. With reshard = false the gathered ones are retained until then: less is sent, and
---in bf16 where that is what is computed in.
---@param options? LayoutPreset
---@return Layout
function m.layout.fsdp(options)
  local spec = megatron(options)
  spec.params.dp = { "embed" }
  if not options or options.reshard ~= false then spec.reshard.dp = nil end
  return m.layout(spec)
end

---Data parallel; `zero` splits optimizer states too (ZeRO-1) and, from one step to the next, parameters:
---they are gathered ahead of use, in the dtype that is computed in, and live until the backward pass is
---done with them. `sp`, `schedule` and `reshard` are for scripts that take a preset by its name: here
---there is nothing for them to change.
---@param options? LayoutPreset dp and zero of it
---@return Layout
function m.layout.ddp(options)
  m.check_options("layout.ddp", options or {}, { "dp", "zero", "sp", "schedule", "reshard" })
  local o = options or {}
  return m.layout {
    mesh = { { "dp", o.dp or 1 } }, acts = { dp = { "batch" } }, state = o.zero and { dp = "flat" } or {},
    reshard = o.zero and { dp = false } or {},
  }
end

-- Other layouts than the named ones.
setmetatable(m.layout, {
  __call = layout,
  __index = function(_, name)
    local known = {}
    for key in pairs(m.layout) do known[#known + 1] = key end
    local guess = core.suggest(tostring(name), known)
    core.fail(("there is no layout %q"):format(tostring(name)), { help = guess and ("did you mean %s?"):format(guess) or table.concat(known, ", ") })
  end,
})

-- An axis that no tensor has is harmless, unless it looks like a slip of the pen.
local function check_names(lists, known)
  local set = {}
  for _, name in ipairs(known) do set[name] = true end
  for _, name in ipairs { "batch", "seq", "kv_seq", "embed", "heads", "kv_heads", "head_dim", "ffn", "vocab", "experts" } do
    set[name] = true
  end
  for _, list in pairs(lists) do
    for _, name in ipairs(list) do
      local guess = not set[name] and core.suggest(name, known)
      if guess then
        core.fail(("the layout lists the axis %q, which nothing has"):format(name), {
          help = ("did you mean %s? Axes of programs that come later are made before the layout is used: m.axis(%q, size)"):format(guess, name),
        })
      end
    end
  end
end

local current -- the layout of the session
local unchecked -- the same, until its names have been compared with those of the axes

---Raise where the layout that a program has been given lists an axis that is not there, also not in what the program
---computes, and looks like another: after the program has been traced, for forward functions create axes too.
function m.check_layout()
  local layout = unchecked
  if not layout then return end
  unchecked = nil
  local known = core.axis_names()
  check_names(layout.params, known)
  check_names(layout.acts, known)
end

-- Which mesh axes split a batch of tokens, "dp=2 x ep=2", and into how many parts.
local function batch_parts(batch, seq)
  local names, parts = {}, 1
  for _, axis in ipairs(current and current.mesh or {}) do
    for _, name in ipairs(current.acts[axis.name] or {}) do
      if name == batch.name and axis.size > 1 then
        names[#names + 1] = ("%s=%d"):format(axis.name, axis.size)
        parts = parts * axis.size
      end
      if name == batch.name or seq and name == seq.name then break end
    end
  end
  return table.concat(names, " x "), parts
end

---Over how many ranks the program that is traced has the axis `name` split, by mesh axes that split none of `whole`; 1 where ranks
---split one of the axes `others` as well.
---@param name string
---@param others Axis[]
---@param whole string[]
---@return integer
function m.ranks_along(name, others, whole)
  local ranks, group = 1, m.context.group
  if group then -- rows of a microbatch are the ranks' of other mesh axes
    for _, axis in ipairs(others) do ranks = ranks * axis.size end
    return ranks == 1 and group or 1
  end
  for _, axis in ipairs(current and current.mesh or {}) do
    local splits = {}
    for _, other in ipairs(axis.size > 1 and current.acts[axis.name] or {}) do splits[other] = true end
    for _, other in ipairs(others) do
      if splits[other.name] then return 1 end
    end
    local along = splits[name]
    for _, other in ipairs(whole) do along = along and not splits[other] end
    if along then ranks = ranks * axis.size end
  end
  return ranks
end

-- The pipeline stages, where there is more than one, and their number.
local function several_stages()
  local stages = current and current.stages
  for _, axis in ipairs(stages and current.mesh or {}) do
    if axis.name == stages.axis and axis.size > 1 then return stages, axis.size end
  end
end

-- The setting that defines the number of microbatches, in words.
local function describe_parts(parts, accum)
  local stages = several_stages()
  if not stages or parts == accum and stages.microbatches == 0 then return ("accum=%d microbatches"):format(parts) end
  if stages.microbatches == 0 then return ("%d microbatches (two for each of %s=%d pipeline stages)"):format(parts, stages.axis, parts // 2) end
  local times = accum > 1 and (", accum=%d times %d of the layout"):format(accum, stages.microbatches) or ""
  return ("%d microbatches (of the pipeline stages%s)"):format(parts, times)
end

-- How to split a step into `parts` microbatches, where the batch allows it.
local function wanted_parts(parts, accum)
  local stages = several_stages()
  if not stages then return ("accum=%d"):format(parts) end
  if parts < 2 or stages.chunks > 1 then return nil end -- accum=1 has two for each stage; interleaved ones take groups
  if stages.microbatches == 0 then return ("accum=%d"):format(parts) end
  return parts % accum == 0 and ("microbatches = %d in the layout's stages"):format(parts // accum) or nil
end

-- The numbers from 1 to 4096 that divide `whole` next to `by`: one below and one above, where there are such.
local function divisors_near(whole, by)
  local below, above
  for d = 1, math.min(whole, 4096) do
    if whole % d == 0 and d < by then below = d end
    if whole % d == 0 and d > by and not above then above = d end
  end
  return below, above
end

---Raise where a batch cannot be cut into `parts` microbatches, or a microbatch not over the ranks that share it.
---@param batch Axis
---@param seq Axis
---@param parts integer the result of m.microbatches
---@param accum integer
function m.check_batch(batch, seq, parts, accum)
  local over, ranks = batch_parts(batch, seq)
  local unit = parts * ranks
  if batch.size % unit == 0 or parts == 1 then return end -- of one part the layout says more
  local into, text = describe_parts(parts, accum), nil
  if batch.size % parts ~= 0 then
    text = ("batch=%d cannot be cut into %s"):format(batch.size, into)
  else
    text = ("batch=%d in %s has %d samples in each, which cannot be split over %s"):format(batch.size, into, batch.size // parts, over)
  end
  local ways, lower = {}, batch.size // unit * unit
  if lower > 0 then ways[1] = ("batch=%d"):format(lower) end
  if lower < 1 << 40 then ways[#ways + 1] = ("batch=%d"):format(lower + unit) end
  if batch.size % ranks == 0 then
    local below, above = divisors_near(batch.size // ranks, parts)
    ways[#ways + 1] = below and wanted_parts(below, accum)
    ways[#ways + 1] = above and wanted_parts(above, accum)
  end
  core.fail(text, { help = table.concat(ways, ", or ") .. " would do" })
end

---This process's rank, from 0, and how many there are (-n, or the cluster's launcher). All ranks run the whole
---script: what it prints itself, it prints on each. if m.rank() == 0 then print(...) end
---@return integer rank
---@return integer ranks
function m.rank() return core.options().rank, core.options().ranks end

---The groups of ranks of a layout with cp = "dynamic": how many ranks there are, the sizes of groups, the step from a rank of a group
---to the next, the rows of a microbatch (ep), and of what a step's number of microbatches is a multiple where pipeline stages want it
---alike on all ranks (0: they do not), and whether all groups run a program together (FSDP); `tokens`: cp_tokens; nil of other layouts.
---@return {ranks: integer, sizes: integer[], inner: integer, batch: integer, slots: integer, together: boolean, tokens: integer?}?
function m.context_groups() return current and current.groups or nil end

---Into how many microbatches m.train cuts a batch: `accum` times the layout's microbatches; where
---the layout has stages and no number, accum if it is more than 1, else two for each rank.
---@param accum integer
---@return integer
function m.microbatches(accum)
  local stages, ranks = several_stages()
  if not stages then return accum end
  if stages.microbatches > 0 then return accum * stages.microbatches end
  return accum > 1 and accum or 2 * ranks
end

---Give all programs and states of the script their layout, as the option `layout` of m.train and
---m.compile does; at the prompt, tensors then show their placement and what ranks send for them.
---@param value Layout a result of m.layout
---@param what? string the calling function, for messages
function m.use_layout(value, what)
  if value == nil then return end
  what = what or "m.use_layout"
  if getmetatable(value) ~= meta then
    local name = type(value) == "string" and rawget(m.layout, value) and value or "ddp"
    for key, preset in pairs(m.layout) do name = preset == value and key or name end
    core.fail(("the layout of %s must be made by m.layout, got %s"):format(what, m.shown(value)), { help = ("layout = m.layout.%s{}"):format(name) })
  end
  core.set_layout(value)
  current, unchecked = value, value
  if core.options().mode == "repl" then m.check_layout() end -- the next line is typed when this one has run
end
