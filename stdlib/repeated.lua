-- Functions of the library that make many alike tensors: traced once for each combination of their arguments' types, and repeated in C
-- for the others. Such a function calls none of a script, and what it makes follows from these types alone.
local core = require "mlua.core"

local repeated = {}

---A function like fn, of tensors, states and integers that are keys of random numbers; it returns a tensor, or none and assigns states.
---@param fn fun(...: Tensor|State|integer): Tensor?
---@return fun(...: Tensor|State|integer): Tensor?
function repeated.by_types(fn)
  local recordings = {}
  return function(...)
    local key = core.alike(...)
    local recording = recordings[key]
    local fits, result
    if recording then fits, result = recording:again(...) end
    if fits then return result end
    recording, result = core.record(fn, ...)
    if recording:close({ result }, ...) then recordings[key] = recording end
    return result
  end
end

return repeated
