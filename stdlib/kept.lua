-- What generation keeps of a model's earlier positions, or why its step cannot be derived: what `mlua check` reports. Nothing is compiled.
local Cache = require "mlua.increment"
local core = require "mlua.core"
local given = require "mlua.given"
local m = require "mlua"

local kept = {}

---The first line of an error of a derivation, at the op that it is about.
---@param err any
---@return string
function kept.problem(err)
  local text = tostring(err):match("[^\n]*"):gsub("^mlua: ", "")
  return text:match "^[^:]+:%d+: ([^:]+:%d+: .*)" or text -- who called is not of interest
end

local BLOCK = 16 -- positions: any number would do for pools, and rings are whole blocks

---fn's result as in a program that is traced: what it assigns and adds to losses is dropped.
---@param fn function
---@return boolean, any as pcall's
function kept.traced(fn)
  local context, updates, before = m.context, core.take_updates(), core.tracing(true)
  local pauses = core.known_pause(true) -- editors show what training computes
  m.context = { sites = 0, losses = {}, totals = {}, made = {} }
  local ok, result = pcall(core.from_here, fn)
  core.known_pause(pauses)
  core.take_updates()
  m.context = context
  for _, update in ipairs(updates) do update[1]:assign(update[2]) end
  core.tracing(before)
  return ok, result
end

-- The axis along which a model of m.train grows, and which of its inputs each prompt gives; nil where it reads no tokens. What m.train
-- does not say (`generate`) follows from forward's parameters: the first one grows.
local function read_by(model, seq)
  local how, inputs, names = given.declared[model], given.of_model[model], core.parameters(model.forward)
  if how then return how.axis, { [how.input] = true } end
  local first, others = inputs and inputs[names[2]], {}
  if not seq or inputs and not (first and first.dtype == "i32" and #first == 2 and first[2].name == seq.name) then return nil end
  for i = 3, inputs and #names or 0 do
    if inputs[names[i]] then others[names[i]] = true end
  end
  return seq, others
end

-- The model's logits for a sequence of its own, and the inputs that they are computed of; nil where it returns no tensor.
local function trace_model(model, seq, others)
  local batch, list, tensors = core.axis("batch", 1), {}, {}
  local tokens = core.input("tokens", { batch, seq }, "i32")
  for i, spec in ipairs(given.specs(model, others)) do
    list[i] = core.input(spec.name, table.move(spec.axes, 1, #spec.axes, 2, { batch }), spec.dtype)
    tensors[spec.name] = list[i]
  end
  local logits = #list > 0 and given.call(model, tokens, tensors) or #list == 0 and model(tokens) or nil
  return core.is_tensor(logits) and { axis = seq, logits = logits, tokens = tokens, given = list } or nil
end

-- The states of the step that adds one token to what was traced, which it raises for where there is none.
local function derive(whole)
  local seq, states = whole.axis, core.increment_states()
  local row, new, columns = core.axis("row", 1), core.axis("new", 1), core.axis("columns", (seq.size + BLOCK - 1) // BLOCK)
  core.increment(whole.logits, {
    tokens = whole.tokens, seq = seq.name, kept = states, given = whole.given, new = core.input("new", { row, new }, "i32"), start = core.input("start", { row }, "i32"),
    count = core.input("count", { row }, "i32"), table = core.input("table", { row, columns }, "i32"), pool = columns.size * BLOCK, block = BLOCK, new_max = Cache.CHUNK,
  })
  return states:list()
end

---The logits of a model for one sequence, from which kept.of derives what its step keeps; nil where they cannot be traced.
---@param model Module
---@param seq? Axis
---@return table?
function kept.trace(model, seq)
  local axis, others = read_by(model, seq)
  if not axis then return nil end
  local ok, whole = kept.traced(function() return trace_model(model, axis, others) end)
  return ok and whole or nil
end

---What the step of a model keeps: {axis = Axis, list = of states:list()}, or {problem = its first line}; nil where the model generates no text.
---@param model Module
---@param seq? Axis
---@param whole? table of kept.trace
---@return table?
function kept.of(model, seq, whole)
  local axis, others = read_by(model, seq)
  if not axis then return nil end
  local ok, result = kept.traced(function()
    whole = whole or trace_model(model, axis, others)
    return whole and derive(whole)
  end)
  if not ok then return { problem = kept.problem(result) } end
  return result and { axis = axis, list = result }
end

---Raise where a model has no increment, or reads inputs that a prompt of the command line does not give.
---@param model Module
---@param seq? Axis
function kept.require_prompt(model, seq)
  local _, others = read_by(model, seq)
  if given.declared[model] or not others or next(others) == nil then return end
  local found = kept.of(model, seq)
  if found and found.problem then core.fail(found.problem) end
  core.fail(("the model reads %s beside its tokens, which a prompt does not give"):format(next(others)), {
    help = ("m.train { generate = { input = ... } } says how; in a script: m.generate(model, { prompt = ids, inputs = { %s = ... } })"):format(next(others)),
  })
end

-- ---- The report ----------------------------------------------------------------------------------------------------------

local function type_of(k)
  local axes = {}
  for i, axis in ipairs(k.axes) do axes[i] = ("%s=%d"):format(axis.name, axis.size) end
  if k.ring then table.insert(axes, 1, ("positions=%d"):format(k.ring)) end
  return ("%s[%s]"):format(k.dtype, table.concat(axes, ", "))
end

-- States of one kind, those of one line and type together: lines, bytes, count.
local function lines_of(list, kind)
  local lines, by_text, bytes, count = {}, {}, 0, 0
  for _, k in ipairs(list) do
    if k.kind == kind then
      local text = ("%s   %s:%d"):format(type_of(k), k.file, k.line)
      if not by_text[text] then
        by_text[text] = { text = text, count = 0, module = k.module }
        lines[#lines + 1] = by_text[text]
      end
      by_text[text].count, bytes, count = by_text[text].count + 1, bytes + k.bytes, count + 1
    end
  end
  return lines, bytes, count
end

local function text_of(found)
  if found.problem then return ("no increment    %s\n"):format(found.problem) end
  local parts = {}
  for _, kind in ipairs { "pool", "ring", "slot" } do
    local lines, bytes, count = lines_of(found.list, kind)
    if count > 0 then
      local more = kind == "pool" and (", %s at %s=%d"):format(core.bytes_text(bytes * found.axis.size), found.axis.name, found.axis.size)
        or kind == "ring" and ": the last positions, for windows" or ""
      parts[#parts + 1] = ("%-15s %s in %d tensors%s\n"):format(kind == "pool" and "kept a token" or "kept a sequence", core.bytes_text(bytes), count, more)
      for _, line in ipairs(lines) do parts[#parts + 1] = ("  %3d x %s%s\n"):format(line.count, line.text, line.module ~= "" and " " .. line.module or "") end
    end
  end
  return #parts > 0 and table.concat(parts) or "kept a token    nothing\n"
end

local function json_of(found)
  if found.problem then
    local file, line, text = found.problem:match "^(.-):(%d+): (.*)$"
    return core.to_json { problem = text or found.problem, file = file, line = math.tointeger(tonumber(line)) }
  end
  local list, bytes = core.list {}, { pool = 0, ring = 0, slot = 0 }
  for i, k in ipairs(found.list) do
    local axes = core.list {}
    for j, axis in ipairs(k.axes) do axes[j] = { name = axis.name, size = axis.size } end
    list[i] = { name = k.name, kept = k.kind == "pool" and "position" or "sequence", dtype = k.dtype, axes = axes, bytes = k.bytes, positions = k.ring, module = k.module, file = k.file, line = k.line }
    bytes[k.kind] = bytes[k.kind] + k.bytes
  end
  return core.to_json { axis = found.axis.name, context = found.axis.size, position_bytes = bytes.pool, sequence_bytes = bytes.slot + bytes.ring, context_bytes = bytes.pool * found.axis.size + bytes.slot + bytes.ring, states = list }
end

---What core.report prints of a model: text, or with --json an object of it; nil where the model generates no text.
---@param model Module
---@param seq? Axis
---@param whole? table of kept.trace
---@return string?
function kept.report(model, seq, whole)
  local found = kept.of(model, seq, whole)
  if not found then return nil end
  return core.options().json and json_of(found) or text_of(found)
end

return kept
