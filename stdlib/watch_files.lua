-- The files of a script that is watched: traces of it by a process of its own, and when one of them changes.
local core = require "mlua.core"
local facts_of = require "mlua.lsp_facts"
local files = {}

---The facts of the script as it is now; nil and the exit code where there are none.
---@param words string[] of the command line
function files.trace(words)
  core.lsp_start(words)
  local last, what, text, code
  repeat
    what, text, code = core.lsp_wait(60, false)
    if what == "line" then last = text end
  until what == "process" or what == "end"
  local facts = what == "process" and last and core.json(last)
  if type(facts) ~= "table" or facts.pending then return nil, code end
  facts.parameters = facts_of.parameters(facts.parameters)
  return facts
end

---{file = what changes when it does}.
---@param list string[]
function files.stamps(list)
  local known = {}
  for _, file in ipairs(list) do known[file] = core.lsp_stamp(file) or "absent" end
  return known
end

---The first file of the list that is not as known; nil: none.
function files.changed(list, known)
  for _, file in ipairs(list) do
    if (core.lsp_stamp(file) or "absent") ~= known[file] then return file end
  end
end

---After a trace: the files to watch, of which those that an error kept from being loaded stay; and their stamps, before the
---trace where they are known, so that what is saved meanwhile counts as changed.
function files.after(script, facts, list, known)
  local loaded, seen = { script }, { [script] = true }
  local function add(file)
    if not seen[file] then loaded[#loaded + 1], seen[file] = file, true end
  end
  for _, file in ipairs(facts.files) do add(file) end
  for _, file in ipairs(facts.error and list or {}) do add(file) end
  local now = files.stamps(loaded)
  for _, file in ipairs(loaded) do now[file] = known[file] or now[file] end
  return loaded, now
end

return files
