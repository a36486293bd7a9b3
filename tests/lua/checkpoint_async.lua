-- A save beside steps that change the states: what is saved is what they were when it began; results as they come.
local m, core = require "mlua", require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")
local folder = os.tmpname()
os.remove(folder)
local A = m.axes { rows = 300, columns = 700 }
local w = core.state { name = "w", axes = { A.rows, A.columns }, kind = "parameter", init = m.zeros { A.rows, A.columns } }
local step = m.compile(function()
  w:assign(w:read() + 1)
  return { first = w:read():slice("rows", 0, 1):sum() }
end, {})
for _ = 1, 3 do step {} end
check.equal(core.checkpoint_poll(), nil, "no save")
check.equal(core.checkpoint_wait(), nil, "nothing to wait for")
for turn = 1, 3 do
  check.equal(core.checkpoint_begin(folder, ('{"turn":%d}'):format(turn)), true, "a save begins")
  for _ = 1, 40 do step {} end
  local result = turn == 2 and core.checkpoint_wait() or nil
  while not result do
    step {}
    result = core.checkpoint_poll()
  end
  check.equal(result.error, nil, "its error")
  check.equal(result.bytes, 4 * 300 * 700, "its bytes")
  check.equal(result.path, folder, "its path")
  if result.stall < 0 or result.seconds < result.stall then check.equal(result.stall, result.seconds, "its times") end
  check.equal(core.checkpoint_poll(), nil, "its result, given out")
  local value = w:get()
  check.equal(core.json(core.checkpoint_load(folder), folder).turn, turn, "its record")
  local loaded = w:get()
  check.equal(loaded[1] < value[1], true, "an earlier value")
  for _, k in ipairs { 2, 699, 70000, 210000 } do check.equal(loaded[k], loaded[1], "an element") end
  check.equal(loaded[1] % 1 == 0 and loaded[1] >= 3, true, "the value")
end
check.equal(select(2, core.checkpoint_begin(folder, "[1]")), nil, "a record is checked when it is written")
check.raises("the record of a checkpoint is no JSON object", function() error(core.checkpoint_wait().error) end)
check.equal(core.checkpoint_record(folder), '{"turn":3}', "the checkpoint before")
core.checkpoint_remove(folder)
check.done()
