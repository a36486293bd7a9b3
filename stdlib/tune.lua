-- `mlua tune`: the fastest layout of a script on so many GPUs, by predicted times.
--
-- Each candidate is a mesh, options of the layout (--layout) and a number of microbatches; the global batch, precision and
-- capacity stay as they are. A check of one GPU says what the model computes; an analytic estimate from that orders all
-- candidates and leaves out those whose states cannot fit. The first ones are planned and predicted by `mlua check`, several at once, and
-- each result corrects the estimates of candidates that resemble it (tune_candidates.lua). With --measure the best are run (tune_measured.lua).
local core = require "mlua.core"
local candidates = require "mlua.tune_candidates"
local command = require "mlua.tune_command"
local measured = require "mlua.tune_measured"

local LIMIT = 8.5 -- seconds of the search; with the output some 9 for 175 B parameters on 1,024 GPUs
local MORE = 3 -- so many times the limit more where nothing fits, or estimates say that what was found is poor
local POOR = 0.75 -- of the best: the estimated seconds of what is not planned yet
local IDLE = 6 -- rounds without a better layout that end it
local SHOWN = 5
local MEASURED = { tries = 5, steps = 8, last = 5, seconds = 600 }

local options = core.options()
local started = core.time()

-- Commands ------------------------------------------------------------------------------------------------------------------

-- The words that a candidate adds to a command, as one types them.
local function candidate_words(c, facts)
  local words, mesh, layout = {}, command.mesh(c.mesh, facts.mesh_names), {}
  for _, pair in ipairs(c.layout) do layout[#layout + 1] = pair[1] .. "=" .. tostring(pair[2]) end
  if facts.settings.accum then words[#words + 1] = ("accum=%d"):format(c.accum) end
  if mesh then table.move({ "--mesh", mesh }, 1, 2, #words + 1, words) end
  if #layout > 0 then table.move({ "--layout", table.concat(layout, ",") }, 1, 2, #words + 1, words) end
  if c.precision.name then table.move({ "--dtype", c.precision.name }, 1, 2, #words + 1, words) end
  return words
end

-- One GPU -------------------------------------------------------------------------------------------------------------------

local ENOUGH = 1e8 -- GiB: nothing is recomputed
local PARTS = { 8, 64, 512 } -- ranks that share a batch which one cannot have

-- The dtypes to choose from: those of --precision; else that of --dtype or the default alone, without a name. f16 is no faster than bf16.
local function precisions()
  local gpu = core.device().name ~= "cpu"
  local any = gpu and { "bf16", "fp8" } or { "f32", "bf16" }
  local list = options.precision == "any" and any or command.precisions(gpu and { "bf16", "fp8", "f16", "f32" } or { "f32", "bf16", "f16" }, "dtype")
  if list and options.dtype_name then core.fail "--dtype is one precision, and --precision has it searched" end
  local out = {}
  for i, name in ipairs(list or { false }) do out[i] = { name = name or nil } end
  return out
end

-- Of the precisions those that can be planned, with the seconds of a step on one GPU; and the report of the first of them. The checks
-- are of one of `parts` ranks among which the batch is split.
local function one_gpu(list, results, parts)
  local served, first, problem = {}, nil, nil
  for i, precision in ipairs(list) do
    local report, errors = command.report(results[i])
    if report then
      report.flops = parts * report.flops
      local wide = precision.name == "f32" or not precision.name and not report.device:find "NVIDIA"
      precision.seconds, precision.bytes = report.predicted and parts * report.predicted.seconds * (1 - report.predicted.exposed), wide and 4 or 2
      served[#served + 1], first = precision, first or report
    else
      problem = problem or errors
    end
  end
  return served, first, problem
end

-- The report of two stages of a batch of few samples, each a microbatch; nil where the script has no stages.
local function staged_finely(report)
  if not report.mesh.pp or not report.axes.batch then return nil end
  local cut = report.settings.accum and { ("accum=%d"):format(report.axes.batch) } or { "--layout", ("microbatches=%d"):format(report.axes.batch) }
  return command.report(core.run_program({ command.check(command.joined(cut, { "--mesh", "pp=2" }), ENOUGH) }, 1, 600)[1])
end

-- A check in each precision.
local function check_words(list, layout)
  local words = {}
  for i, precision in ipairs(list) do words[i] = command.check(command.joined(precision.name and { "--dtype", precision.name } or {}, layout), ENOUGH) end
  return words
end

-- What the script computes on one GPU, and how many layers it has.
local function read_facts()
  local wanted = precisions()
  local words = check_words(wanted, {})
  words[#words + 1] = command.check({ "--mesh", "pp=2" }, ENOUGH)
  local results = core.run_program(words, options.processors, 600)
  local served, report, errors = one_gpu(wanted, results, 1)
  for _, parts in ipairs(PARTS) do -- the batch may be too large for the kernels of one
    if report then break end
    local mesh = { "--mesh", ("dp=%d"):format(parts) }
    served, report = one_gpu(wanted, core.run_program(check_words(wanted, mesh), options.processors, 600), parts)
  end
  if not report then
    io.stderr:write(errors)
    core.fail "the script cannot be planned on one GPU, from which the search begins"
  end
  if not next(report.mesh) then
    core.fail("the script gives its programs no layout: there is nothing to choose", {
      help = "m.train{layout = m.layout.megatron{}}, or the same option of m.compile",
    })
  end
  if not report.predicted then
    core.fail("nothing is known of how fast the device is", {
      help = "--device a100, h100, h200 or b200; mlua doctor --bench measures this machine's",
    })
  end
  if options.global_batch > 0 and not report.settings.batch then core.fail "--batch: the script has no setting batch" end
  local staged = command.report(results[#words]) or staged_finely(report)
  local axes, layers, names = report.axes, staged and staged.layers or 1, {}
  for _, axis in ipairs { "pp", "dp", "ep", "cp", "tp" } do
    if report.mesh[axis] then names[#names + 1] = axis end
  end
  for axis in pairs(report.mesh) do
    local known = false
    for _, name in ipairs(names) do known = known or name == axis end
    if not known then
      core.fail(("the layout has a mesh axis %s, of which the search knows nothing"):format(axis), {
        help = "its axes are dp, tp, cp, pp and ep, as those of m.layout.megatron",
      })
    end
  end
  -- Of the logits, in layers.
  local share = axes.vocab and axes.embed and 6 * report.tokens * axes.vocab * axes.embed / report.flops or 0
  return {
    axes = axes, settings = report.settings, mesh = report.mesh, mesh_names = names, layers = layers, head = layers * share / math.max(0.5, 1 - share),
    parameters = report.parameters, tokens = report.tokens, predicted = report.predicted, gpus = options.gpus,
    hosts = options.hosts, documents = (report.predicted.documents or ""):find "^documents of" ~= nil, memory = core.device().memory_bytes, precisions = served, unit = report.samples and "samples" or "tokens",
  }
end

-- Search --------------------------------------------------------------------------------------------------------------------

-- A candidate's result, from the report of its check.
local function note(c, result)
  local report, errors = command.report(result)
  c.done = true
  if not report or not report.predicted then
    c.failed = (errors or ""):match "[^\n]*"
    return
  end
  c.seconds, c.predicted, c.tokens_per_s = report.predicted.seconds, report.predicted, report.predicted.tokens_per_s
  c.memory, c.process = report.peak_bytes, report.process_bytes
  c.fits = result.code == 0
end

local function best_of(list)
  local best
  for _, c in ipairs(list) do
    if c.fits and (not best or c.seconds < best.seconds) then best = c end
  end
  return best
end

-- Plan a batch of candidates; how many were.
local function plan(batch, facts, seconds)
  local words, planned = {}, 0
  for i, c in ipairs(batch) do words[i] = command.check(candidate_words(c, facts), options.memory) end
  local results = core.run_program(words, options.processors, seconds)
  for i, c in ipairs(batch) do
    if results[i] then
      note(c, results[i])
      planned = planned + 1
    end
  end
  return planned
end

local function search(facts, list)
  if options.every then return plan(list, facts, math.huge) end
  local planned, idle = 0, 0
  local jobs = options.processors
  local limit = options.within > 0 and options.within or LIMIT
  while idle < IDLE do
    local left = limit - (core.time() - started)
    local best, batch = best_of(list), candidates.next(list, 2 * jobs, best_of(list))
    if best and left <= 0 and batch[1] and batch[1].score < POOR * best.seconds then left = left + MORE * limit end
    if #batch == 0 or planned > 0 and left <= (best and 0 or -MORE * limit) then break end
    planned = planned + plan(batch, facts, best and left or 600)
    candidates.learn(list, facts.memory)
    idle = best and best_of(list) == best and idle + 1 or 0
  end
  local best = best_of(list)
  local others = best and candidates.counterparts(list, best) or {}
  return #others > 0 and planned + plan(others, facts, 600) or planned
end

-- Commands to paste ---------------------------------------------------------------------------------------------------------

local function ranks_of_host(facts) return facts.hosts > 0 and (facts.gpus - 1) // facts.hosts + 1 or facts.predicted.host_ranks end

local function run_command(c, facts)
  local words = command.joined({ "mlua", "run", options.script }, command.given(options.device_name == "cpu", { accum = facts.settings.accum }), candidate_words(c, facts), command.budget())
  if facts.gpus > 1 and facts.gpus <= ranks_of_host(facts) then table.move({ "-n", tostring(facts.gpus) }, 1, 2, #words + 1, words) end
  return command.text(words)
end

-- Measuring -----------------------------------------------------------------------------------------------------------------

local function median(list)
  table.sort(list)
  return (list[(#list + 1) // 2] + list[#list // 2 + 1]) / 2
end

-- --results, from its beginning on; what is written is added at its end.
local function open_results()
  local file, problem = io.open(options.results, "a+")
  return file or core.fail("--results: " .. problem)
end

-- What --results holds, by command: {command =, tokens_per_s =} or {command =, reason =}, an object a line; of several
-- measurements their median.
local function read_results()
  local known, rates, file = {}, {}, options.results and open_results()
  if not file then return known end
  for line in file:lines() do
    local result = core.json(line)
    local useless = result and result.tokens_per_s and result.tokens_per_s <= 0
    if result and result.command and not useless then
      local name = result.command
      known[name] = result
      rates[name] = rates[name] or {}
      rates[name][#rates[name] + 1] = result.tokens_per_s
      if #rates[name] > 0 then known[name] = { command = name, tokens_per_s = median(rates[name]) } end
    end
  end
  file:close()
  return known
end

local function add_result(result)
  if not options.results then return end
  local file = open_results()
  local cut = file:seek "end" > 0 and file:seek("end", -1) and file:read(1) ~= "\n" -- an earlier search ended within a line
  file:seek "end"
  file:write(cut and "\n" or "", core.to_json(result), "\n")
  file:close()
end

-- Tokens a second of a candidate that runs here, the median of its last steps; nil and the reason where it does not run.
local function measure(c, facts)
  local words = command.joined({ "run", options.script }, command.given(true, { accum = facts.settings.accum }), candidate_words(c, facts), command.budget(), { "--json", "--quiet" })
  if facts.gpus > 1 then table.move({ "-n", tostring(facts.gpus) }, 1, 2, #words + 1, words) end
  if facts.settings.steps then words[#words + 1] = ("steps=%d"):format(MEASURED.steps) end
  if facts.settings.sample then words[#words + 1] = "sample=0" end
  local result = core.run_program({ words }, 1, MEASURED.seconds)[1]
  if not result or result.code ~= 0 then return nil, result and result.errors:match "[^\n]*" or "it did not end" end
  local rates = {}
  for line in result.output:gmatch "[^\n]+" do
    local step = core.json(line)
    if step and step.tokens_per_s then rates[#rates + 1] = step.tokens_per_s end
  end
  if #rates == 0 then return nil, "it printed no step" end
  return median(table.move(rates, math.max(1, #rates - MEASURED.last + 1), #rates, 1, {}))
end

-- The same, of the results that are known; else it is measured.
local function result_of(c, facts, known)
  local name = run_command(c, facts)
  if not known[name] then
    local rate, reason = measure(c, facts)
    known[name] = { command = name, tokens_per_s = rate, reason = reason }
    add_result(known[name])
  end
  return known[name].tokens_per_s, known[name].reason
end

-- The candidates that lead are run one after another; what a run takes corrects the predictions of the others.
local function measure_best(facts, list, known)
  local possible = {}
  for _, c in ipairs(list) do
    if command.runs_here() or known[run_command(c, facts)] then possible[#possible + 1] = c end
  end
  for _ = 1, options.tries > 0 and options.tries or MEASURED.tries do
    local c = measured.leading(possible)
    if not c then break end
    local rate, reason = result_of(c, facts, known)
    c.measured, c.unmeasured = rate, not rate and reason or nil
    measured.correct(list, facts.tokens)
    if not options.json then
      io.write(rate and ("measured %8.0f %s/s, predicted %8.0f: %s\n"):format(rate, facts.unit, c.tokens_per_s, table.concat(candidate_words(c, facts), " "))
        or ("not measured: %s: %s\n"):format(table.concat(candidate_words(c, facts), " "), reason))
      io.flush()
    end
  end
end

-- Output --------------------------------------------------------------------------------------------------------------------

-- Why a candidate is slower than the best: the part of its step that is longer by most.
local function reason(c, best)
  if best.measured and c.measured then return ("measured %.1f %% slower"):format(100 * (best.measured / c.measured - 1)) end
  local name, mine, others = command.longest(c.predicted, 1, best.predicted, 1)
  return ("%.1f %% slower, most of it %s: %.4g ms a step, %.4g of the best"):format(100 * (c.seconds / best.seconds - 1), name, 1e3 * mine, 1e3 * others)
end

-- Which are printed: the best ones, and of each further precision the best; with --every all.
local function shown(ranked)
  local places, seen = {}, {}
  for i, c in ipairs(ranked) do
    if options.every or i <= SHOWN or not seen[c.precision] then places[#places + 1] = i end
    seen[c.precision] = true
  end
  return places
end

local function print_text(facts, ranked, planned, all)
  for _, i in ipairs(shown(ranked)) do
    local c = ranked[i]
    local p = c.predicted
    io.write(("%d  %.0f %s/s%s%s, %.1f ms a step%s, memory %s, bubble %.1f %%, exposed communication %.1f %%\n"):format(
      i, c.tokens_per_s, facts.unit, c.measured and (" (measured %.0f)"):format(c.measured) or "", c.precision.name and ", " .. c.precision.name or "", 1e3 * c.seconds,
      p.mfu > 0 and (", MFU %.1f %%"):format(100 * p.mfu) or "", command.size(c.process), 100 * p.bubble, 100 * p.exposed))
    if i > 1 then io.write("   ", reason(c, ranked[1]), "\n") end
    io.write("   ", run_command(c, facts), "\n")
  end
  if facts.gpus > ranks_of_host(facts) then
    io.write(("each of the %d ranks runs the command, %d on a host: under Slurm, torchrun or mpirun\n"):format(facts.gpus, ranks_of_host(facts)))
  end
  io.write(("%d layouts, %d of them planned, in %.1f s; predicted %s\n"):format(all, planned, core.time() - started, facts.predicted.rates))
end

local function print_json(facts, ranked, planned, all)
  local out = { layouts = all, planned = planned, seconds = core.time() - started, rates = facts.predicted.rates, best = core.list {} }
  for place, i in ipairs(shown(ranked)) do
    local c = ranked[i]
    out.best[place] = {
      command = run_command(c, facts), tokens_per_s = c.tokens_per_s, seconds = c.seconds, memory_bytes = c.process, bubble = c.predicted.bubble,
      exposed = c.predicted.exposed, mfu = c.predicted.mfu, measured = c.measured, dtype = c.precision.name, slower = i > 1 and reason(c, ranked[1]) or nil,
    }
  end
  io.write(core.to_json(out), "\n")
end

local function fail_small(list)
  local least, why
  for _, c in ipairs(list) do
    if c.process and (not least or c.process < least.process) then least = c end
    why = why or c.failed
  end
  if least then core.fail(("no layout fits: the smallest that was planned needs %s of each GPU"):format(command.size(least.process)), { help = "more --gpus, or a smaller batch" }) end
  core.fail("no layout can be planned" .. (why and ": " .. why or ""))
end

return function()
  if options.measure and not options.results then command.require_here() end
  local known, facts = read_results(), read_facts()
  local list = candidates.all(facts)
  if #list == 0 then
    core.fail(("no layout of %d GPUs divides the model and its batch"):format(facts.gpus), { help = "a batch that more numbers divide, or fewer --gpus" })
  end
  local all = #list
  if not options.every then list = candidates.promising(list) end
  local planned = search(facts, list)
  if not best_of(list) then fail_small(list) end
  if options.measure then measure_best(facts, list, known) end
  local ranked = candidates.ranked(list)
  if options.json then print_json(facts, ranked, planned, all) else print_text(facts, ranked, planned, all) end
end
