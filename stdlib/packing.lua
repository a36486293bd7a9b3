-- Documents of a batch: m.train{pack = "document"} knows where they begin, and attention and rotary positions follow.
local core = require "mlua.core"
local m = require "mlua"

local packing = { seq = "seq" } -- the axis of positions: that of the last m.train

-- What the program that is traced knows of the documents of its batch, for a tensor over its positions; nil where there is none.
function packing.of(x, seq)
  local pack = m.context.pack
  seq = type(seq) == "userdata" and seq.name or seq
  if not pack or seq ~= pack.seq or not x:has(pack.seq) or not x:has(pack.batch) then return nil end
  pack.used = true
  return pack
end

-- fn(...), where what fills a row up behind its documents stays out of sums without a mask.
local function unmasked(pack, fn, ...)
  local outer = pack.unmasked
  pack.unmasked = true
  local results = table.pack(fn(...))
  pack.unmasked = outer
  return table.unpack(results, 1, results.n)
end

-- fn(...), whose nodes keep the documents of the batch apart by themselves, where it is called with what marks them: `mark` is
-- the documents or, for scans, their starts.
function packing.apart(mark, fn, ...)
  local pack = m.context.pack
  if not pack or mark == nil or not (rawequal(mark, pack.documents) or rawequal(mark, pack.starts)) then return fn(...) end
  local first = core.node_count()
  local results = table.pack(unmasked(pack, fn, ...))
  table.move({ first, core.node_count() }, 1, 2, #pack.apart + 1, pack.apart)
  return table.unpack(results, 1, results.n)
end

-- The same for what computes each position by itself, in an order of its own.
function packing.by_position(fn, ...)
  local pack = m.context.pack
  return packing.apart(pack and pack.documents, fn, ...)
end

-- fn(...), which counts no position whose target is -1: under cp = "dynamic" those of the batch are -1 where no document is.
function packing.by_targets(targets, fn, ...)
  local pack = m.context.pack
  if not pack or not rawequal(targets, pack.targets) then return fn(...) end
  return unmasked(pack, fn, ...)
end

-- Under cp = "dynamic" rows are of any length, and filled up behind their documents: nothing of that may be in a sum over positions.
local function row_of(x)
  local pack = m.context.pack
  if not pack or not pack.whole or pack.unmasked or not x:has(pack.seq) or not x:has(pack.batch) then return nil end
  if x:size(pack.seq) ~= pack.documents:size(pack.seq) or x:size(pack.batch) ~= pack.documents:size(pack.batch) then return nil end
  return pack
end

-- x with 0 where a sum over these axes, or over all where none is named, would count what fills a row up.
local function counted(x, ...)
  local pack = core.is_tensor(x) and row_of(x)
  if not pack then return x end
  local over = select("#", ...) == 0
  for _, axis in ipairs { ... } do
    local name = type(axis) == "userdata" and not core.is_tensor(axis) and axis.name or axis
    over = over or name == pack.seq or name == pack.batch
  end
  return over and core.where(core.ge(pack.documents, 0), x, 0) or x
end

-- Until it is closed, sums over positions and products over them leave out what fills rows up.
local function counting()
  local methods = core.tensor_methods
  local sum, dot = methods.sum, methods.dot
  function methods.sum(x, ...) return sum(counted(x, ...), ...) end
  function methods.dot(x, y, ...)
    local left = counted(x, ...)
    return dot(left, rawequal(left, x) and counted(y, ...) or y, ...)
  end
  return setmetatable({}, { __close = function() methods.sum, methods.dot = sum, dot end })
end

-- How many positions a mean over the axis divides by: those of the step, as one rank's mean does.
function packing.mean_size(x, axis)
  local pack, name = m.context.pack, type(axis) == "userdata" and axis.name or axis
  local whole = pack and pack.whole and pack.whole[name]
  return whole and x:size(axis) == pack.documents:size(name) and whole or x:size(axis)
end

-- Where documents begin: bool.
function packing.starts(pack)
  pack.starts = pack.starts or core.eq(pack.positions, 0)
  return pack.starts
end

local function from_batch(tokens, name, other)
  m.check_tensor(name, tokens)
  local pack = m.context.pack
  if pack and tokens:has(pack.seq) and tokens:has(pack.batch) then
    pack.used = true
    return pack[name]
  end
  local seq = packing.seq
  if not tokens:has(seq) then
    core.fail(("%s: the tokens have no axis %q: their axes are %s"):format(name, seq, table.concat(tokens:axes(), ", ")))
  end
  return other(core.axis(seq, tokens:size(seq))):broadcast(m.axes_of(tokens))
end

---The position of each token in its document, from 0: what a table of positions is gathered by,
---table:gather(m.positions(tokens), "seq"). Where attention crosses documents (pack = "concat") a sequence is one document.
---@param tokens Tensor the model's input
---@return Tensor i32, of the tokens' axes
function m.positions(tokens)
  return from_batch(tokens, "positions", function(axis) return core.iota(axis, "i32") end)
end

---The number of each token's document in its sequence, from 0. Where attention crosses documents (pack = "concat") a sequence
---is one document.
---@param tokens Tensor the model's input
---@return Tensor i32, of the tokens' axes
function m.documents(tokens)
  return from_batch(tokens, "documents", function(axis) return core.full({ axis }, 0, "i32") end)
end

-- The loss of a batch of documents: fn(), where attention and positions know them.
function packing.trace(o, feeds, fn)
  local pack = { documents = feeds.documents, positions = feeds.positions, targets = o.whole and feeds.targets, batch = o.batch.name, seq = o.seq.name, apart = {}, whole = o.whole }
  packing.last = pack
  local outer = m.context.pack
  m.context.pack = pack
  local open <close> = o.whole and counting() or nil
  local results = table.pack(fn())
  m.context.pack = outer
  if not pack.used then
    core.fail("pack=\"document\": the model uses neither the documents nor the positions of its batch", {
      help = "m.attention and m.rope use them, m.documents(tokens) and m.positions(tokens) give them; pack=\"concat\" lets documents run together",
    })
  end
  local line = core.table_over(results[1], o.seq, o.batch)
  if line then
    core.fail(("pack=\"document\": %s adds a table over %s by broadcast, in which positions run through all documents"):format(line, o.seq.name), {
      help = ("gather it by the positions in each document: table:gather(m.positions(tokens), %q)"):format(o.seq.name),
    })
  end
  return table.unpack(results, 1, results.n)
end

return packing
