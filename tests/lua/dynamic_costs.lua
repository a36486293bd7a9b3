-- Times of rows that have no program follow from those between which they are: exactly where time without attention is a line in tokens,
-- and attention follows query-key pairs.
local core = require "mlua.core"
local dynamic_costs = require "mlua.dynamic_costs"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")

local FIXED, A_TOKEN, A_PAIR = { 3e-3, 5e-3 }, { 2e-6, 3e-6 }, 1e-9
local function rest(row) return FIXED[row.group] + A_TOKEN[row.group] * row.rows * row.tokens end
local function attention(row) return A_PAIR * row.rows * row.tokens ^ 2 end

-- {group, rows, tokens}, with a program where `planned` has its number.
local function rows_of(planned)
  local list = {}
  for i, r in ipairs { { 1, 1, 128 }, { 1, 1, 512 }, { 1, 1, 1024 }, { 1, 1, 2048 }, { 2, 1, 256 }, { 2, 1, 640 }, { 2, 2, 640 }, { 2, 3, 640 } } do
    local row = { group = r[1], ranks = r[1], rows = r[2], tokens = r[3], row = i > 4 and i - 4 or i }
    if planned[i] then
      row.program = { row = row, cost = function(_, gpu) return rest(row) + attention(row), gpu == "h200" and attention(row) end }
    end
    list[i] = row
  end
  return list
end

-- What core.report makes of runs: {tokens=, rows=} are documents, each row one. Rows of one rank that are shorter than the program's stand
-- for as many as fill it.
local function seconds_of(runs)
  local sum = 0
  for _, run in ipairs(runs) do
    local row, documents = run.program.row, run.documents
    local pairs_of = documents and documents.rows * documents.tokens ^ 2 or 0
    if documents and row.ranks == 1 then pairs_of = pairs_of * row.tokens / documents.tokens end
    sum = sum + run.times * (rest(row) + A_PAIR * pairs_of)
  end
  return sum
end

for _, planned in ipairs { { true, [4] = true, [5] = true, [8] = true }, { true, [3] = true, [4] = true, [5] = true, [7] = true, [8] = true }, { true, true, true, true, true, true, true, true } } do
  local rows = rows_of(planned)
  local groups, by_group = dynamic_costs.groups(rows, "h200"), dynamic_costs.planned(rows)
  check.equal(#groups, 2, "groups")
  for i, row in ipairs(rows) do
    local cost = groups[row.group].rows[row.row]
    check.equal(cost.tokens, row.tokens, "tokens")
    check.equal(cost.rows, row.rows, "rows")
    check.near(cost.attention, attention(row), 1e-12, "attention of row " .. i)
    check.near(cost.seconds, rest(row) + attention(row), 1e-12, "seconds of row " .. i)
    local runs = {}
    -- A larger group's documents lie in rows as long as the program's, where they are no more.
    dynamic_costs.add_runs(runs, by_group, row, 0.5, function(shape)
      if row.ranks == 1 then check.equal(shape, row, "the row's own documents") end
      return row
    end)
    check.near(seconds_of(runs), 0.5 * (rest(row) + attention(row)), 1e-12, "runs of row " .. i)
  end
end
check.done()
