-- Dynamic context parallelism: m.train under a layout with cp = "dynamic" and pack = "document".
--
-- A step's documents, cut at the ends of windows, are placed anew on rows of a few lengths, which groups of 1, 2, 4, ... ranks
-- compute (runtime/data/placement.h): one program for each row of each size of groups, and for several of the longest ones of larger
-- groups, made ahead. They add to sums of gradients that each rank has for itself; the update of all ranks adds these up. The loss
-- divides once, by the count of the whole step. Under pipeline stages the microbatches of a step are of several programs, in one
-- schedule (m.compile's `mixed`), and each rank has one in each slot of it. Where ranks of ep split the batch, a microbatch has a row
-- for each of them; where parameters are split over the ranks, all groups run a microbatch together, which has a row for each.
local core = require "mlua.core"
local dynamic_costs = require "mlua.dynamic_costs"
local kept = require "mlua.kept"
local m = require "mlua"
local packing = require "mlua.packing"

local dynamic = {}

local TWICE = 2 -- a program's second run is what later ones repeat
-- Lengths of rows of one rank, whose last ones are filled up; of rows of larger groups; of these where a slot of a pipeline's schedule has
-- rows that take about as long as one another.
local ALONE, TOGETHER, IN_SLOTS = 24, 4, 8
-- Of the lengths of one rank's rows those about what its last row has, where that is known: so many below and above it, in steps of its
-- share of a step over FINE.
local ABOUT, FINE = 10, 128
-- How many microbatches of `accum` rows hold, at most, and SPARE of it besides, for sequences that do not fill rows, or share one. Each row
-- reads and writes all weights and sums of gradients, so fewer and longer ones are faster as long as memory keeps their values, and fewer
-- sequences are split. Rows of larger groups, which have gathered keys and values besides, are for those that are longer yet, and up to
-- SEVERAL of them are a microbatch.
local ROOMS, ROOM, ROOM_TOGETHER, SPARE, SEVERAL = { 8, 4, 8 / 3, 2, 4 / 3 }, 1.25, 2, 1 / 8, 4
local WIDE, GRAIN, SMALL_GRAIN = 1024, 128, 8 -- tokens of a rank: rows are multiples of GRAIN where a rank has WIDE or more

local function grain_of(tokens) return tokens >= WIDE and GRAIN or SMALL_GRAIN end
local function rounded(tokens, grain) return math.ceil(tokens / grain) * grain end

-- Up to `count` numbers of tokens, the last `most`, evenly above `least`.
local function row_lengths(least, most, count)
  local lengths, grain = {}, grain_of(most)
  for i = 1, count do
    local tokens = math.min(most, rounded(least + (most - least) * i / count, grain))
    if tokens ~= lengths[#lengths] then lengths[#lengths + 1] = tokens end
  end
  return lengths
end

-- The same of one rank: most of them about `centre`, which its last row has on the average, and one a microbatch of `accum`, `tokens`.
local function row_lengths_about(centre, most, step, tokens)
  local low, high, lengths = math.max(0, centre - ABOUT * step), math.min(most, centre + ABOUT * step), {}
  local function add(least, longest, count)
    if longest > least then table.move(row_lengths(least, longest, count), 1, count, #lengths + 1, lengths) end
  end
  local about, first = (high - low) // step, math.min(tokens, low)
  local others = ALONE - about - (first > 0 and 1 or 0)
  local below = math.floor(others * (low - first) / (low - first + most - high) + 0.5)
  if first < low then below = math.max(below, 1) end
  if high < most then below = math.min(below, others - 1) end
  add(0, first, 1)
  add(first, low, below)
  add(low, high, about)
  add(high, most, ALONE - #lengths)
  return lengths
end

local function refuse(what, help) core.fail('cp="dynamic": ' .. what, { help = help }) end

-- The most slots that a step's documents need, a microbatch of which has `parts` of a rank's tokens on the shortest rows of groups. Rows
-- of one rank are packed: but for the last ones, more than half full. A row of a larger group has a document that fits on none of the
-- size before, which fills more of it than the ratio of the sizes.
local function most_slots(groups, parts)
  local times = 2
  for i = 2, #groups.sizes do times = math.max(times, groups.sizes[i] // groups.sizes[i - 1]) end
  return math.ceil((times * parts + 3 + #groups.sizes) / groups.slots) * groups.slots
end

-- Whether one rank computes any sequence by itself on rows of so many tokens: then ranks have about as many tokens as one another.
local function all_alone(d, longest) return d.window <= math.min(d.tokens or longest, longest) end

-- In how many rows of one rank its share of a step is, `parts` microbatches, and how much longer than one of these they may be: the share
-- fills them but for what is to spare. A share of as many tokens as rows have would need another row on every second rank. Where ranks
-- have sequences of larger groups besides, less than the share is left for these rows, which are two or more; and a microbatch of these
-- groups is a `single` row where several do not fit in memory.
local function rooms_of(d)
  local list, before = {}, nil
  local function add(longer, rows)
    if #d.groups > 1 and not d.together and not all_alone(d, longer * d.most) then list[#list + 1] = { longer = longer, rows = rows } end
    list[#list + 1] = { longer = longer, rows = rows, single = true }
  end
  for _, room in ipairs(ROOMS) do
    local rows = math.ceil(d.parts / room)
    if rows == 1 and not all_alone(d, d.parts * d.most * (1 + SPARE)) then rows = 2 end
    local longer = d.parts / rows * (1 + SPARE)
    if longer > ROOM and rows ~= before then
      add(longer, rows)
      before = rows
    end
  end
  add(ROOM)
  return list
end

-- The rows of each size of groups. `room` is of rooms_of.
local function set_rows(d, room)
  local least, share, grain = 0, math.min(d.most, d.tokens or d.most), grain_of(d.most)
  d.longest = rounded(d.most * room.longer, grain)
  for i, group in ipairs(d.groups) do
    group.several = {}
    local tokens = d.parts * d.most
    if i == 1 and room.rows and all_alone(d, d.longest) and tokens / FINE < d.longest / ALONE then
      local step = rounded(tokens / FINE, grain_of(d.longest))
      group.lengths = row_lengths_about(rounded(tokens - (room.rows - 1) * d.longest, grain), d.longest, step, d.most)
    else
      local longest, count = d.longest, ALONE
      if i > 1 then
        longest, count = rounded(d.most * math.min(room.longer, ROOM_TOGETHER), grain), d.slots > 0 and IN_SLOTS or TOGETHER
        longest = math.min(longest, d.tokens or longest)
      end
      group.lengths = row_lengths(math.min(least, longest - 1), longest, count)
    end
    local one = group.lengths[#group.lengths]
    if i > 1 and not room.single and d.slots == 0 and not d.together then
      for rows = 2, math.min(SEVERAL, d.longest // one) do group.several[#group.several + 1] = rows end
    end
    local following = d.groups[i + 1]
    least = following and rounded(group.ranks * share / following.ranks, 2)
  end
end

---What m.train's options say of groups and rows: nil where the layout is not dynamic.
---@param o table m.train's options
---@param parts integer microbatches of a step
function dynamic.read(o, parts)
  local groups = m.context_groups()
  if not groups then return nil end
  if o.inputs then refuse("m.train's inputs are not placed: it takes documents of data", 'data = "corpus.jsonl", pack = "document"') end
  if o.pack ~= "document" then refuse('documents are what it places: m.train needs pack="document"', 'pack = "document", or a size for cp') end
  local tokens = o.batch.size * o.seq.size
  local most = math.ceil(tokens / (parts * groups.ranks * groups.batch))
  most = rounded(most, grain_of(most))
  local d = { ranks = groups.ranks, most = most, parts = parts, groups = {}, batch = groups.batch, slots = groups.slots, together = groups.together, tokens = groups.tokens, window = o.seq.size }
  if d.tokens and d.tokens < SMALL_GRAIN then refuse(("cp_tokens=%d is less than rows have"):format(d.tokens), ("cp_tokens=%d or more"):format(SMALL_GRAIN)) end
  if d.tokens then d.tokens = d.tokens // grain_of(d.tokens) * grain_of(d.tokens) end
  local share = math.min(most, d.tokens or most) -- of a sequence, on each rank
  if d.slots > 0 then d.most_slots = most_slots(groups, math.ceil(parts * most / share)) end
  for _, size in ipairs(groups.sizes) do
    d.groups[#d.groups + 1] = { ranks = size }
    if size * share >= o.seq.size then
      set_rows(d, { longer = ROOM, single = true })
      return d
    end
  end
  local last = groups.sizes[#groups.sizes]
  local needed = math.ceil(o.seq.size / last)
  refuse(("a window of %s=%d does not fit on %d ranks with %d tokens each"):format(o.seq.name, o.seq.size, last, share),
    share < most and needed <= most and ("cp_tokens=%d would do"):format(rounded(needed, grain_of(needed)))
      or ("batch=%d in %d microbatches gives a rank %d tokens; fewer microbatches, or a shorter window, would do"):format(o.batch.size, parts, most))
end

-- The rows of a microbatch of groups of `ranks` ranks.
local function rows_of(d, ranks) return d.batch * (d.together and d.ranks // ranks or 1) end

-- The options of a program of `several` rows of `tokens` for each of `ranks` ranks.
local function row_options(o, ranks, tokens, several)
  return setmetatable({
    batch = core.axis(o.batch.name, several * rows_of(o.dynamic, ranks)), seq = core.axis(o.seq.name, ranks * tokens), accum = 1, group = ranks,
    whole = { [o.batch.name] = o.batch.size, [o.seq.name] = o.seq.size },
  }, { __index = o })
end

---The options of the programs of microbatches: {o = , group = , row = }, groups ascending.
function dynamic.rows(o)
  local list = {}
  for g, group in ipairs(o.dynamic.groups) do
    local count, longest = #group.lengths, group.lengths[#group.lengths]
    local function add(row, tokens, several)
      list[#list + 1] = { o = row_options(o, group.ranks, tokens, several), group = g, row = row, tokens = tokens, ranks = group.ranks, rows = several }
    end
    for r, tokens in ipairs(group.lengths) do add(r, tokens, 1) end
    for r, several in ipairs(group.several) do add(count + r, longest, several) end
  end
  return list
end

-- Programs of a window of LARGE nodes in its forward pass, some 200 layers, take a tenth of a second each to plan and more, and several
-- times as long where memory is short: of these a check plans the longest row alone, and estimates the other decisive ones; and it plans
-- no room whose longest row needs FAR times the memory with all values stored, as long as another one fits.
local LARGE, FAR = 12000, 1.6
local SURELY = 0.98 -- of the memory, by the probe: a row that needs no more stores all values

-- Whether a row of one rank, which takes row.slowed times as long as with all values stored, is as fast, attention apart, as the next shorter
-- room could be: by the line through this row and that of a microbatch of `accum`, `probe`, were all values stored.
local function fastest(d, row, probe, longer)
  if row.slowed <= 1 or not longer then return true end
  local seconds, attention = probe:cost()
  local short, long = (seconds - attention) / select(2, probe:room()), row.seconds / row.slowed
  local a_token = (long - short) / (row.tokens - d.most)
  return row.seconds / row.tokens <= a_token + (short - a_token * d.most) / (longer * d.most)
end

-- Of the rooms from number `at` on those with which the longest row of one rank and the most rows of the largest groups fit in memory, by
-- the predicted time a token of the former, attention apart; and the number of the room after them. These rows are planned and not made: a
-- run then has the memory, and chooses as a check does, but for rows of large programs that a check does not plan. Of large programs the
-- last of these rooms is one that no shorter one can be faster than, and `probe` is the program of a row of a microbatch of `accum`; `far`:
-- of rooms that are far from fitting, too.
local function fitting_rooms(o, planned, rooms, at, probe, far)
  local d, costs, list, row = o.dynamic, {}, {}, {}
  while rooms[at] do
    local room, following = rooms[at], at + 1
    while rooms[following] and rooms[following].longer == room.longer do following = following + 1 end
    set_rows(d, room)
    local rows = dynamic.rows(o)
    local alone, most = dynamic.lead(o, rows), rows[#rows]
    at = at + 1
    if far or not probe or probe:room(alone.tokens / d.most) <= FAR then
      if alone.tokens ~= row.tokens then -- else the room before has the same row of one rank
        local program = planned(alone, true)
        local seconds, attention, fits = program:cost()
        row = { tokens = alone.tokens, seconds = seconds - attention, fits = fits, slowed = select(2, program:room()) }
      end
      costs[room] = { row.seconds / row.tokens, at }
      if row.fits and (#d.groups == 1 or select(3, planned(most):cost())) then
        list[#list + 1] = room
        if probe and fastest(d, row, probe, rooms[following] and rooms[following].longer) then break end
      end
    end
  end
  table.sort(list, function(a, b)
    local x, y = costs[a], costs[b]
    if x[1] ~= y[1] then return x[1] < y[1] end
    return x[2] < y[2]
  end)
  return list, at
end

-- Sets the rows of the first room with which all programs fit in memory, by the order of fitting_rooms, or else of the last one. fits():
-- makes all programs; nil where they do not fit.
local function choose_room(o, planned, fits)
  local d, rooms = o.dynamic, rooms_of(o.dynamic)
  local probe, last = d.large and planned({ o = row_options(o, 1, d.most, 1), ranks = 1, tokens = d.most, rows = 1 }, true, true), nil
  d.probe = probe or nil
  d.probe_flops = probe and probe:plan().flops
  for pass = 1, probe and 2 or 1 do
    local list, at = nil, 1
    while rooms[at] do
      list, at = fitting_rooms(o, planned, rooms, at, probe, pass == 2)
      for i, room in ipairs(list) do
        last = room
        if rooms[at] == nil and i == #list then break end
        set_rows(d, room)
        if fits() then return end
      end
    end
    if last then break end
  end
  set_rows(d, last or { longer = ROOM, single = true })
end

local function key_of(row) return ("%d ranks, %d rows of %d"):format(row.ranks, row.rows, row.tokens) end

---Choose how long rows are, and make their programs: the fastest of which all programs fit in memory. With pipeline slots rows stay a
---quarter longer than a microbatch: fewer rows would leave more of the pipeline idle.
---@param make fun(row: table): Program, fun(programs: Program[]): Program makes a row's program, and what makes the update's
---@param make_all fun(): table[], Program makes the programs of all rows, and the update's
---@return table[], Program what make_all returns
function dynamic.choose(o, make, make_all)
  local d = o.dynamic
  if d.chosen or d.slots > 0 then return make_all() end
  d.chosen, d.planned = true, {}
  -- A lead is planned for its time, other rows to know whether they fit; of large programs those that may serve stay (dynamic.planned).
  local function planned(row, lead, probe)
    local key = key_of(row)
    local made = d.planned[key]
    if not made then
      if d.large then collectgarbage() end
      local checked = d.large and d.checked
      row.o.plan_only, row.o.estimate = lead or checked or "any", checked and (probe or not lead)
      made = table.pack(make(row))
      local slowed = select(2, made[1]:room()) > 1
      if d.large and row.o.plan_only == true and (not slowed or select(3, made[1]:cost())) then d.planned[key] = made end
    end
    return made[1]
  end
  local rows, update
  choose_room(o, planned, function()
    rows, update = core.fitting(function()
      local all, finish = make_all()
      local programs = { finish }
      for _, row in ipairs(all) do programs[#programs + 1] = row.program end
      local _, fit = core.rank_memory(programs)
      if fit then return all, finish end
    end)
    return rows
  end)
  if not rows then rows, update = make_all() end
  d.planned, d.probe = nil, nil
  return rows, update
end

---What `make` of dynamic.choose gave for a row that was planned to choose rooms, where that serves: in a check, of the lead, which is planned
---before all others, of a program that stores all values, as it does beside them, and of one that fits beside those made before it.
---@param before Program[]
---@return Program?, fun(programs: Program[]): Program?
function dynamic.planned(o, row, before)
  local made, lengths = o.dynamic.planned and not row.o.plan_only and o.dynamic.planned[key_of(row)], o.dynamic.groups[1].lengths
  if not made then return nil end
  local program, serves = made[1], row.group == 1 and row.tokens == lengths[#lengths] or select(2, made[1]:room()) <= 1
  if not serves and row.o.estimate then
    serves = select(2, core.rank_memory(table.move(before, 1, #before, 2, { program })))
  end
  if serves and program:list() then return program, made[2] end
end

---The longest row of one rank: its program is the lead of mixed microbatches.
function dynamic.lead(o, rows) return rows[#o.dynamic.groups[1].lengths] end

-- One rank's row that is about as long as a microbatch of `accum`.
local function stated_row(d, rows)
  local lengths, n = d.groups[1].lengths, 1
  while lengths[n] < d.most do n = n + 1 end
  return rows[n]
end

-- How many full rows of one rank hold its share of a step.
local function times_of(o, row) return o.step_tokens / (o.dynamic.ranks * o.dynamic.batch * row.tokens) end

---By what a step is stated: in a check the program of one rank's longest row, in a run that of one about as long as a microbatch of `accum`;
---how many of these rows, full, hold the rank's share of the tokens, and in how many microbatches of a pipeline.
---@return Program, number, integer
function dynamic.stated(o, rows)
  local d = o.dynamic
  local row = d.checked and dynamic.lead(o, rows) or stated_row(d, rows)
  local times, multiple = times_of(o, row), math.max(d.slots, 1)
  return row.program, times, math.ceil(times / multiple) * multiple
end

-- The first row of one rank that may not store all values, by a line from the probe to the longest: where this computes again, it needs about
-- the most memory.
local function first_slowed(d, rows)
  local lengths, short, longest = d.groups[1].lengths, d.probe:room(), nil
  longest = select(3, rows[#lengths].program:room())
  for r, tokens in ipairs(lengths) do
    if short + (tokens - d.most) / (lengths[#lengths] - d.most) * (longest - short) > SURELY then return rows[r] end
  end
end

---The FLOPs of a check's microbatches, by rows as long as one of `accum`, each one document: longer rows would have more attention.
---@return number
function dynamic.flops(o, rows)
  local d, row = o.dynamic, stated_row(o.dynamic, rows)
  if d.probe_flops then return d.probe_flops * times_of(o, { tokens = d.most }) end
  if row.program and d.slots == 0 then return row.program:plan().flops * times_of(o, row) end
  local lead = dynamic.lead(o, rows)
  local plan = lead.program:plan()
  return (plan.flops - (1 - d.most / lead.tokens) * plan.attention_flops) * times_of(o, lead)
end

---The rows that a check plans of large programs, once the longest is made: those that need about the most memory, and where documents are
---placed also those whose times give the others'. What the others hold beside them is not counted: a step is predicted up to an eighth too
---short where memory hardly suffices. nil: all rows.
---@return table<table, boolean>?
function dynamic.decisive(o, rows)
  local d, lead = o.dynamic, dynamic.lead(o, rows)
  if not (d.large and d.checked) then return nil end
  local decisive = { [rows[#rows]] = true }
  local slowed = d.probe and select(2, lead.program:room()) > 1 and first_slowed(d, rows)
  if slowed then decisive[slowed] = true end
  for i, row in ipairs(d.places and rows or {}) do
    local before, following = rows[i - 1], rows[i + 1]
    if not before or before.group < row.group or not following or following.group > row.group then decisive[row] = true end
  end
  for row in pairs(decisive) do row.o.estimate = d.slots == 0 and row ~= lead end
  decisive[lead] = true
  return decisive
end

---Whether some rows have no program.
function dynamic.partial(rows)
  for _, row in ipairs(rows) do
    if not row.program then return true end
  end
  return false
end

---What mlua check says.
function dynamic.describe(o, rows)
  local sizes, made, estimated = {}, 0, 0
  for i, group in ipairs(o.dynamic.groups) do sizes[i] = group.ranks end
  for _, row in ipairs(rows) do
    local whole = row.program and row.program:plan().peak_bytes
    made = made + (whole and 1 or 0)
    estimated = estimated + (row.program and not whole and 1 or 0)
  end
  return ("placed on groups of %s of %d ranks, in rows of up to %d tokens a rank%s: %d programs%s"):format(
    table.concat(sizes, ", "), o.dynamic.ranks, o.dynamic.longest, o.dynamic.tokens and (", up to %d of a sequence"):format(o.dynamic.tokens) or "", #rows,
    made < #rows and (", %d of them planned here, %d estimated"):format(made, estimated) or "")
end

---Of `nodes` in a window's forward pass.
function dynamic.note_nodes(o, nodes) o.dynamic.large = nodes >= LARGE end

---Nothing runs. `places`: the first steps' documents are placed, by the costs of all rows.
function dynamic.note_check(o, places) o.dynamic.checked, o.dynamic.places = true, places end

---Of how many tokens documents are where none are at hand: as dynamic.flops has it.
---@return integer
function dynamic.assumed_tokens(o) return o.dynamic.most end

---The options of evaluation: a window on the largest groups.
function dynamic.window(o)
  local groups = o.dynamic.groups
  local group = groups[#groups]
  local inner = row_options(o, group.ranks, o.seq.size, 1)
  inner.seq = o.seq
  return inner, group.ranks
end

---The options of a window twice as long, in as many rows as one rank's programs have.
function dynamic.longer(o)
  local inner, ranks = dynamic.window(o)
  inner.batch = core.axis(o.batch.name, rows_of(o.dynamic, 1))
  inner.seq = core.axis(o.seq.name, 2 * o.seq.size)
  return inner, ranks
end

---Raise where a loss and its further results are not sums over sequences. `feeds` are the program's inputs. Returns these sums.
function dynamic.check(o, total, count, results, feeds)
  local sums, constant = { total, count }, not core.is_tensor(count) and "loss's count" or nil
  for _, r in ipairs(results) do
    sums[#sums + 1], sums[#sums + 2] = r.sum, r.count
    constant = constant or (not core.is_tensor(r.sum) or not core.is_tensor(r.count)) and ("loss's result %q"):format(r.name)
  end
  if m.added_loss(count) then
    refuse("the model adds a loss by m.add_loss, a mean over a microbatch, and no microbatch is the same in another layout", "a size for cp")
  end
  for _, t in ipairs(m.context.totals) do
    sums[#sums + 1] = core.is_tensor(t.value) and t.value or nil
    constant = constant or not core.is_tensor(t.value) and t.value ~= 0 and ("value of m.step_total for %s"):format(t.state:name() or "a state")
  end
  if constant then
    refuse(("the %s is a number, the same for each microbatch, and these are not alike"):format(constant), "a sum over the targets, as m.cross_entropy's count")
  end
  local split = m.context_groups().together and m.context_groups().split or {}
  for _, p in ipairs(o.model and #split > 0 and m.parameters(o.model) or {}) do
    for _, name in ipairs(split) do
      if p:has(name) and p:size(name) % o.dynamic.ranks ~= 0 then
        refuse(("%s=%d of %s cannot be split over %d ranks alike"):format(name, p:size(name), p:name() or "a parameter", o.dynamic.ranks), "a multiple of them, or m.layout.megatron{}")
      end
    end
  end
  local updates = core.take_updates()
  if #updates > 0 then
    refuse(("the forward pass assigns the state %s at each microbatch, and these are not alike"):format(updates[1][1]:name() or "of the model"), "a size for cp")
  end
  core.check_by_sequence(sums, o.batch, o.seq, feeds.documents, packing.last.apart)
  return sums
end

---Raise where a window twice as long is computed otherwise, as the model or the loss read its length.
---@param sums Tensor[] of the window
---@param apart integer[] the nodes of the window that keep documents apart
---@param traced fun(): boolean, any the longer window's sums
function dynamic.check_lengths(o, sums, apart, traced)
  local ok, longer = traced()
  if ok then return core.check_by_length(sums, longer, apart) end
  if longer == "not enough memory" or type(longer) == "table" and rawget(longer, "interrupted") then error(longer, 0) end
  refuse(("rows are of any length, and with %s=%d there is an error: %s"):format(o.seq.name, 2 * o.seq.size, kept.problem(longer)),
    ("axes of the batch and of %s are those of the tensors at hand: m.axes_of(x)"):format(o.seq.name))
end

local function hosts_of(batch, seq)
  local function host() return core.host("i32", batch, seq) end
  return { tokens = host(), targets = host(), documents = host(), positions = host() }
end

---What core.placement takes: the rows' predicted times, by one table whatever the device, so that all ranks plan alike; or by that
---of `gpu`.
function dynamic.costs(o, rows, gpu)
  local d = o.dynamic
  local rank = core.options().rank // m.context_groups().inner % d.ranks
  return { ranks = d.ranks, most = d.tokens or 0, groups = dynamic_costs.groups(rows, gpu), batch = d.batch, slots = d.slots, together = d.together, rank = rank }
end

---The rows by group and place in it.
function dynamic.by_place(rows)
  local by = {}
  for _, row in ipairs(rows) do
    by[row.group] = by[row.group] or {}
    by[row.group][row.row] = row
  end
  return by
end

---What runs the steps: .begin(), .start(step, number), .finish().
---@param o table m.train's options
---@param rows table[] the result of dynamic.rows, each with its program
---@param data table train_data's
function dynamic.runner(o, rows, data)
  local d, costs, by = o.dynamic, dynamic.costs(o, rows), dynamic.by_place(rows)
  for _, row in ipairs(rows) do row.hosts = hosts_of(row.o.batch.size, row.o.seq.size) end
  d.costs = costs
  local placement = core.placement(costs)
  local runner, planned, list, facts, last = { sums = { busiest = 0, mean = 0, computed = 0, tokens = 0 } }, nil, nil, nil, nil
  local lead = dynamic.lead(o, rows).program
  local function run(row, at, step, first)
    placement:fill(at, data.feeds, row.hosts)
    local feeds = { step = step, first = first }
    for name, host in pairs(row.hosts) do feeds[name] = host end
    row.program:start(feeds)
    last = row.program
  end
  -- Each rank runs other programs, and another one first, than the rest: what all of them gather for these comes before.
  local function refresh()
    for _, row in ipairs(rows) do row.program:refresh() end
  end
  -- The microbatches of the step that `data` holds.
  function runner.plan()
    if planned == data.held then return end
    list, facts = placement:plan(data.feeds.documents)
    planned = data.held
    for name in pairs(runner.sums) do runner.sums[name] = runner.sums[name] + facts[name] end
  end
  -- Every program in a step of the fewest microbatches, on filling alone: what is made at the first runs, such as the choice of a
  -- product's algorithm and a GPU's graph, is there before step 1.
  function runner.begin()
    local fewest, options, since = d.slots > 0 and d.slots or TWICE, core.options(), core.time()
    lead:microbatches(fewest)
    refresh()
    for n, row in ipairs(rows) do
      for i = 1, fewest do run(row, -1, 1, i == 1) end
      if options.rank == 0 and not options.quiet and not options.json and core.time() - since > 2 then
        since = core.time()
        core.write_error(("program %d of %d has run\n"):format(n, #rows))
      end
    end
    last:finish()
  end
  function runner.start(step)
    runner.plan()
    refresh()
    if d.slots > 0 then lead:microbatches(#list) end
    for i, microbatch in ipairs(list) do run(by[microbatch.group][microbatch.row], microbatch.at, step, i == 1) end
  end
  function runner.finish() last:finish() end
  -- A line at a training's end.
  function runner.report()
    local s, options = runner.sums, core.options()
    if s.tokens == 0 or options.rank ~= 0 or options.quiet then return end
    core.write_error(("sequences: filling is %.1f%% of what ranks computed; the busiest rank's predicted time is %.3f of the average\n"):format(
      100 * (1 - s.tokens / s.computed), s.busiest / s.mean))
  end
  -- The windows of an evaluation's batch, which `data` holds, over the groups of the largest size.
  local windows = hosts_of(rows_of(d, d.groups[#d.groups].ranks), o.seq.size)
  function runner.evaluate(program, ranks, feeds, first)
    local step = d.ranks // ranks * d.batch -- windows of all groups at once
    local all = d.slots > 0 and math.ceil(o.batch.size / step) * step or o.batch.size -- stages: each group as many
    for row = d.together and 0 or costs.rank // ranks * d.batch, all - 1, step do
      if row < o.batch.size then placement:window(row, data.feeds, windows) else placement:fill(-1, data.feeds, windows) end
      for name, host in pairs(windows) do feeds[name] = host end
      feeds.first = first
      program:start(feeds)
      first = false
    end
    return first
  end
  -- Where there are more groups than windows: a window of filling, which begins this group's sums.
  function runner.nothing(program, feeds)
    placement:fill(-1, data.feeds, windows)
    for name, host in pairs(windows) do feeds[name] = host end
    feeds.first = true
    program:start(feeds)
  end
  return runner
end

return dynamic
