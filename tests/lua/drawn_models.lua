-- Drawn models (lib/drawn.lua): an oracle that perturbs later tokens of the whole program decides which look ahead; these are refused at
-- the line that does, the others agree with their increments (lib/increments.lua). DRAWN_SEED is the first seed, DRAWN_COUNT how
-- many; DRAWN_SHOW=1 prints each model, DRAWN_WITHOUT="moe scan" draws none of these parts.
local m = require "mlua"
local core = require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check, drawn = dofile(root .. "tests/lua/lib/check.lua"), dofile(root .. "tests/lua/lib/drawn.lua")
local from, count = tonumber(os.getenv "DRAWN_SEED" or "") or 1, tonumber(os.getenv "DRAWN_COUNT" or "") or 3
local show, increments = os.getenv "DRAWN_SHOW", core.increment and dofile(root .. "tests/lua/lib/increments.lua")

local function looks_ahead(model, seed, kind)
  local change, cut = drawn.oracle(model, seed)
  check.equal(change < 1e-9 or change > 1e-5, true, ("%s: a change in between, %g"):format(model.text, change))
  if kind ~= "either" then check.equal(change > 1e-5, kind == "ahead", model.text .. ": looks ahead") end
  return change > 1e-5, ("%.2g at %d"):format(change, cut)
end

local function increments_of(model, seed)
  return increments(model, function() return drawn.whole(model, 1, "f32") end, drawn.numbers(seed + 5))
end

local function agrees(model, seed)
  local result = increments_of(model, seed)
  check.equal(result.worst <= 1e-5, true, ("%s: off by %g at %s"):format(model.text, result.worst, result.where))
  check.equal(result.argmax, 0, model.text .. ": positions with another argmax")
  return ("; off by %.2g in %d positions"):format(result.worst, result.positions)
end

-- At the line of drawn_ahead.lua; a part of either kind has several that may be named.
local function is_refused(model, seed)
  local ok, message = pcall(increments_of, model, seed)
  message = tostring(message)
  if ok or not model.line then
    check.equal(not ok and message:find("drawn_either.lua:", 1, true) ~= nil, true, ("%s: is refused (%s)"):format(model.text, ok and "it is not" or message))
  else
    check.equal(tonumber(message:match "drawn_ahead.lua:(%d+): "), model.line, ("%s: the line of the refusal (%s)"):format(model.text, message))
  end
  return "; " .. (message:match "^[^\n]*")
end

-- What does not look ahead may be refused where nothing proves it; where it is not, it agrees.
local function agrees_or_is_refused(model, seed)
  local ok, said = pcall(agrees, model, seed)
  if ok then return said end
  return is_refused(model, seed)
end

for seed = from, from + count - 1 do
  for _, kind in ipairs { "causal", "ahead", "either" } do
    local text = ("%s %d"):format(kind, seed)
    local ok, message = pcall(function()
      local model = drawn.model(seed, kind)
      text = model.text
      local ahead, said = looks_ahead(model, seed, kind)
      if increments then said = said .. (ahead and is_refused or kind == "either" and agrees_or_is_refused or agrees)(model, seed) end
      if show then print(("%-80s %s"):format(text, said)) end
    end)
    if not ok then check.equal(tostring(message), "", text) end
  end
end
check.done()
