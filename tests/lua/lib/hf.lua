-- A model of models/ with the weights of a tiny published one (tests/hf/reference/make_fixtures.py): logits, gradients, and the
-- logits of altered configurations. Gives check(name, {variant = n, dtype = "bf16"...}).
local m = require "mlua"
local core = require "mlua.core"
local from = require "mlua.from"

local root = os.getenv "ROOT" and os.getenv "ROOT" .. "/" or core.options().script:match "^(.*)tests/lua/" or ""
-- The script of each family (tests/hf_peers.py reads this table).
local FILES = { gpt2 = "gpt", llama = "llama", mistral = "llama", qwen2 = "llama", qwen3 = "llama", mixtral = "gpt_moe", qwen3_moe = "gpt_moe", gemma2 = "gemma", gemma3 = "gemma", deepseek_v3 = "deepseek", mamba2 = "mamba", qwen3_next = "hybrid" }

local failures = 0
local function check(what, error, bound)
  if not (error <= bound) then
    failures = failures + 1
    print(("FAIL %s: %.3g, allowed %.3g"):format(what, error, bound))
  end
end

local function deviation(values)
  local sum, square = 0, 0
  for i = 1, #values do sum, square = sum + values[i], square + values[i] ^ 2 end
  return math.sqrt(square / #values - (sum / #values) ^ 2)
end

-- What the model's script hands to m.train.
local function model_of(file)
  local captured
  local train, generate = m.train, m.generate
  m.train, m.generate = function(o) captured = o end, function() end
  dofile(root .. "models/" .. file .. ".lua")
  m.train, m.generate = train, generate
  return captured
end

local function largest(actual, first, expected, std)
  local worst = 0
  for i = 1, #expected do
    local d = math.abs(actual[first + i] - expected[i])
    if d ~= d then return math.huge end
    worst = math.max(worst, d)
  end
  return worst / std
end

-- The alterations of variant n in a config.json's table.
local function alter(config, change)
  for key, value in pairs(change) do config[key] = value end
end

-- The gradients of the mean cross-entropy of the next token, of the fixture's tensors, in the file's order.
local function check_gradients(name, fixture, gradients, views_of)
  for tensor, expected in pairs(fixture) do
    local key = tensor:match "^gradient%.(.*)"
    if key then
      local actual, found = core.host("f32", #expected), false
      for state, gradient in pairs(gradients) do
        for _, view in ipairs(views_of(state)) do
          if view.name == key then
            found = true
            core.paste_view(actual, gradient, view)
          end
        end
      end
      if not found then check(name .. " has no gradient of " .. key, 1, 0) end
      check(("%s gradient of %s"):format(name, key), largest(actual, 0, expected, deviation(expected)), 1e-3)
    end
  end
end

local function run(name, options)
  local folder = root .. "tests/hf/" .. name
  local set = core.options()
  set.from = folder
  set.overrides = { { "seq", "24" }, { "batch", "2" } }
  local facts = core.json(io.open(folder .. "/expected.json"):read "a", "expected.json")
  if options.variant then alter(from.source().config, facts.variants[options.variant]) end
  local fixture = core.read_tensors(folder .. "/expected.safetensors")
  local o = model_of(FILES[name] or "llama")
  local views = require "mlua.hf_views"
  local states, outputs = {}, {}
  if o.layout and set.ranks > 1 then m.use_layout(o.layout, "hf") end
  local program = m.compile(function(feeds)
    local logits = o.model(feeds.tokens):cast "f32"
    local out = { logits = logits:permute(o.batch.name, o.seq.name, "vocab") }
    if not options.gradients then return out end
    local total, count = m.cross_entropy(logits:slice(o.seq.name, 0, o.seq.size - 1), feeds.tokens:slice(o.seq.name, 1, o.seq.size))
    states = m.parameters(o.model)
    for i, g in ipairs(core.grad(total, states)) do
      outputs[i] = ("gradient %d"):format(i)
      out[outputs[i]] = (g / count):permute(table.unpack(states[i]:axes()))
    end
    return out
  end, { tokens = { o.batch, o.seq, dtype = "i32" } })
  from.load(o.model)
  local result = program { tokens = fixture.ids }
  local std = deviation(fixture.logits)
  if options.variant then
    local expected, dims = fixture["variant." .. options.variant], fixture.logits:dims()
    local worst, moved, last = 0, 0, 3 * dims[3]
    for b = 0, dims[1] - 1 do
      for i = 1, last do
        local at = (b + 1) * dims[2] * dims[3] - last + i
        worst = math.max(worst, math.abs(result.logits[at] - expected[b * last + i]))
        moved = math.max(moved, math.abs(result.logits[at] - fixture.logits[at]))
      end
    end
    local what = ("%s with %s"):format(name, core.to_json(facts.variants[options.variant]))
    check(what, worst / std, options.bound or 1e-4)
    check(what .. " moves the logits too little: 1 -", 1 - moved / std, 1 - 1e-2)
    print(("%s: %.2g, moved %.2g"):format(what, worst / std, moved / std))
  else
    local worst = largest(result.logits, 0, fixture.logits, std)
    check(name .. " logits", worst, options.bound or 1e-4)
    print(("%s: logits %.2g of their standard deviation"):format(name, worst))
  end
  if options.gradients then
    local by_state = {}
    for i, p in ipairs(states) do by_state[p] = result[outputs[i]] end
    check_gradients(name, fixture, by_state, function(p)
      return views.of(views.forms(o.model.hf, p:name(), m.axes_of(p))[1], m.axes_of(p), o.model.hf.axes)
    end)
  end
  if failures > 0 then error(failures .. " checks failed", 0) end
end

return run
