-- The options of m.train: their kinds, defaults and the loss of a model's logits.
local core = require "mlua.core"
local m = require "mlua"
local dynamic = require "mlua.dynamic"
local own = require "mlua.train_inputs"
local tokenizer_files = require "mlua.tokenizer_files"
local universal = require "mlua.universal"

local options = {}

local OPTIONS = {
  "model", "loss", "optimizer", "schedule", "steps", "batch", "seq", "vocab", "data", "eval_data", "tokenizer", "pack", "accum", "clip", "grad_dtype",
  "loss_scale", "inputs", "sample", "eval_sample", "eval_every", "eval_batches", "eval_share", "log_every", "seed", "skip", "on_step", "layout", "generate",
}

function options.default_loss(o)
  local function loss(tokens, targets)
    local logits = o.model(tokens)
    if not core.is_tensor(logits) then core.fail("the model must return logits, got " .. m.shown(logits)) end
    for _, axis in ipairs(logits:axes()) do
      if axis ~= "vocab" and axis ~= o.batch.name and axis ~= o.seq.name and logits:has "vocab" then
        core.fail_axis(logits, axis,
          ("the model's logits have the axis %q, and m.train takes their %s, %s and vocab alone"):format(axis, o.batch.name, o.seq.name),
          ("sum over it there, as :dot(w, %q) does; logits with more axes need a loss of their own: m.train{loss = ...}"):format(axis))
      end
    end
    if not logits:has "vocab" then
      core.fail(("the model must return logits over the axis \"vocab\", got %s"):format(tostring(logits)), {
        help = "for other losses there is m.train{loss = function(tokens, targets) ... return sum, count end}",
      })
    end
    o.vocab = o.vocab or logits:size "vocab" -- what tokens are held against
    return m.cross_entropy(logits, targets)
  end
  return o.inputs and function(inputs) return loss(inputs.tokens, inputs.targets) end or loss
end
local function natural(x) return type(x) == "number" and math.tointeger(x) and x >= 0 end
local function integer(x) return type(x) == "number" and math.tointeger(x) end
local function positive(x) return natural(x) and x >= 1 end
local function count_of_parts(x) return positive(x) and x <= 1 << 30 end
local function is_axis(x) return type(x) == "userdata" and not core.is_tensor(x) end
local function callable(x) return type(x) == "function" or type(x) == "table" and getmetatable(x) and getmetatable(x).__call end
local function is_data(x) return type(x) == "string" or getmetatable(x) == "corpus" end

-- What each option must be, in words, and the test.
local KINDS = {
  model = { "a module", m.is_module, "calling a class makes one: local model = GPT()" },
  loss = { "a function", callable }, schedule = { "a function of (step, steps)", callable, "m.cosine{warmup = 100} gives one; a constant rate is the optimizer's lr" },
  optimizer = { "what m.adamw{...} gives", function(x) return type(x) == "table" and type(x.update) == "function" end, "m.adamw{lr = 3e-4}" },
  batch = { "an axis (A.batch)", is_axis }, seq = { "an axis (A.seq)", is_axis },
  steps = { "an integer, 0 or more", natural }, accum = { "an integer from 1 to 2^30", count_of_parts },
  loss_scale = { "a power of two, 1 or more", function(x) return type(x) == "number" and x >= 1 and x < math.huge and math.log(x, 2) % 1 == 0 end },
  clip = { "a number, 0 or more", function(x) return type(x) == "number" and x >= 0 end },
  grad_dtype = { '"f32" or "bf16"', function(x) return x == "f32" or x == "bf16" end },
  data = { "a file's name, or what m.corpus gives", is_data }, eval_data = { "a file's name, or what m.corpus gives", is_data },
  tokenizer = { "the file of a tokenizer", function(x) return type(x) == "string" end },
  pack = { '"concat" or "document"', function(x) return x == "concat" or x == "document" end },
  inputs = { "a table of axes by name", function(x) return type(x) == "table" end },
  sample = { "a function of (index, random)", function(x) return type(x) == "function" end },
  eval_sample = { "a function of (index, random)", function(x) return type(x) == "function" end },
  skip = { "an integer, 0 or more", natural },
  eval_every = { "an integer, 0 or more", natural }, eval_batches = { "a positive integer", positive },
  seed = { "an integer", integer }, vocab = { "a positive integer", positive }, eval_share = { "a share between 0 and 1", function(x) return type(x) == "number" and x > 0 and x < 1 end },
  log_every = { "a positive integer", positive }, on_step = { "a function of (step, outputs)", callable }, generate = { "a table", function(x) return type(x) == "table" end },
}

local function check_kinds(o)
  for _, key in ipairs(OPTIONS) do
    local kind = KINDS[key]
    if kind and o[key] ~= nil and not kind[2](o[key]) then
      core.fail(("m.train's %s must be %s, got %s"):format(key, kind[1], m.shown(o[key])), { help = kind[3] })
    end
  end
end

-- A loss that returns anything but a sum and a count is an error here and not deep in the step.
local function checked_loss(loss)
  return function(...)
    local total, count, results = loss(...)
    if not core.is_tensor(total) or not (core.is_tensor(count) or type(count) == "number") then
      core.fail(("m.train's loss must return a sum and a count, got %s and %s"):format(m.shown(total), m.shown(count)), {
        help = "such as m.cross_entropy(model(tokens), targets); for a mean return it and 1",
      })
    end
    return total, count, results
  end
end

-- The options with their defaults, in a table of their own.
function options.complete(given)
  m.check_options("train", given or {}, OPTIONS)
  local o, settings = {}, rawget(m, "settings") or {}
  for key, value in pairs(given or {}) do o[key] = value end
  for _, key in ipairs { "steps", "data", "eval_data", "tokenizer", "pack", "accum", "seed", "log_every", "eval_every" } do
    if o[key] == nil then o[key] = settings[key] end
  end
  for _, key in ipairs { "data", "eval_data", "tokenizer", "pack", "log_every", "eval_every" } do
    local given = universal.given(key)
    if given ~= nil then o[key] = given end
  end
  o.accum, o.steps, o.seed = o.accum or 1, o.steps or 100, o.seed or core.options().seed
  o.clip = o.clip == nil and 1 or o.clip
  o.schedule = o.schedule or m.constant()
  o.optimizer = o.optimizer or m.adamw()
  for _, key in ipairs { "model", "batch", not o.inputs and "seq" or nil } do
    if o[key] == nil then core.fail(("m.train needs %s, which is nil or not given"):format(key), { help = "m.train { model = model, batch = A.batch, seq = A.seq }" }) end
  end
  check_kinds(o)
  own.check(o, given)
  if o.seq and o.batch.name == o.seq.name then
    core.fail(("m.train's batch and seq are both the axis %q"):format(o.seq.name), { help = "batch = A.batch, seq = A.seq" })
  end
  if o.batch.size > (1 << 57) // (o.seq and o.seq.size or 1) then
    core.fail(("a step of batch=%d%s tokens: 2^57 are the most"):format(o.batch.size, o.seq and (" times %s=%d"):format(o.seq.name, o.seq.size) or ""))
  end
  o.step_tokens = o.batch.size * (o.seq and o.seq.size or 1) -- without seq, its samples
  m.use_layout(o.layout, "m.train")
  local parts = m.microbatches(o.accum)
  local task = core.options().task -- then nothing trains
  o.dynamic = not task and dynamic.read(o, parts) or nil
  if not task and not o.dynamic then m.check_batch(o.batch, o.seq, parts, o.accum) end
  o.accum = parts
  o.own_loss, o.loss_function = o.loss ~= nil, o.loss
  o.loss = checked_loss(o.loss or options.default_loss(o))
  if o.data == "" then o.data = nil end
  if o.pack == "document" and o.inputs then
    core.fail("pack=\"document\" is of data: m.train's inputs know of no documents", { help = "an input of your own may hold them: m.attention{document = inputs.documents}" })
  end
  if o.tokenizer == "" then o.tokenizer = nil end
  if not o.tokenizer and not o.inputs then o.tokenizer = tokenizer_files.of_weights() end
  if o.eval_every == 0 then o.eval_every = nil end
  o.eval_share = o.eval_share or 0.1
  o.eval_batches = o.eval_batches or 8
  return o
end

return options
