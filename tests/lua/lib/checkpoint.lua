-- Trains models/MODEL.lua as line N of the file $RUNS says, in run N of MLUA_RUNS: a table { model, layout (none: one rank), settings, at,
-- load, save } in which `m` is the library. After step `at` all states are loaded from the folder `load`, if there is one, and saved into
-- the folder `save`. Prints first which run it is.
local m, core = require "mlua", require "mlua.core"
local train, options = m.train, core.options
local turn = math.max(options().run, 1)

local function read_run()
  local at = 0
  for line in io.lines(os.getenv "RUNS") do
    at = at + 1
    if at == turn then return assert(load("local m = ...; return " .. line))(m) end
  end
  core.fail(("there is no run %d"):format(turn))
end
local run = read_run()

function core.options() -- its settings are like words of the command line
  local o = options()
  for key, value in pairs(run.settings or {}) do table.insert(o.overrides, { key, tostring(value) }) end
  return o
end

function m.train(o)
  o.layout = run.layout
  function o.on_step(step)
    if step ~= run.at then return end
    if run.load and m.load(run.load).at ~= step then core.fail "the checkpoint is of another step" end
    m.save(run.save, nil, { record = { at = step } })
  end
  core.write(("run %d\n"):format(turn))
  return train(o)
end

dofile(("%s/models/%s.lua"):format(os.getenv "ROOT", run.model))
