-- Words of commands and reports of checks, for the searches of `mlua tune` (tune.lua, tune_serve.lua).
local core = require "mlua.core"

local command = {}

---@param ... string[]
---@return string[] all of them
function command.joined(...)
  local out = {}
  for _, words in ipairs { ... } do table.move(words, 1, #words, #out + 1, out) end
  return out
end

---The sizes of a mesh as --mesh takes them, in the order of `names`; nil where all are 1.
---@param mesh table<string, integer>
---@param names string[]
---@return string?
function command.mesh(mesh, names)
  local sizes = {}
  for _, axis in ipairs(names) do
    if mesh[axis] and mesh[axis] > 1 then sizes[#sizes + 1] = ("%s=%d"):format(axis, mesh[axis]) end
  end
  return #sizes > 0 and table.concat(sizes, ",") or nil
end

---What the user gave of settings, device and dtype, without the script and the settings that are `chosen`.
---@param with_device boolean
---@param chosen? table<string, any>
---@return string[]
function command.given(with_device, chosen)
  local options = core.options()
  local words, batch = {}, options.global_batch > 0
  for _, pair in ipairs(options.overrides) do
    if not (chosen and chosen[pair[1]] or batch and pair[1] == "batch") then words[#words + 1] = pair[1] .. "=" .. pair[2] end
  end
  if options.global_batch > 0 then words[#words + 1] = ("batch=%d"):format(options.global_batch) end
  if with_device and options.device_name then table.move({ "--device", options.device_name }, 1, 2, #words + 1, words) end
  if options.dtype_name then table.move({ "--dtype", options.dtype_name }, 1, 2, #words + 1, words) end
  return words
end

---Whether programs run on the device of --device, which may be for planning alone.
---@return boolean
function command.runs_here()
  local device = core.options().device_name
  return not device or device == "cpu" or device == "cuda"
end

---An error where --measure cannot run.
function command.require_here()
  if command.runs_here() then return end
  core.fail(("--measure runs on this machine, and --device %s is for planning"):format(core.options().device_name), { help = "--device cpu, cuda, or none" })
end

---@param bytes number
---@return string
function command.size(bytes)
  if bytes < 2 ^ 20 then return ("%.1f KiB"):format(bytes / 2 ^ 10) end
  return bytes < 2 ^ 30 and ("%.1f MiB"):format(bytes / 2 ^ 20) or ("%.2f GiB"):format(bytes / 2 ^ 30)
end

---The budget as a run takes it; empty where none was given.
---@return string[]
function command.budget()
  local gib = core.options().memory
  return gib > 0 and { "--memory", ("%.9gGiB"):format(gib) } or {}
end

---The words of a check that reports as JSON.
---@param more string[]
---@param memory number GiB; 0: what the device has
---@return string[]
function command.check(more, memory)
  local options = core.options()
  local words = command.joined({ "check", options.script }, command.given(true), more, { "--json" })
  if options.from then table.move({ "--from", options.from }, 1, 2, #words + 1, words) end
  if memory > 0 then table.move({ "--memory", tostring(memory) }, 1, 2, #words + 1, words) end
  if options.hosts > 0 then table.move({ "--nodes", tostring(options.hosts) }, 1, 2, #words + 1, words) end
  return words
end

---The report of a check, also of one that does not fit; nil and the message where it has none.
---@param result? {output: string, errors: string, code: integer}
---@return table?
---@return string? errors
function command.report(result)
  if not result then return nil, "it was not done in time" end
  local report = result.output ~= "" and core.json(result.output:match "[^\n]*") or nil
  if report or result.code ~= 0 then return report, result.errors end
  return nil, "mlua: the script makes no program: there is nothing to plan\n"
end

-- Shares of a predicted step, in seconds.
local function parts(p)
  local s = p.seconds
  return {
    { "bubble", p.bubble * s }, { "exposed communication", p.exposed * s }, { "products", p.products * s }, { "attention", p.attention * s },
    { "memory-bound kernels", p.memory * s }, { "launches and small kernels", p.other * s }, { "waits for host copies", p.host_wait },
  }
end

---The part of a predicted step that is longer than another's by most, both times a factor: its name, and the seconds of both.
---@param mine table `predicted` of a report
---@param factor number
---@param other table
---@param other_factor number
---@return string name
---@return number
---@return number
function command.longest(mine, factor, other, other_factor)
  local others, name, seconds, best = parts(other), nil, nil, nil
  for i, part in ipairs(parts(mine)) do
    local own, theirs = factor * part[2], other_factor * others[i][2]
    if not name or own - theirs > seconds - best then name, seconds, best = part[1], own, theirs end
  end
  return name, seconds, best
end

---Words as a shell takes them.
---@param words string[]
---@return string
function command.text(words)
  local out = {}
  for i, word in ipairs(words) do out[i] = word:find "[^%w_./=,:%-]" and "'" .. word:gsub("'", "'\\''") .. "'" or word end
  return table.concat(out, " ")
end

---The names of --precision; nil: not given. An error where one is not of `known`.
---@param known string[]
---@param what string
---@return string[]?
function command.precisions(known, what)
  local text, names = core.options().precision, {}
  if not text then return nil end
  if text == "any" then return known end
  for name in text:gmatch "[^,]+" do
    local found = false
    for _, one in ipairs(known) do found = found or one == name end
    if not found then
      core.fail(("--precision: there is no %s %q here"):format(what, name), { help = "any, or of " .. table.concat(known, ", ") .. " those to choose from" })
    end
    names[#names + 1] = name
  end
  if #names == 0 then core.fail "--precision names nothing" end
  return names
end

return command
