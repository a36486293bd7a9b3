-- Curves in the terminal.
--
-- A chart is a grid of dots: 2 x 4 to a character in Braille, 1 x 2 in ASCII, 1 x 1 where several runs share it, each drawn by
-- its letter. Each column of dots shows the range of the values of its steps, joined to the column before.
local LABEL, ROWS, LETTERS = 9, 6, 26 -- columns, lines, runs of different letters

local chart = {}

chart.all = {
  { series = "loss", title = "loss" },
  { series = "eval_loss", title = "evaluation loss" },
  { series = "grad_norm", title = "gradient norm" },
  { series = "lr", title = "learning rate" },
  { series = "tokens_per_s", title = "tokens/s" },
}

local function number(value) return type(value) == "number" and value or 0 / 0 end
local function is_finite(value) return value - value == 0 end
local function round(value) return math.floor(value + 0.5) end

local function curve_of(run, series)
  local s = run.series[series] or { step = {}, value = {} }
  -- The first step's time has that of starting in it: it would hide all others.
  local first = #s.step > 2 and series == "tokens_per_s" and 2 or 1
  return { step = s.step, value = s.value, low = s.low or s.value, high = s.high or s.value, first = first }
end

local function find_range(curves, grid)
  grid.first, grid.low, grid.last, grid.high = math.huge, math.huge, -math.huge, -math.huge
  for _, c in ipairs(curves) do
    for i = c.first, #c.step do
      local low, high = number(c.low[i]), number(c.high[i])
      grid.first, grid.last = math.min(grid.first, c.step[i]), math.max(grid.last, c.step[i])
      if low < grid.low then grid.low = low end
      if high > grid.high then grid.high = high end
    end
  end
  return grid.first <= grid.last and grid.low <= grid.high
end

local function row_of(grid, value)
  local rows = ROWS * grid.down
  local part = grid.high > grid.low and (value - grid.low) / (grid.high - grid.low) or 0.5
  return math.max(0, math.min(rows - 1, round((1 - part) * (rows - 1))))
end

local function fill(grid, column, from, to, run)
  for row = math.min(from, to), math.max(from, to) do grid[row][column] = (grid[row][column] or 0) | 1 << run end
end

local function draw(grid, c, run)
  local across, before, value_before = grid.columns * grid.across - 1, nil, 0
  for i = c.first, #c.step do
    local value = number(c.value[i])
    local to = grid.last > grid.first and round((c.step[i] - grid.first) / (grid.last - grid.first) * across) or 0
    if is_finite(value) then
      local top, low = value, value
      if grid.ranges then top, low = number(c.high[i]), number(c.low[i]) end
      fill(grid, to, row_of(grid, top), row_of(grid, low), run)
      local last = row_of(grid, value_before)
      for column = before or to + 1, to do
        local row = row_of(grid, value_before + (to > before and (column - before) / (to - before) or 1) * (value - value_before))
        fill(grid, column, last + (last < row and 1 or last > row and -1 or 0), row, run)
        last = row
      end
    end
    before, value_before = is_finite(value) and to or nil, value
  end
end

-- Braille numbers its dots down the left, then the right, then the two at the bottom.
local BRAILLE = { [0] = 0, 1, 2, 6, 3, 4, 5, 7 }

local function character(grid, row, column)
  local bits, runs = {}, {}
  for i = 0, grid.across - 1 do
    for k = 0, grid.down - 1 do
      local here = grid[row * grid.down + k][column * grid.across + i]
      if here then bits[#bits + 1] = i * grid.down + k end
      for run = 0, LETTERS - 1 do
        if here and here >> run & 1 == 1 then runs[#runs + 1] = run end
      end
    end
  end
  if #bits == 0 then return " " end
  if grid.across == 2 then
    local code = 0x2800
    for _, bit in ipairs(bits) do code = code | 1 << BRAILLE[bit] end
    return utf8.char(code)
  end
  if grid.down == 2 then return #bits == 2 and ":" or bits[1] == 0 and "'" or "." end
  return string.char(("a"):byte() + runs[column % #runs + 1]) -- of several runs in one place, each in turn
end

-- The lines of a chart of one series of each run, `width` characters with its labels; nil where no run has it.
local function lines_of(runs, each, width, ascii)
  local several, curves = #runs > 1, {}
  local grid = { ranges = not several, across = (ascii or several) and 1 or 2, down = several and 1 or ascii and 2 or 4 }
  grid.columns = math.max(8, width - LABEL - 2)
  for i, run in ipairs(runs) do curves[i] = curve_of(run, each.series) end
  if not find_range(curves, grid) then return nil end
  for row = 0, ROWS * grid.down - 1 do grid[row] = {} end
  for i, c in ipairs(curves) do draw(grid, c, (i - 1) % LETTERS) end
  local lines = { (" "):rep(LABEL) .. " " .. each.title .. (" "):rep(grid.columns + 1 - #each.title) }
  for row = 0, ROWS - 1 do
    local label = row == 0 and ("%.4g"):format(grid.high) or row == ROWS - 1 and grid.high > grid.low and ("%.4g"):format(grid.low) or ""
    local line = { ("%" .. LABEL .. "s "):format(label), ascii and "|" or "│" }
    for column = 0, grid.columns - 1 do line[#line + 1] = character(grid, row, column) end
    lines[#lines + 1] = table.concat(line)
  end
  local first, last = ("%.0f"):format(grid.first), ("%.0f"):format(grid.last)
  if grid.last == grid.first then last = "" end
  local dashes = (ascii and "-" or "─"):rep(grid.columns - #first - #last)
  lines[#lines + 1] = ("%" .. LABEL .. "s %s%s%s%s"):format("step", ascii and "+" or "└", first, dashes, last)
  return lines
end

---The charts of all series, two beside each other where there is room.
---@param runs table[]
---@param width integer columns
---@param ascii boolean
function chart.write(runs, width, ascii)
  local beside, drawn = width >= 76 and 2 or 1, {}
  for _, each in ipairs(chart.all) do
    drawn[#drawn + 1] = lines_of(runs, each, beside == 2 and (width - 1) // 2 or width, ascii)
  end
  for i = 1, #drawn, beside do
    io.write "\n"
    for row = 1, #drawn[i] do
      local line = drawn[i][row]
      if beside == 2 and drawn[i + 1] then line = line .. " " .. drawn[i + 1][row] end
      io.write(line:match "^(.-) *$", "\n")
    end
  end
end

return chart
