-- Helpers for the tests in Lua: `local check = dofile(...)`; see the other files for its use.
local check = { failures = 0 }

local function fail(message)
  check.failures = check.failures + 1
  local _, where = pcall(error, "", 4) -- the caller of the check
  print(("FAIL %s%s"):format(where, message))
end

function check.near(actual, expected, tolerance, what)
  local scale = math.max(1, math.abs(expected))
  if not (math.abs(actual - expected) <= (tolerance or 1e-5) * scale) then
    fail(("%s: %.9g instead of %.9g"):format(what or "value", actual, expected))
  end
end

-- Compare a Host or list with a list of numbers.
function check.all(actual, expected, tolerance, what)
  if #actual ~= #expected then return fail(("%s: %d elements instead of %d"):format(what or "list", #actual, #expected)) end
  for i = 1, #expected do
    if not (math.abs(actual[i] - expected[i]) <= (tolerance or 1e-5) * math.max(1, math.abs(expected[i]))) then
      return fail(("%s[%d]: %.9g instead of %.9g"):format(what or "list", i, actual[i], expected[i]))
    end
  end
end

function check.equal(actual, expected, what)
  if actual ~= expected then fail(("%s: %s instead of %s"):format(what or "value", tostring(actual), tostring(expected))) end
end

-- fn must raise a message that contains `text`, other than in the line of the script that it shows.
function check.raises(text, fn, ...)
  local ok, message = pcall(fn, ...)
  if ok then return fail(("no error, expected one with %q"):format(text)) end
  local said = tostring(message):gsub("\n *%d+ | [^\n]*", "")
  if not said:find(text, 1, true) then fail(("error %q does not contain %q"):format(tostring(message), text)) end
end

function check.done()
  if check.failures > 0 then error(check.failures .. " checks failed", 0) end
end

return check
