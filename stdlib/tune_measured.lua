-- What measured steps of some layouts say of the predictions of others (mlua tune --measure).
--
-- log(measured seconds / predicted seconds) is modelled as a Gaussian process over layouts (Rasmussen and Williams, Gaussian Processes
-- for Machine Learning, 2006, equations 2.25 and 2.26), a sum of independent terms: one of all layouts, one of each mesh, one of each
-- setting of ZeRO, one of the other options, and measurement noise. The constants are their standard deviations.
local measured = {}

local MACHINE, MESH, ZERO, OTHERS, NOISE = 0.2, 0.05, 0.05, 0.05, 0.03
local HOPE = 0.5 -- candidates are ordered by the mean less so many standard deviations (a lower confidence bound)
local FAILED = 2 -- one that does not run counts as so much slower than predicted

local AXES = { "pp", "dp", "ep", "cp", "tp" }
local OPTIONS = { "preset", "reshard", "sp", "context", "exchange", "schedule", "chunks" }

-- The covariance of the errors of two candidates' predictions.
local function covariance(a, b)
  local sum, alike, same_mesh = MACHINE ^ 2, 0, true
  for _, name in ipairs(AXES) do same_mesh = same_mesh and a.mesh[name] == b.mesh[name] end
  if same_mesh then sum = sum + MESH ^ 2 end
  if a.options.zero == b.options.zero then sum = sum + ZERO ^ 2 end
  for _, name in ipairs(OPTIONS) do
    if a.options[name] == b.options[name] then alike = alike + 1 end
  end
  if a.accum == b.accum then alike = alike + 1 end
  if a.precision == b.precision then alike = alike + 1 end
  return sum + OTHERS ^ 2 * alike / (#OPTIONS + 2)
end

-- The lower triangle L of a positive definite matrix, L times its transpose.
local function cholesky(matrix)
  local lower = {}
  for i = 1, #matrix do
    lower[i] = {}
    for j = 1, i do
      local sum = matrix[i][j]
      for k = 1, j - 1 do sum = sum - lower[i][k] * lower[j][k] end
      lower[i][j] = i == j and math.sqrt(sum) or sum / lower[j][j]
    end
  end
  return lower
end

-- x of L x = right.
local function forward(lower, right)
  local x = {}
  for i = 1, #lower do
    local sum = right[i]
    for k = 1, i - 1 do sum = sum - lower[i][k] * x[k] end
    x[i] = sum / lower[i][i]
  end
  return x
end

local function dot(a, b)
  local sum = 0
  for i = 1, #a do sum = sum + a[i] * b[i] end
  return sum
end

---Set `hoped` of each candidate that has predicted `seconds`: the lower confidence bound of the seconds of its step, after
---what was `measured` (tokens/s), or found not to run (`unmeasured`), of some.
---@param list table[]
---@param tokens number of a step
function measured.correct(list, tokens)
  local known, errors = {}, {}
  for _, c in ipairs(list) do
    local ratio = c.measured and tokens / c.measured / c.seconds or c.unmeasured and FAILED
    if ratio then known[#known + 1], errors[#errors + 1] = c, math.log(ratio) end
  end
  local matrix = {}
  for i, a in ipairs(known) do
    matrix[i] = {}
    for j, b in ipairs(known) do matrix[i][j] = covariance(a, b) + (i == j and NOISE ^ 2 or 0) end
  end
  local lower = cholesky(matrix)
  local whitened = forward(lower, errors)
  for _, c in ipairs(list) do
    local with = {}
    for i, k in ipairs(known) do with[i] = covariance(c, k) end
    local weights = forward(lower, with)
    local mean, variance = dot(weights, whitened), covariance(c, c) - dot(weights, weights)
    c.hoped = c.seconds and c.seconds * math.exp(mean - HOPE * math.sqrt(math.max(0, variance)))
  end
end

---The one to measure next; nil where there is none.
function measured.leading(list)
  local best
  for _, c in ipairs(list) do
    local seconds = c.fits and not c.measured and not c.unmeasured and (c.hoped or c.seconds)
    if seconds and (not best or seconds < (best.hoped or best.seconds)) then best = c end
  end
  return best
end

return measured
