-- The progress of the trainings of a script, so that one more m.train of a model continues where its last one stopped.
--
-- What is counted belongs to parameters, for a later training may have another loss, more layers or a wrapper around the
-- same ones: the samples seen of each data set (by file and seed), the steps, and the updates of each optimizer. A model
-- that was never trained begins at 0, whatever else the script has trained.
local m = require "mlua"

local history = setmetatable({}, { __mode = "k" }) -- by parameter: counters by key

local function count_of(p, key)
  local counter = history[p] and history[p][key]
  return counter and counter.count or 0
end

-- The most that any of the parameters has of a key.
local function most(parameters, key)
  local n = 0
  for _, p in ipairs(parameters) do n = math.max(n, count_of(p, key)) end
  return n
end

-- From now on the parameters share a counter, by what each of them has.
local function share(parameters, key, start, counters)
  local made = {}
  for _, p in ipairs(parameters) do
    local n = start or count_of(p, key)
    made[n] = made[n] or { count = n }
    history[p] = history[p] or setmetatable({}, { __mode = "k" })
    history[p][key] = made[n]
  end
  for _, counter in pairs(made) do counters[#counters + 1] = counter end
end

---The progress of a training that begins: .steps() and .samples() that its model has behind it, .offset(p): what is taken
---from the model's steps to count the updates of a parameter by this optimizer, .begin() before the first step,
---.advance(samples, steps) after each.
---@param model Module
---@param optimizer table
---@param data string the name of the data and their order
---@return table
function m.training_progress(model, optimizer, data)
  local progress, steps, samples, seen, made = {}, nil, nil, {}, {}
  local function all() return m.parameters(model, { frozen = true }) end
  function progress.steps()
    steps = steps or most(all(), "steps")
    return steps
  end
  function progress.samples()
    samples = samples or most(all(), data)
    return samples
  end
  function progress.offset(p) return progress.steps() - count_of(p, optimizer) end
  function progress.begin(skip)
    local parameters = all()
    share(parameters, "steps", progress.steps(), made)
    share(m.parameters(model), optimizer, nil, made)
    share(parameters, data, skip or progress.samples(), seen)
  end
  function progress.advance(count, more)
    for _, counter in ipairs(made) do counter.count = counter.count + more end
    for _, counter in ipairs(seen) do counter.count = counter.count + count end
  end
  return progress
end
