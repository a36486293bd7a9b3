-- The candidates of `mlua tune` (tune.lua): all layouts of so many ranks, an analytic estimate of each, and what results say of others.
local candidates = {}

local MOST_TP, MOST_MICRO = 8, 16 -- ranks of tensor parallelism; samples of a microbatch on a rank, in a pipeline
local CHUNKS = { 2, 3, 4, 6, 8 } -- stages of a rank that interleaves them
local LAUNCHES = 60e-6 -- seconds of the launches of a layer, forward and backward
local BESIDE = 0.6 -- share of a link's rate that collectives reach beside computation, and of the computation beside which they run
local KEPT = 5 -- bytes that a microbatch in flight keeps of each layer, over those of the layer's input
local LONG = 0.4 -- of the keys and values that ranks exchange under a fixed cp, the share under cp = "dynamic": of documents longer than a rank's tokens
local TOO_LARGE = 4 -- a candidate that probably does not fit, or cannot be planned, counts as so much slower
local HOST = 1e11 -- bytes of it that wait in host memory, without stages
local RESEMBLES = 4 -- how much more a result says of a candidate for each trait that they share

local function divides(n, ...)
  for _, size in ipairs { ... } do
    if size and size % n ~= 0 then return false end
  end
  return true
end

local function divisors(n)
  local out = {}
  for d = 1, n do
    if n % d == 0 then out[#out + 1] = d end
  end
  return out
end

-- Estimates -----------------------------------------------------------------------------------------------------------------

-- Bytes a second of a rank along an axis of the mesh: ranks of a host are neighbours, tp innermost.
local function link(facts, mesh, axis)
  local stride = 1
  for i = #facts.mesh_names, 1, -1 do
    local name = facts.mesh_names[i]
    if name == axis then break end
    stride = stride * (mesh[name] or 1)
  end
  local p = facts.predicted
  local host = facts.hosts > 0 and (facts.gpus - 1) // facts.hosts + 1 or p.host_ranks
  if stride * mesh[axis] <= host then return p.link_bytes end
  return math.min(p.link_bytes, p.network_bytes * math.max(1, host // stride))
end

-- How much longer the slowest of `pp` ranks computes than their mean: each of its `chunks` stages has whole layers, and the last one the
-- logits too, which take as long as `head` layers.
local function imbalance(layers, head, pp, chunks)
  local whole, mean = layers // pp, (layers + head) / pp
  for _, longest in ipairs { whole, whole + head, whole + 1, whole + 1 + head } do
    if longest // 1 * (pp - 1) + math.max(0, (longest - head) // 1) >= layers then
      return math.max(1, longest / mean, chunks * math.ceil(layers / pp / chunks) / mean)
    end
  end
  return 1
end

-- The sizes of pp, dp, ep, cp and tp, and the axis of dp's ranks: under cp = "dynamic" all ranks of cp are dp's.
local function sizes_of(c)
  local mesh = c.mesh
  local pp, dp, ep, cp, tp = mesh.pp or 1, mesh.dp or 1, mesh.ep or 1, mesh.cp or 1, mesh.tp or 1
  if c.options.context == "dynamic" then return pp, dp * cp, ep, 1, tp, "cp" end
  return pp, dp, ep, cp, tp, "dp"
end

-- Seconds of a step, on the hopeful side: products scale perfectly, and a part of the communication is hidden.
local function estimate(facts, c)
  local mesh, axes, o = c.mesh, facts.axes, c.options
  local pp, dp, ep, cp, tp, shared = sizes_of(c)
  local work = c.precision.seconds / facts.gpus
  local layers, embed = facts.layers / pp, axes.embed or 1
  local act = facts.tokens / (dp * ep * cp) * embed * c.precision.bytes
  local weights = facts.parameters / (tp * pp) / (axes.experts and ep or 1)
  local hidden = pp > 1 and 0.1 or 0.7 -- share
  local exposed = 0
  -- Each microbatch reads the weights twice and adds to the sums of their gradients in f32; and launches its kernels.
  work = work + (c.accum - 1) * (weights * (2 * c.precision.bytes + 8) / facts.predicted.memory_bytes + layers * LAUNCHES)
  if tp > 1 then exposed = exposed + (1 - hidden) * 9 * layers * act * (tp - 1) / tp / link(facts, mesh, "tp") end
  if mesh.cp and mesh.cp > 1 then
    local keys, ranks = act * (axes.kv_heads and axes.heads and axes.kv_heads / axes.heads or 1), mesh.cp
    local passes = o.context == "exchanged" and 8 * act * (ranks - 1) / ranks / ranks or 6 * keys * (ranks - 1) * (o.context == "dynamic" and LONG or 1)
    exposed = exposed + (1 - hidden) * layers * passes / tp / link(facts, mesh, "cp")
  end
  if ep > 1 then exposed = exposed + (1 - hidden) * 8 * layers * act * (ep - 1) / ep / link(facts, mesh, "ep") end
  if dp * cp > 1 then
    local sums = weights * (o.preset == "fsdp" and o.reshard and 8 + c.precision.bytes or 8) * (dp - 1) / dp / link(facts, mesh, shared)
    if cp > 1 then sums = sums + weights * 8 * (cp - 1) / cp / link(facts, mesh, "cp") end
    if o.preset == "fsdp" then sums = sums + weights * c.precision.bytes * (c.accum - 1) * (o.reshard == false and 1 or 2) / link(facts, mesh, shared) end
    sums = sums / BESIDE
    exposed = exposed + ((pp > 1 or c.accum > 1) and sums or math.max(0, sums - BESIDE * work))
  end
  local chunks = o.schedule == "interleaved" and (o.chunks or 2) or 1
  if pp > 1 then work = work * imbalance(facts.layers, facts.head, pp, chunks) end
  local waits = pp > 1 and (pp - 1) / (c.accum * chunks) * (o.schedule == "zero-bubble" and 0.4 or 1) or 0
  return work * (1 + waits) + exposed
end

-- Bytes of a rank: states; and each layer's input of the microbatches that are in flight.
local function memory_parts(facts, c)
  local axes, o = facts.axes, c.options
  local pp, dp, ep, cp, tp = sizes_of(c)
  local weights = facts.parameters / (tp * pp) / (axes.experts and ep or 1)
  local split = o.zero and dp or 1
  local states = weights * ((o.preset == "fsdp" and 4 / dp or pp > 1 and 4 or 4 / split) + 8 / (o.preset == "fsdp" and dp or split))
  if o.preset == "fsdp" and not o.reshard then states = states + c.precision.bytes * weights end
  if pp > 1 or c.accum > 1 then states = states + 4 * weights / (o.preset == "fsdp" and dp or 1) end
  local tokens = facts.tokens / (dp * ep * cp * c.accum)
  local open = pp > 1 and math.min(pp, c.accum) or 1
  if o.schedule == "interleaved" then open = math.min(c.accum, open + (pp - 1) / o.chunks) end
  return states, facts.layers / pp * tokens * (axes.embed or 1) * c.precision.bytes * open / (o.sp and tp or 1)
end

-- Choosing from lists -------------------------------------------------------------------------------------------------------

local MOST, SMALLEST, FEW = 3000, 300, 8 -- candidates that a search looks at; of these the smallest; where none may fit

-- The `count` candidates of which `key` is smallest.
local function first_by(list, key, count)
  local keys, sorted = {}, {}
  for i, c in ipairs(list) do keys[i] = c[key] end
  table.sort(keys) -- numbers alone, which takes a fraction of the time
  local last = keys[math.min(count, #keys)]
  for _, c in ipairs(list) do
    if c[key] <= last then sorted[#sorted + 1] = c end
  end
  table.sort(sorted, function(a, b)
    if a[key] ~= b[key] then return a[key] < b[key] end
    return a.number < b.number
  end)
  return table.move(sorted, 1, math.min(count, #sorted), 1, {})
end

-- All of them ---------------------------------------------------------------------------------------------------------------

-- Calls use(mesh) with all sizes of the mesh axes that the layout has, whose product is the number of GPUs.
local function each_mesh(facts, use)
  local axes, n = facts.axes, facts.gpus
  local function each(names, at, left, mesh)
    local name = names[at]
    if not name then
      if left == 1 then use(mesh) end
      return
    end
    for _, size in ipairs(divisors(left)) do
      local possible = size == 1
        or name == "tp" and size <= MOST_TP and divides(size, axes.heads, axes.kv_heads, axes.ffn)
        or name == "cp" and axes.seq and axes.seq % (2 * size * mesh.tp) == 0
        or name == "ep" and axes.experts and divides(size, axes.experts)
        or name == "pp" and size <= facts.layers
        or name == "dp"
      if possible then
        mesh[name] = size
        each(names, at + 1, left // size, mesh)
      end
    end
    mesh[name] = 1
  end
  local names, rest = {}, { "tp", "cp", "ep", "pp", "dp" }
  for _, name in ipairs(rest) do
    if facts.mesh[name] then names[#names + 1] = name end
  end
  each(names, 1, n, { tp = 1, cp = 1, ep = 1, pp = 1, dp = 1 })
end

-- Lists of options, by the mesh: {{name, value}, ...} in the order of --layout. Documents are placed (cp = "dynamic") on all ranks of
-- dp and cp alike, which are cp's here, where predictions know the documents of the data.
local function each_option(facts, mesh, use)
  local function product(rows, at, chosen)
    local row = rows[at]
    if not row then
      use(chosen)
      return
    end
    for _, values in ipairs(row) do
      local longer = table.move(chosen, 1, #chosen, 1, {})
      for _, pair in ipairs(values) do longer[#longer + 1] = pair end
      product(rows, at + 1, longer)
    end
  end
  local axes = facts.axes
  local function each_way(dynamic)
    local rows, shared = {}, dynamic and mesh.cp or mesh.dp
    if shared > 1 then
      local ways = { { { "preset", "megatron" }, { "zero", true } }, { { "preset", "megatron" }, { "zero", false } }, { { "preset", "fsdp" }, { "zero", true }, { "reshard", true } } }
      if mesh.pp == 1 then ways[#ways + 1] = { { "preset", "fsdp" }, { "zero", true }, { "reshard", false } } end
      rows[#rows + 1] = divides(shared, axes.embed) and ways or { ways[1], ways[2] }
    end
    if mesh.tp > 1 then rows[#rows + 1] = divides(mesh.tp * mesh.cp, axes.seq) and { { { "sp", true } }, { { "sp", false } } } or { { { "sp", false } } } end
    if dynamic then
      rows[#rows + 1] = { { { "context", "gathered" }, { "cp", "dynamic" } } }
    elseif mesh.cp > 1 then
      rows[#rows + 1] = { { { "context", "gathered" } }, { { "context", "ring" } } }
      if divides(mesh.cp * mesh.tp, axes.heads, axes.kv_heads) then rows[#rows][3] = { { "context", "exchanged" } } end
    end
    if mesh.ep > 1 then rows[#rows + 1] = { { { "exchange", 1.5 } }, { { "exchange", 2 } }, { { "exchange", 0 } } } end
    if mesh.pp > 1 then
      local ways = { { { "schedule", "1f1b" } }, { { "schedule", "zero-bubble" } } }
      for _, chunks in ipairs(CHUNKS) do
        local even = facts.layers % (mesh.pp * chunks) == 0
        if even or chunks <= 4 and chunks % 2 == 0 and mesh.pp * chunks <= facts.layers then ways[#ways + 1] = { { "schedule", "interleaved" }, { "chunks", chunks } } end
      end
      rows[#rows + 1] = ways
    end
    product(rows, 1, {})
  end
  each_way(false)
  if facts.documents and mesh.dp == 1 and mesh.cp > 1 then each_way(true) end
end

-- Into how many microbatches a rank's samples are cut.
local function accumulations(facts, mesh, options)
  local samples, out = facts.axes.batch // (mesh.dp * mesh.ep), {}
  for _, accum in ipairs(divisors(samples)) do
    local micro = samples // accum
    if mesh.pp > 1 then
      local groups = options.schedule ~= "interleaved" or accum % mesh.pp == 0
      if accum > 1 and micro <= MOST_MICRO and groups then out[#out + 1] = accum end
    elseif accum == 1 or facts.settings.accum then
      out[#out + 1] = accum
    end
  end
  return out
end

---All layouts that divide the model and its batch, and whose states may fit; where none may, those that need the least.
function candidates.all(facts)
  local list, large, batch = {}, {}, facts.axes.batch
  if not batch then return list end
  each_mesh(facts, function(mesh)
    if batch % (mesh.dp * mesh.ep) ~= 0 then return end
    local sizes = {}
    for name, size in pairs(mesh) do sizes[name] = size end
    each_option(facts, sizes, function(pairs_of)
      local values = { preset = "megatron" }
      for _, pair in ipairs(pairs_of) do values[pair[1]] = pair[2] end
      values.context, values.cp = values.cp or values.context, nil
      for _, accum in ipairs(accumulations(facts, sizes, values)) do
        local layout = table.move(pairs_of, 1, #pairs_of, 1, {})
        if sizes.pp > 1 and not facts.settings.accum then layout[#layout + 1] = { "microbatches", accum } end
        for _, precision in ipairs(facts.precisions) do
          local c = { mesh = sizes, layout = layout, options = values, accum = accum, precision = precision }
          local states, inputs = memory_parts(facts, c)
          c.least = states + (mesh.pp > 1 and KEPT * inputs or math.max(inputs, KEPT * inputs - HOST))
          local to = states + inputs <= facts.memory and list or #list == 0 and large
          if to then
            c.number = #to + 1
            to[#to + 1] = c
          end
        end
      end
    end)
  end)
  if #list == 0 then list = first_by(large, "least", FEW) end
  for _, c in ipairs(list) do
    c.estimate = estimate(facts, c)
    c.score = c.estimate * (c.least > facts.memory and TOO_LARGE or 1)
  end
  return list
end

---The most promising ones, and those that need the least memory.
---@return table[]
function candidates.promising(list)
  local out, taken = {}, {}
  local function take(key, count)
    for _, c in ipairs(first_by(list, key, count)) do
      if not taken[c] then out[#out + 1] = c end
      taken[c] = true
    end
  end
  take("score", MOST)
  take("least", SMALLEST)
  return out
end

-- What results say -----------------------------------------------------------------------------------------------------------

-- How much the result of one candidate says of another.
local function resemblance(a, b)
  local weight = 1
  for _, name in ipairs { "pp", "dp", "ep", "cp", "tp" } do
    if a.mesh[name] == b.mesh[name] then weight = weight * RESEMBLES end
  end
  for _, name in ipairs { "preset", "zero", "reshard", "sp", "context", "exchange", "schedule", "chunks" } do
    if a.options[name] == b.options[name] then weight = weight * 2 end
  end
  if a.precision == b.precision then weight = weight * RESEMBLES end
  return a.accum == b.accum and weight * RESEMBLES or weight
end

-- For each candidate without a result, the mean of what `ratio` gives of those with one, by resemblance.
local function spread(list, ratio, use)
  local known = {}
  for _, c in ipairs(list) do
    local value = ratio(c)
    if value then known[#known + 1] = { c, value } end
  end
  if #known == 0 then return end
  for _, c in ipairs(list) do
    local sum, weights = 0, 0
    for _, pair in ipairs(known) do
      local weight = pair[1] == c and 1e30 or resemblance(c, pair[1])
      sum, weights = sum + weight * pair[2], weights + weight
    end
    use(c, sum / weights)
  end
end

---Correct the estimates of candidates that were not planned by those that were; of `memory` bytes.
function candidates.learn(list, memory)
  -- What fits uses the memory that there is: it says that no more is needed.
  spread(list, function(c) return c.memory and (c.fits and math.min(1, c.memory / c.least) or c.memory / c.least) end, function(c, ratio) c.likely = c.least * ratio end)
  spread(list, function(c)
    if not c.done then return nil end
    return c.seconds and c.seconds / c.estimate or TOO_LARGE
  end, function(c, ratio) c.score = c.estimate * ratio * (c.likely and c.likely > memory and TOO_LARGE or 1) end)
end

---The next `count` candidates to plan: half of them of the best meshes, one each. Until something fits the others are those that need the
---least memory.
function candidates.next(list, count, best)
  local rest, out, seen = {}, {}, {}
  for _, c in ipairs(list) do
    if not c.done and (not best or c.score < 1.3 * best.seconds) then rest[#rest + 1] = c end
  end
  local function sort_by(key)
    table.sort(rest, function(a, b)
      if a[key] ~= b[key] then return a[key] < b[key] end
      return a.number < b.number
    end)
  end
  sort_by "score"
  local function mesh_of(c) return table.concat({ c.mesh.pp, c.mesh.dp, c.mesh.ep, c.mesh.cp, c.mesh.tp, c.precision.name }, " ") end
  for _, c in ipairs(rest) do
    if #out < count // 2 and not seen[mesh_of(c)] then
      seen[mesh_of(c)] = true
      out[#out + 1] = c
      c.taken = true
    end
  end
  if not best then sort_by "least" end
  for _, c in ipairs(rest) do
    if #out < count and not c.taken then out[#out + 1] = c end
    c.taken = nil
  end
  return out
end

---The best layout in the other precisions, where that was not planned.
---@return table[]
function candidates.counterparts(list, best)
  local out = {}
  for _, c in ipairs(list) do
    if c.layout == best.layout and c ~= best and not c.done then out[#out + 1] = c end
  end
  return out
end

---Those that fit: what was measured first, then by predicted time; of equal plans one.
function candidates.ranked(list)
  local out, seen = {}, {}
  for _, c in ipairs(list) do
    if c.fits and not c.unmeasured then out[#out + 1] = c end
  end
  table.sort(out, function(a, b)
    if (a.measured ~= nil) ~= (b.measured ~= nil) then return a.measured ~= nil end
    if a.measured and a.measured ~= b.measured then return a.measured > b.measured end
    if a.seconds ~= b.seconds then return a.seconds < b.seconds end
    if a.memory ~= b.memory then return a.memory < b.memory end
    return a.number < b.number
  end)
  local distinct = {}
  for _, c in ipairs(out) do
    local key = ("%.9g %d"):format(c.seconds, c.memory)
    if not seen[key] or c.measured then distinct[#distinct + 1] = c end
    seen[key] = true
  end
  return distinct
end

return candidates
