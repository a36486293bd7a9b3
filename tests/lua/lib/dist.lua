-- Trains models/MODEL.lua under a layout as line N of the file $RUNS says, in run N of MLUA_RUNS: a table { model, layout (none: one
-- rank), settings, gradients } in which `m` is the library. Prints first which run it is, a hash of all initial weights and how far each
-- gradient is from the one in the file `gradients`: a line "gradient NAME DISTANCE NORM" with Frobenius norms. Without such a file it is
-- written.
local m, core = require "mlua", require "mlua.core"
local train, state_like, options = m.train, core.state_like, core.options
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
local file = run.gradients

-- Its settings are like words of the command line.
function core.options()
  local o = options()
  for key, value in pairs(run.settings or {}) do table.insert(o.overrides, { key, tostring(value) }) end
  return o
end

local sums = {} -- of gradients over microbatches: by the parameter's name
function core.state_like(parameter, name, kind)
  local state = state_like(parameter, name, kind)
  if kind == "gradient" then sums[parameter:name()] = state end
  return state
end

local function hash_weights(parameters)
  local parts = {}
  for _, p in ipairs(parameters) do
    local host = p:get()
    for i = 1, p:elements() do parts[#parts + 1] = string.pack("<d", host[i]) end
  end
  return core.hash(table.concat(parts))
end

-- The gradients of the first batch, all at once.
local function gradients(o, parameters)
  local spec = { core.axis(o.batch.name, o.batch.size), o.seq, dtype = "i32" }
  local program = m.compile(function(feeds)
    local total, out = m.cross_entropy(o.model(feeds.tokens), feeds.targets), {}
    for i, g in ipairs(m.grad(total, parameters)) do out[("g%03d"):format(i)] = g end
    return out
  end, { tokens = spec, targets = spec })
  local tokens, targets = core.host("i32", o.batch.size, o.seq.size), core.host("i32", o.batch.size, o.seq.size)
  core.corpus(nil, { dtype = "u8" }):fill(tokens, targets, 0, { seed = 1, vocab = 256, from = 0, to = 1 })
  local out, list = program { tokens = tokens, targets = targets }, {}
  for i in ipairs(parameters) do list[i] = out[("g%03d"):format(i)] end
  return list
end

local function write(list)
  local out = assert(io.open(file, "wb"))
  for _, g in ipairs(list) do
    for k = 1, #g do out:write(string.pack("<d", g[k])) end
  end
  out:close()
end

local function compare(list, parameters, expected)
  local at = 1
  for i, g in ipairs(list) do
    local off, square, x = 0, 0, nil
    for k = 1, #g do
      x, at = string.unpack("<d", expected, at)
      off, square = off + (g[k] - x) ^ 2, square + x ^ 2
    end
    core.write(("gradient %s %.9g %.9g\n"):format(parameters[i]:name(), math.sqrt(off), math.sqrt(square)))
  end
  if at ~= #expected + 1 then core.fail "the file holds gradients of another model" end
end

local function tell(list, parameters)
  local known = io.open(file, "rb")
  if not known then return write(list) end
  compare(list, parameters, known:read "a")
  known:close()
end

-- Calls `before` when the program that applies the sums starts for the first time, which leaves nothing in them.
local function before_update(before)
  local step = require "mlua.train_step"
  local made = step.accumulated_step
  function step.accumulated_step(o)
    local micro, update = made(o)
    local methods = {}
    function methods.start(_, feeds)
      if before then before() end
      before = nil
      return update:start(feeds)
    end
    return micro, setmetatable(methods, { __index = function(_, name)
      return function(_, ...) return update[name](update, ...) end
    end })
  end
end

function m.train(o)
  o.layout = run.layout
  m.use_layout(o.layout, "m.train")
  if core.options().mode ~= "run" then return train(o) end
  o.model(core.input("names", { core.axis(o.batch.name, o.batch.size // o.accum), o.seq }, "i32"))
  local parameters = m.parameters(o.model)
  core.write(("run %d\nweights %d\n"):format(turn, hash_weights(parameters)))
  if file and o.accum == 1 then tell(gradients(o, parameters), parameters) end
  if file and o.accum > 1 then
    before_update(function()
      local list = {}
      for i, p in ipairs(parameters) do list[i] = sums[p:name()]:get() end
      tell(list, parameters)
    end)
  end
  return train(o)
end

dofile(("%s/models/%s.lua"):format(os.getenv "ROOT", run.model))
