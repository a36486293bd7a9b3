-- By which documents mlua check predicts the time of attention under pack = "document": those of the first batches, as training draws
-- them, where the data that the script names are at hand. Nothing is tokenized for it.
local core = require "mlua.core"
local dynamic = require "mlua.dynamic"
local dynamic_costs = require "mlua.dynamic_costs"

local packed_rows = {}

local STEPS = 4 -- that are drawn, or the first ones of them
local MOST, MOST_PLACED = 1 << 19, 1 << 21 -- tokens that are read for it; of a step whose documents are placed

-- Data that cannot be read, or packed, are the training's to refuse: here they are not at hand. An interrupt is no such error.
local function try(fn, ...)
  local ok, result = pcall(fn, ...)
  if not ok and (type(result) ~= "table" or result.interrupted) then error(result, 0) end
  return ok, result
end

local opened = setmetatable({}, { __mode = "k" }) -- by a training's options: its corpus, or false

local function open(o)
  if type(o.data) == "userdata" then return o.data end
  if not o.data then return nil end
  if opened[o] == nil then
    local ok, corpus = try(core.corpus, o.data, { tokenizer = o.tokenizer, made = true })
    opened[o] = ok and corpus
  end
  return opened[o] or nil
end

---Whether the documents of the first steps are at hand and few enough to be placed, by the costs of all rows.
function packed_rows.places(o) return o.dynamic.slots == 0 and o.step_tokens <= MOST_PLACED and open(o) ~= nil end

local function hosts(rows, o)
  local function host() return core.host("i32", rows, o.seq.size) end
  return { tokens = host(), targets = host(), documents = host(), positions = host() }
end

-- Rows of `step`, each step of which has as many as the hosts; false where these data cannot be packed.
local function fill(o, corpus, to, step)
  local share = 1 - (o.eval_every and not o.eval_data and o.eval_share or 0)
  return try(corpus.fill, corpus, to.tokens, to.targets, step, {
    seed = o.seed, to = share, skip = o.skip or 0, documents = to.documents, positions = to.positions,
  })
end

-- The microbatches of the rank that takes longest, by the placement of the first steps' documents.
local function placed(o, corpus, rows)
  local placement, by, runs, counts = core.placement(dynamic.costs(o, rows)), dynamic.by_place(rows), {}, {}
  local planned = dynamic_costs.planned(rows)
  local steps, to = math.max(1, math.min(STEPS, MOST // o.step_tokens)), hosts(o.batch.size, o)
  for step = 0, steps - 1 do
    if not fill(o, corpus, to, step) then return nil end
    counts[#counts + 1] = core.count_sequences(to.documents)
    local _, facts = placement:plan(to.documents)
    for _, microbatch in ipairs((placement:plan(to.documents, facts.busiest_rank))) do
      local row = by[microbatch.group][microbatch.row]
      dynamic_costs.add_runs(runs, planned, row, 1 / steps, function(shape)
        local own = hosts(shape.o.batch.size, shape.o)
        placement:fill(microbatch.at, to, own, shape ~= row)
        return own.documents
      end)
    end
  end
  return runs, counts, o.step_tokens
end

-- Windows of the first steps, for the program by which a step's time is stated.
local function windows(o, corpus, stated)
  local count = math.max(1, math.min(STEPS * o.batch.size, MOST // o.seq.size))
  local to = hosts(count, o)
  if not fill(o, corpus, to, 0) then return nil end
  return { { program = stated, documents = to.documents } }, { core.count_sequences(to.documents) }, count * o.seq.size
end

---What core.report takes as `runs` and `lengths`; nothing where documents are not kept apart.
---@param o table m.train's options
---@param stated Program by whose runs a step's time is stated
---@param rows? table[] the result of dynamic.rows, each with its program
---@return table[]?, string?
function packed_rows.read(o, stated, rows)
  if o.pack ~= "document" then return nil end
  local corpus, runs, counts, tokens = open(o), nil, nil, nil
  if rows and packed_rows.places(o) then
    runs, counts, tokens = placed(o, corpus, rows)
  elseif corpus then
    runs, counts, tokens = windows(o, corpus, stated)
  end
  if not runs and rows then
    local tokens = dynamic.assumed_tokens(o)
    return { { program = stated, documents = core.host("i32", 1, tokens) } }, ("documents of %d tokens: no data at hand"):format(tokens)
  end
  if not runs then return nil, "each row one document: no data at hand" end
  local sum = 0
  for _, count in ipairs(counts) do sum = sum + count end
  return runs, ("documents of %.0f tokens at the mean, from %s"):format(tokens * #counts / sum, corpus:name())
end

return packed_rows
