-- A model of models/ against PyTorch (tests/parity/make_fixtures.py): logits, loss, every gradient and
-- ten AdamW steps; of a model with inputs of its own the loss and the gradients. Gives compare(name, file, settings).
-- f32 on the CPU; on a GPU f32 or bf16.
local m = require "mlua"
local core = require "mlua.core"

local root = core.options().script:match "^(.*)tests/lua/" or ""
local bf16 = core.compute_dtype() == "bf16"
local tolerance = bf16 and 2e-2 or core.device().name == "cuda" and 1e-4 or 1e-5
local step_tolerance = bf16 and 2e-2 or 1e-4
local failures = 0

-- Rounding the weights alone to bf16 moves gradients of BERT's pooled token, of a batch of three, by up to 1.3e-2 in f32.
local function tolerance_of(name) return bf16 and name == "bert" and 4e-2 or tolerance end

local function check(what, error, bound)
  if not (error <= bound) then
    failures = failures + 1
    print(("FAIL %s: %.3g, allowed %.3g"):format(what, error, bound))
  end
end

local function norm(values)
  local sum = 0
  for i = 1, #values do sum = sum + values[i] ^ 2 end
  return math.sqrt(sum)
end

-- The relative Frobenius distance; what is below a hundredth of `scale` (zero but for rounding, such as
-- the gradient of a key bias) is measured against that.
local function distance(actual, expected, scale)
  local difference = 0
  for i = 1, #expected do difference = difference + (actual[i] - expected[i]) ^ 2 end
  return math.sqrt(difference) / math.max(norm(expected), 1e-2 * (scale or 0))
end

-- What a model's script hands to m.train, under these settings.
local function model_of(file, settings)
  local config, train, generate, captured = m.config, m.train, m.generate, nil
  m.config = function(defaults)
    for key, value in pairs(settings) do defaults[key] = value end
    return config(defaults)
  end
  m.train = function(o) captured = o end
  m.generate = function() end
  dofile(root .. file)
  m.config, m.train, m.generate = config, train, generate
  return captured
end

local function compare(name, file, settings)
  local fixture = core.read_tensors(root .. "tests/parity/" .. name .. ".safetensors")
  local o = model_of(file, settings)
  o.model(core.input("tokens", { o.batch, o.seq }, "i32"))
  local parameters, names = m.parameters(o.model)
  for i, p in ipairs(parameters) do p:set(fixture["weight." .. names[i]]) end
  local whole = m.compile(function(feeds)
    local logits = o.model(feeds.tokens)
    local total, count = m.cross_entropy(logits, feeds.targets)
    local out = { logits = logits:cast "f32", loss = total / count }
    for i, g in ipairs(core.grad(total, parameters)) do out["grad." .. names[i]] = g / count end
    return out
  end, { tokens = { o.batch, o.seq, dtype = "i32" }, targets = { o.batch, o.seq, dtype = "i32" } })
  local result = whole { tokens = fixture.tokens, targets = fixture.targets }
  check(name .. " logits", distance(result.logits, fixture.logits), tolerance)
  check(name .. " loss", math.abs(result.loss / fixture.loss[1] - 1), tolerance)
  local worst, total = 0, 0
  for _, parameter in ipairs(names) do total = total + norm(fixture["grad." .. parameter]) ^ 2 end
  for _, parameter in ipairs(names) do
    local d = distance(result["grad." .. parameter], fixture["grad." .. parameter], math.sqrt(total))
    worst = math.max(worst, d)
    check(name .. " gradient of " .. parameter, d, tolerance)
  end
  o.optimizer, o.clip, o.accum = m.adamw { lr = 1e-2, weight_decay = 0.1 }, 1, 1
  local step = m.step_program(o, parameters)
  local worst_step = 0
  for i = 1, #fixture.losses do
    local out = step { tokens = fixture.tokens, targets = fixture.targets, rate = 1, step = i }
    local d = math.abs(out.loss / fixture.losses[i] - 1)
    worst_step = math.max(worst_step, d)
    check(("%s loss of step %d"):format(name, i), d, step_tolerance)
  end
  print(("%s: worst gradient %.2g, worst of ten losses %.2g"):format(name, worst, worst_step))
end

-- The loss of given inputs, what modules add to it, and the gradients of what is trained. PyTorch computes in f64: sums of
-- some dozens of products in f32 are within some 1e-6 of that.
local function compare_inputs(name, file, settings)
  local fixture = core.read_tensors(root .. "tests/parity/" .. name .. ".safetensors")
  local o = model_of(file, settings)
  local trained, names = {}, {}
  local program = m.compile(function(feeds)
    local total, count = o.loss(feeds)
    local added = m.added_loss(count)
    local out = { loss = total / count, added = added ~= nil and added / count or nil }
    trained, names = m.parameters(o.model)
    for i, g in ipairs(core.grad(added ~= nil and total + added or total, trained)) do out["grad." .. names[i]] = g / count end
    return out
  end, o.inputs)
  local expected, feeds, given = 0, {}, 0
  for key, value in pairs(fixture) do
    if key:find "^input%." then feeds[key:sub(7)] = value end
    if key:find "^weight%." then given = given + 1 end
    if key:find "^grad%." then expected = expected + 1 end
  end
  local all = m.parameters(o.model, { frozen = true })
  for _, p in ipairs(all) do p:set((assert(fixture["weight." .. p:name()], "PyTorch's model has no " .. p:name()))) end
  check(name .. " parameters", math.abs(#all - given) + math.abs(#trained - expected), 0)
  local result = program(feeds)
  check(name .. " loss", math.abs(result.loss / fixture.loss[1] - 1), tolerance)
  if fixture.added then check(name .. " added loss", math.abs(result.added / fixture.added[1] - 1), tolerance) end
  local worst, total = 0, 0
  for _, parameter in ipairs(names) do total = total + norm(fixture["grad." .. parameter]) ^ 2 end
  for _, parameter in ipairs(names) do
    local d = distance(result["grad." .. parameter], fixture["grad." .. parameter], math.sqrt(total))
    worst = math.max(worst, d)
    check(name .. " gradient of " .. parameter, d, tolerance_of(name))
  end
  print(("%s: worst gradient %.2g"):format(name, worst))
end

return function(name, file, settings)
  local kind = core.read_tensors(root .. "tests/parity/" .. name .. ".safetensors").losses and compare or compare_inputs
  kind(name, file, settings)
  if failures > 0 then error(failures .. " comparisons failed", 0) end
end
