-- Train a model of models/ as its script does, and tell another implementation all it needs to repeat
-- the steps (tests/losses_torch.py), as JSON lines: the settings; of each parameter its dimensions and
-- initial values (a constant, or a standard deviation and the key of the counter generator); the
-- windows of tokens of each step. With --json the lines of the training follow. MODEL names the script.
-- Where data= names no file, the file TOKENS is written and trained on: a text that no version changes.
local m = require "mlua"
local core = require "mlua.core"

local root = core.options().script:match "^(.*)tests/lua/" or ""
local write_tokens = dofile(root .. "tests/lua/lib/tokens.lua")

-- How parameters begin, by key: m.init tells as it is asked.
local function record_initial_values()
  local initial, normal, constant = {}, m.init.normal, m.init.constant
  m.init.normal = function(std)
    local values = normal(std)
    return function(axes, key)
      initial[key] = ('"std":%.17g,"key":"%d"'):format(std, key)
      return values(axes, key)
    end
  end
  m.init.constant = function(value)
    local values = constant(value)
    return function(axes, key)
      initial[key] = ('"constant":%.17g'):format(value)
      return values(axes, key)
    end
  end
  return initial
end

local function tell_parameters(o, initial)
  o.model(core.input("tokens", { o.batch, o.seq }, "i32")) -- makes layers that wait for their input
  local parameters, names = m.parameters(o.model)
  for i, p in ipairs(parameters) do
    local dims = {}
    for j, axis in ipairs(m.axes_of(p)) do dims[j] = axis.size end
    local key = core.hash(("%d parameter %s"):format(core.options().seed, names[i]))
    core.write_json(('{"parameter":"%s","dims":[%s],%s}\n'):format(names[i], table.concat(dims, ","), initial[key]))
  end
end

-- A window is its seq inputs and the token after them: what the model reads and has to predict.
local function tell_tokens(o)
  local batch, seq = o.batch.size, o.seq.size
  local corpus = core.corpus(o.data, { dtype = o.data:match "%.bin$" and "u16" or "u8" })
  local tokens, targets = core.host("i32", batch, seq), core.host("i32", batch, seq)
  for step = 1, o.steps do
    corpus:fill(tokens, targets, step - 1, { seed = m.settings.seed, vocab = o.vocab })
    local inputs, after = tokens:table(), targets:table()
    for row = 1, batch do
      core.write_json(('{"window":%d,"tokens":[%s,%d]}\n'):format(step, table.concat(inputs, ",", (row - 1) * seq + 1, row * seq), after[row * seq]))
    end
  end
end

local function tell_settings()
  local told = {}
  for key, value in pairs(m.settings) do
    if type(value) == "number" then told[#told + 1] = ('"%s":%.17g'):format(key, value) end
  end
  table.sort(told)
  core.write_json(('{"settings":{%s}}\n'):format(table.concat(told, ",")))
end

local train, initial = m.train, record_initial_values()
m.generate = function() end
m.train = function(o)
  if o.data == "" then o.data = write_tokens(assert(os.getenv "TOKENS", "TOKENS names no file to write"), o.vocab) end
  tell_settings()
  tell_parameters(o, initial)
  tell_tokens(o)
  return train(o)
end
dofile(root .. (os.getenv "MODEL" or "models/gpt.lua"))
