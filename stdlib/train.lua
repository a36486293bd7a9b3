-- The training loop: Lua over m.compile, m.grad, optimizers, schedules and data.
local core = require "mlua.core"
local dynamic = require "mlua.dynamic"
local from = require "mlua.from"
local m = require "mlua"
local given = require "mlua.given"
local evaluation_of = require "mlua.evaluation"
local kept = require "mlua.kept"
local known = require "mlua.known"
local loss_scale = require "mlua.loss_scale"
local nonfinite = require "mlua.nonfinite"
local open_data = require "mlua.train_data"
local open_own = require("mlua.train_inputs").open
local options_of = require "mlua.train_options"
local packed_rows = require "mlua.packed_rows"
local packing = require "mlua.packing"
local run = require "mlua.run"
local step_of = require "mlua.train_step"
local task = require "mlua.task"
local tokenizer_files = require "mlua.tokenizer_files"

---The options of m.train. steps, data, accum and seed default to the settings of those names in m.config.
---@class TrainOptions
---@field model Module the trained module; model(tokens) returns logits over batch, seq and vocab
---@field loss? fun(tokens: Tensor, targets: Tensor): Tensor, Tensor|number, table? a sum and a count, instead of the logits' cross-entropy, and further sums and counts by name; with inputs a function of their table
---@field batch Axis of the whole step
---@field seq? Axis positions; may be left out with inputs
---@field inputs? table<string, table> own examples: the axes of each input, the batch first, and its dtype, as in m.compile
---@field sample? fun(index: integer, random: Random): table<string, Host|table|number> makes the example of an index, from 0: a row of each input
---@field eval_sample? fun(index: integer, random: Random): table<string, Host|table|number> the same for evaluations, each of which begins at index 0
---@field optimizer? Optimizer default m.adamw{}
---@field schedule? fun(step: integer, steps: integer): number a factor of the optimizer's lr; default m.constant()
---@field steps? integer default 100
---@field data? string|Corpus text, .jsonl, tokens: files, folders, patterns, with weights (m.corpus); default: the text built in
---@field eval_data? string|Corpus what evaluations use, all of it; training then uses all of data
---@field tokenizer? string tokenizer.json, .tiktoken or .model, or "bytes": makes tokens of text, once; default: that of --from's weights, else bytes
---@field pack? string "concat" (default): attention crosses documents; "document": it does not, and positions begin anew in each
---@field vocab? integer what tokens are held against; default: the size of the logits' vocab
---@field accum? integer microbatches of a step; default 1
---@field clip? number bound of the gradient norm; default 1, 0: off
---@field grad_dtype? string "f32" (default), or "bf16": gradients are rounded, of each microbatch, before their norm and the optimizer
---@field loss_scale? number with --dtype f16, the scale of the mean loss at first; default 65536
---@field eval_every? integer steps between evaluations; 0: none
---@field eval_batches? integer of an evaluation; default 8
---@field eval_share? number of the data, its end, that evaluations use and training does not; default 0.1
---@field log_every? integer steps between lines
---@field seed? integer of the order of the data
---@field skip? integer samples before the first; default: those that the model has seen of these data, 0 in its first training
---@field on_step? fun(step: integer, outputs: StepOutputs): table<string, number>? called after each step; the numbers that it returns are in the step's line of a run's metrics
---@field generate? {input: string, axis: Axis, prompt: integer[], stop: integer[], encode: fun(text: string, tokens: fun(text: string): integer[]): integer[], names: table<integer, string>, model: fun(tokens: Tensor, inputs: table<string, Tensor>): Tensor} how a model of own inputs generates: `mlua generate` puts a prompt into `input`, as the ids that `encode` makes of it, and continues `prompt` along `axis`; `names` are texts of ids that are none of the tokenizer's; `model` gives the logits, where forward takes more than the inputs
---@field layout? Layout how tensors are sharded

---What on_step gets.
---@class StepOutputs
---@field loss number
---@field grad_norm number before clipping
---@field aux_loss? number what modules add (m.add_loss)
---@field [string] number what the loss returns beside its sum and count, by name

---What m.train returns; under mlua check all fields are nil.
---@class TrainResult
---@field loss? number of the last step
---@field eval_loss? number of the last evaluation
---@field steps? integer
---@field [string] number what the loss returns beside its sum and count, of the last step; and of the last evaluation (eval_accuracy)

local function set(result, list)
  for _, pair in ipairs(list) do result[pair[1]] = pair[2] end
end

---Train a model. `model(tokens)` returns logits, or `loss(tokens, targets)` a sum and a count. batch
---and seq are axes (batch is the whole step's); `accum` cuts a step into microbatches; `clip`
---bounds the gradient norm (default 1; 0: off); `data` is what m.corpus takes
---(default: the text built in); `eval_every` measures the loss on the last `eval_share` of the data
---that often. Prints a line or progress bar; returns {loss=, eval_loss=, steps=}.
---One more training of a model continues: in the data, by the number of samples, whatever the batch (each file and seed has a
---number of its own); in dropout's draws; in the updates that an optimizer counts, where it is the same one. Another model
---begins at the first sample. `skip = 0` begins again.
---Own examples: `inputs = {tokens = {A.batch, A.seq, dtype = "i32"}, image = {A.batch, A.pixels}}`, `sample(index, random)`, which
---returns a row of each, and `loss(inputs)`. A rank makes the examples of its own rows alone, while the device computes; an
---example must follow from its index and what `random` draws, so that every layout, accumulation and restart sees the same ones.
---A third value of the loss, { accuracy = {sum, count} }, is summed over microbatches and ranks, divided, and part of each line, of
---what --json prints, of on_step's outputs and of the result. Evaluations begin at index 0 of eval_sample and give eval_accuracy.
---`steps`, `data`, `accum` and `seed` default to the settings of those names in m.config.
---@param options TrainOptions
---@return TrainResult
function m.train(options)
  local o = options_of.complete(options)
  given.declare(o.model, o.inputs, o.generate)
  task.take(o.model, o.seq)
  tokenizer_files.of_model[o.model] = o.tokenizer
  local mode = core.options().mode
  local data = mode ~= "check" and (o.inputs and open_own or open_data)(o)
  if o.seq then
    core.sequence_axis(o.seq)
    packing.seq = o.seq.name
  end
  local whole = mode == "check" and not o.own_loss and kept.trace(o.model, o.seq) or nil
  if not o.own_loss and not whole then -- layers that are created while the model runs
    if o.accum > 1 and not o.dynamic then step_of.cut_batch(o, { micro = m.full({}, 0, "i64") }) end
    o.model(core.input("tokens", { core.axis(o.batch.name, o.dynamic and 1 or o.batch.size // o.accum), o.seq }, "i32"))
    m.context.micro = nil
  end
  local step_program, micro, finish, rows, runner
  if o.dynamic then
    if mode == "check" then dynamic.note_check(o, packed_rows.places(o)) end
    rows, finish = step_of.dynamic_step(o)
    micro = dynamic.lead(o, rows).program
  elseif o.accum == 1 then
    step_program = m.step_program(o)
  else
    micro, finish = step_of.accumulated_step(o)
  end
  local programs = step_program and { step_program } or { micro, finish }
  local stated, times, parts = programs[1], o.accum, nil -- the program by whose runs a step's time and work are stated
  if rows then stated, times, parts = dynamic.stated(o, rows) end
  local evaluation = o.eval_every and evaluation_of(o, data, function() return runner end)
  from.load(o.model) -- once the programs are made, and every rank knows which states it holds
  if mode == "check" then
    local all = { stated, finish }
    all[#all + 1] = evaluation and evaluation.program
    for _, row in ipairs(rows or {}) do
      if row.program and row.program ~= stated then all[#all + 1] = row.program end
    end
    if rows then stated:microbatches(parts) end
    known.note_training(o)
    local runs, lengths = packed_rows.read(o, stated, rows)
    core.report(all, { runs = runs, lengths = lengths, tokens = o.step_tokens, samples = not o.seq, accum = times, flops = rows and dynamic.flops(o, rows), partial = rows and dynamic.partial(rows), step = #programs, kept = kept.report(o.model, o.seq, whole), groups = o.dynamic and dynamic.describe(o, rows) })
    local zeros = { loss = 0, eval_loss = evaluation and 0, steps = 0 } -- programs return zeros, too
    for _, r in ipairs(o.results) do zeros[r.name], zeros["eval_" .. r.name] = 0, evaluation and 0 end
    return zeros
  end
  local keeper = run.begin(o, data)
  data.begin(programs[1])
  runner = rows and dynamic.runner(o, rows, data)
  if keeper.done > 0 then o.progress.advance(o.batch.size * keeper.done, keeper.done) end
  if evaluation and not keeper.result then evaluation.prepare() end
  local flops = stated:plan().flops * times + (finish and finish:plan().flops or 0)
  if keeper.result then return keeper:over(keeper.result) end
  keeper:start(programs)
  core.begin_step() -- what runs ahead of step 1 is none
  if runner then runner.begin() end
  local log = m.training_log(o, flops, programs[1])
  local result, warned, before = keeper.last or {}, false, o.progress.steps()
  local step = keeper.done
  result.steps = step
  while step < o.steps do
    step = step + 1
    log.outside(core.begin_step, step, o.steps) -- which writes a profile
    local rate = o.schedule(step, o.steps)
    if type(rate) ~= "number" or rate ~= rate or math.abs(rate) == math.huge then
      core.fail(("the schedule must return a number, got %s at step %d"):format(nonfinite.plain(rate), step), { help = "a factor of the optimizer's lr" })
    end
    if runner then
      keeper:lose("data", data.fill, step, 0)
      runner.start(before + step)
    end
    for i = 0, runner and -1 or o.accum - 1 do
      keeper:lose("data", data.fill, step, i)
      local program = step_program or micro
      local feeds = step_of.feeds(data, { step = before + step })
      if step_program then feeds.rate = rate else feeds.micro, feeds.first = i, i == 0 end
      program:start(feeds)
    end
    if finish then
      (runner or micro):finish()
      finish:start { rate = rate, step = before + step }
    end
    data.fill(step + 1, 0) -- while the device works
    if runner then runner.plan() end
    keeper:write()
    local out = (step_program or finish):finish()
    result.loss, result.steps = out.loss, step
    if out.uneven == 1 and not warned then step_of.warn_uneven(o.accum) end
    warned, out.uneven = warned or out.uneven == 1, nil
    local skipped = loss_scale.skipped(out)
    if not skipped and (out.loss ~= out.loss or out.grad_norm ~= out.grad_norm or math.abs(out.grad_norm) == math.huge) then
      local back = keeper:back(step)
      if not back then
        log.close()
        nonfinite.explain(o, data, before, step, out.loss, out.grad_norm, runner)
      end
      step = back
      goto continue
    end
    o.progress.advance(o.batch.size, 1)
    local further = step_of.results(o, out)
    set(result, further)
    if out.loss_scale then further[#further + 1] = { "loss_scale", out.loss_scale } end
    local fields = log.step(step, out.loss, not skipped and out.grad_norm, rate * o.optimizer.lr, further)
    keeper:step(step, fields, out, o.on_step and o.on_step(step, out))
    if evaluation and (step % o.eval_every == 0 or step == o.steps) then
      result.eval_loss, further = keeper:lose("eval", evaluation.loss, step)
      set(result, further)
      log.eval(step, result.eval_loss, further)
      keeper:eval(result.eval_loss, further)
    end
    if keeper:between(result) then break end
    ::continue::
  end
  keeper:over(result)
  core.begin_step()
  log.close()
  if runner then runner.report() end
  return result
end
