-- Predicted times of the rows of a dynamic layout (dynamic.lua): of those that have a program, and of those between them, which a
-- check of a large model does not plan. A row's time without attention is a line in its tokens, and attention follows query-key pairs.
local dynamic_costs = {}

-- The tokens of each rank.
local function tokens_of(row) return row.rows * row.tokens end

-- Of query-key pairs of each rank, where its rows are one sequence each: in any unit.
local function pairs_of(row) return row.rows * row.tokens ^ 2 end

---The rows that have a program, by group.
---@param rows table[] the result of dynamic.rows
---@return table[][]
function dynamic_costs.planned(rows)
  local planned = {}
  for _, row in ipairs(rows) do
    planned[row.group] = planned[row.group] or {}
    if row.program then table.insert(planned[row.group], row) end
  end
  return planned
end

-- The planned rows of its group between which a row is, and how far it is from the first to the second.
local function between(planned, row)
  local list, above, tokens = planned[row.group], 2, tokens_of(row)
  while tokens_of(list[above]) < tokens do above = above + 1 end
  local low, high = list[above - 1], list[above]
  return low, high, (tokens - tokens_of(low)) / (tokens_of(high) - tokens_of(low))
end

---What core.placement takes as `groups`: times by the table of `gpu`.
---@param rows table[] the result of dynamic.rows, of each group at least the first and the last with a program
---@param gpu? string
---@return table[]
function dynamic_costs.groups(rows, gpu)
  local planned, known, groups = dynamic_costs.planned(rows), {}, {}
  for _, row in ipairs(rows) do
    if row.program then
      local seconds, attention = row.program:cost(gpu)
      known[row] = { seconds = seconds, attention = attention, rest = seconds - attention }
    end
  end
  for _, row in ipairs(rows) do
    local group, seconds, attention = groups[row.group] or { ranks = row.ranks, rows = {} }, nil, nil
    if row.program then
      seconds, attention = known[row].seconds, known[row].attention
    else
      local low, high, part = between(planned, row)
      attention = known[high].attention * pairs_of(row) / pairs_of(high)
      seconds = known[low].rest + part * (known[high].rest - known[low].rest) + attention
    end
    groups[row.group] = group
    group.rows[row.row] = { tokens = row.tokens, rows = row.rows, seconds = seconds, attention = attention }
  end
  return groups
end

---Add what core.report takes as `runs` for one run of a row, `times` a step.
---@param runs table[]
---@param planned table[][] dynamic_costs.planned's
---@param row table
---@param times number
---@param documents fun(shape: table): Host the row's documents, in rows as those of another row, `shape`, or its own
function dynamic_costs.add_runs(runs, planned, row, times, documents)
  if row.program then
    runs[#runs + 1] = { program = row.program, documents = documents(row), times = times }
    return
  end
  local low, high, part = between(planned, row)
  -- Rows of one rank that are shorter than the program's stand for as many as fill it.
  local alone = row.ranks == 1
  local often = alone and times * tokens_of(row) / tokens_of(high) or times
  runs[#runs + 1] = { program = high.program, documents = documents(alone and row or high), times = often }
  runs[#runs + 1] = { program = high.program, documents = false, times = times * part - often }
  runs[#runs + 1] = { program = low.program, documents = false, times = times * (1 - part) }
end

return dynamic_costs
