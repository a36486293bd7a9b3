-- Flipped bits and shortened files of a checkpoint: each is named, with the file and, in its values, the tensor; nothing is
-- loaded: damage that is seen before tensors are read leaves the states as they were, damage in a tensor leaves them without a
-- value, which nothing reads, saves or trains on until they are set anew.
-- Without MLUA_DAMAGE, which says how many, some.
local m, core = require "mlua", require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")
local folder = os.tmpname()
os.remove(folder)
local turns = tonumber(os.getenv "MLUA_DAMAGE" or "") or 300

local A = m.axes { rows = 6, columns = 40 }
local states = {
  core.state { name = "layers.1.up", axes = { A.rows, A.columns }, kind = "parameter", init = m.iota(A.columns):cast "f32" + m.zeros { A.rows, A.columns } },
  core.state { name = "layers.1.up.adamw.m", axes = { A.rows, A.columns }, kind = "optimizer", init = m.zeros { A.rows, A.columns } },
  core.state { name = "count", axes = {}, dtype = "i64", kind = "other", init = 7 },
}
m.save(folder, nil, { record = { step = 3 } })
states[2]:set(m.host("f32", 6, 40):fill(5))

local function read(path)
  local file <close> = assert(io.open(path, "rb"))
  return file:read "a"
end
local function write(path, text)
  local file <close> = assert(io.open(path, "wb"))
  file:write(text)
end
local names = { "manifest.json", "model-00001-of-00001.safetensors", "state-00001-of-00001.safetensors", "model.safetensors.index.json" }
local texts, tensors = {}, {}
for _, name in ipairs(names) do texts[name] = read(folder .. "/" .. name) end
for _, tensor in ipairs(core.json(texts["manifest.json"], "it").tensors) do
  tensors[tensor.file] = tensors[tensor.file] or {}
  table.insert(tensors[tensor.file], tensor)
end
local function tensor_at(name, at) -- the name of the tensor that holds byte `at`, from 0
  for _, tensor in ipairs(tensors[name] or {}) do
    if at >= tensor.offset and at < tensor.offset + tensor.bytes then return tensor.name end
  end
end

math.randomseed(17)
local escaped = 0
for turn = 1, turns do
  local name = names[turn % #names + 1]
  local text, at = texts[name], math.random(0, #texts[name] - 1)
  local cut = turn % 9 == 0
  local bit = 1 << math.random(0, 7)
  local damaged = cut and text:sub(1, at) or text:sub(1, at) .. string.char(text:byte(at + 1) ~ bit) .. text:sub(at + 2)
  write(folder .. "/" .. name, damaged)
  local ok, message = pcall(m.load, folder)
  local tensor = not cut and tensor_at(name, at)
  local named = not ok and tostring(message):find(name, 1, true) and (not tensor or tostring(message):find(('"%s"'):format(tensor), 1, true))
  if not named then
    escaped = escaped + 1
    print(("FAIL %s, byte %d%s: %s"):format(name, at, cut and " on" or "", tostring(message)))
  end
  local got, value = pcall(function() return states[2]:get()[1] end)
  if tensor then
    local refused = not got and tostring(value):find('the state "layers%.1%.up[%w.]*" has no value: what was loaded into it was damaged')
    local saved, problem = pcall(m.save, folder .. ".other")
    if not refused or saved or not tostring(problem):find "what was loaded into it was damaged" then
      print(("FAIL states are used after a damage of %s: %s; saved: %s"):format(tensor, tostring(value), tostring(problem)))
      escaped = escaped + 1
    end
    for _, state in ipairs(states) do state:set(state == states[3] and m.host("i64"):fill(7) or m.host("f32", 6, 40):fill(5)) end
  elseif value ~= 5 then
    print(("FAIL a damaged checkpoint was loaded: %s"):format(tostring(value)))
    escaped = escaped + 1
  end
  write(folder .. "/" .. name, text)
end
check.equal(escaped, 0, "damages that were not named")
check.equal(m.load(folder).step, 3, "the whole one")
check.equal(states[2]:get()[1], 0, "its values")
core.checkpoint_remove(folder)
check.done()
