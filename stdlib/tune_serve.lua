-- `mlua tune --serve`: over how many ranks a model is split, how many texts are generated at once and by which weights, for the most
-- tokens a second within bounds on the time of a token and of the first one. GPUs that one server does not need are further servers.
--
-- A candidate is a mesh and a dtype of weights. More texts at once make more tokens a second, until a step is longer than --latency or the
-- memory is full: the number grows from FIRST by GROWTH until then, and is bisected. What a step takes, `mlua check --serve` predicts.
local core = require "mlua.core"
local command = require "mlua.tune_command"

local LIMIT = 20 -- seconds of the search
local FIRST, MOST, GROWTH = 8, 1024, 8 -- texts at once
local MOST_TP = 8
local SHOWN = 5
local PROMPT = 512 -- tokens
local MEASURED, TRIES = 600, 5 -- seconds of one measurement; how many

local options = core.options()
local started = core.time()
local prompt = options.prompt_tokens > 0 and options.prompt_tokens or PROMPT

-- Candidates ----------------------------------------------------------------------------------------------------------------

-- The words of a check of what serves.
local function serve_words(words) return command.joined({ "--serve", "--prompt-tokens", tostring(prompt) }, words) end

-- What a model is by one rank, which generates one text.
local function read_facts()
  local words = command.check(serve_words { "--slots", "1" }, 0)
  local result = core.run_program({ words }, 1, 600)[1]
  local report, errors = command.report(result)
  if not report and options.gpus > 1 then -- it may be too large
    report, errors = command.report(core.run_program({ command.check(serve_words { "--slots", "1" }, 1e8) }, 1, 600)[1])
  end
  if not report then
    io.stderr:write(errors)
    core.fail "what the script generates cannot be planned on one GPU, from which the search begins"
  end
  if not report.predicted then
    core.fail("nothing is known of how fast the device is", { help = "--device a100, h100, h200 or b200; mlua doctor --bench measures this machine's" })
  end
  if report.increment.problem or not report.increment.chunk_seconds then
    core.fail("each token runs the whole program, for the model has no increment: " .. tostring(report.increment.problem or ""))
  end
  prompt = math.min(prompt, report.increment.context - 1)
  local names = {}
  for _, axis in ipairs { "pp", "dp", "ep", "cp", "tp" } do
    if report.mesh[axis] then names[#names + 1] = axis end
  end
  return {
    axes = report.axes, mesh = report.mesh, mesh_names = names, rates = report.predicted.rates,
    host = options.hosts > 0 and (options.gpus - 1) // options.hosts + 1 or report.predicted.host_ranks,
    context = report.increment.context, parameter_bytes = report.parameters * (report.device:find "NVIDIA" and 2 or 4),
    memory = core.device().memory_bytes,
  }
end

local function divides(n, ...)
  for _, size in ipairs { ... } do
    if size % n ~= 0 then return false end
  end
  return true
end

-- All ways to split the model over ranks of one host, whose number divides that of the GPUs.
local function meshes(facts)
  local list, axes = {}, facts.axes
  local function wide(n, name) -- tp
    return n == 1 or facts.mesh[name] and n <= MOST_TP and divides(n, axes.heads or 1, axes.kv_heads or axes.heads or 1, axes.ffn or n)
  end
  for ranks = 1, math.min(options.gpus, facts.host) do
    for tp = 1, options.gpus % ranks == 0 and ranks or 0 do
      local ep = ranks // tp
      local experts = ep == 1 or facts.mesh.ep and axes.experts and divides(ep, axes.experts)
      if ranks % tp == 0 and wide(tp, "tp") and experts then list[#list + 1] = { ranks = ranks, mesh = { tp = tp, ep = ep } } end
    end
    if ranks > 1 and options.gpus % ranks == 0 and facts.mesh.pp then list[#list + 1] = { ranks = ranks, mesh = { pp = ranks } } end
  end
  return list
end

-- What weights are held as: {name, of --weights or nil}. By predictions int8 and fp8 are alike: they are one candidate.
local function weights_of()
  local own, list, alike = options.dtype_name or (core.device().name == "cpu" and "f32" or "bf16"), {}, nil
  for _, name in ipairs(command.precisions({ own, "int8", "fp8" }, "kind of weights") or { own, "int8", "fp8" }) do
    if name == own then
      list[#list + 1] = { name = name }
    elseif alike then
      alike.name = alike.name .. " or " .. name
    else
      alike = { name = name, weights = name }
      list[#list + 1] = alike
    end
  end
  return list
end

local function all_candidates(facts)
  local list = {}
  for _, split in ipairs(meshes(facts)) do
    for _, weights in ipairs(weights_of()) do
      list[#list + 1] = { mesh = split.mesh, ranks = split.ranks, servers = options.gpus // split.ranks, weights = weights, points = {} }
    end
  end
  return list
end

local function words_of(c, facts, slots)
  local words, mesh = { "--slots", tostring(slots) }, command.mesh(c.mesh, facts.mesh_names)
  if mesh then table.move({ "--mesh", mesh }, 1, 2, #words + 1, words) end
  if c.weights.weights then table.move({ "--weights", c.weights.weights }, 1, 2, #words + 1, words) end
  return words
end

-- Search --------------------------------------------------------------------------------------------------------------------

local function texts(slots) return slots == 1 and "1 text" or ("%d texts at once"):format(slots) end

-- What so many texts at once are, by the report of their check.
local function point_of(c, slots, facts, result)
  local report, errors = command.report(result)
  if not report then return { slots = slots, failed = (errors or ""):match "[^\n]*" } end
  local step, read = report.predicted.seconds, report.increment.chunk_seconds
  local p = {
    slots = slots, seconds = step, predicted = report.predicted, memory = report.process_bytes, reading = step + read,
    first = (prompt + report.increment.chunk - 1) // report.increment.chunk * (step + read), tokens_per_s = c.servers * slots / step,
  }
  local loading = c.weights.weights and report.peak_bytes + facts.parameter_bytes / c.ranks or 0 -- all parameters are there before those of 8 bits have values
  if facts.memory > 0 and result.code == 0 and loading > facts.memory then
    p.over = ("%s while weights are loaded, with %s"):format(command.size(loading), texts(slots))
  elseif result.code ~= 0 then
    p.over = ("%s with %s"):format(command.size(p.memory), texts(slots))
  elseif options.latency > 0 and 1e3 * step > options.latency then
    p.over = ("%.3g ms a token with %s"):format(1e3 * step, texts(slots))
  elseif options.first > 0 and 1e3 * p.first > options.first then
    p.over = ("a first token after %.3g ms with %s"):format(1e3 * p.first, texts(slots))
  end
  return p
end

-- Yields the numbers of texts to plan, all of them powers of two, and is resumed with the point of each.
local function growing(c)
  local low, high, slots = nil, nil, FIRST
  while slots do
    local p = coroutine.yield(slots)
    c.points[#c.points + 1] = p
    if p.failed then return end
    if p.over then
      high, c.bound = slots, p.over
    else
      low = slots
    end
    if low == MOST or high == 1 then return end
    if not high then
      slots = math.min(MOST, GROWTH * low)
    elseif not low then
      slots = 1
    else
      local halvings = 0 -- of high to low
      while low << halvings < high do halvings = halvings + 1 end
      slots = halvings > 1 and low << halvings // 2 or nil
    end
  end
end

-- The point with the most tokens a second within the bounds; nil: none is.
local function best_point(c)
  local best
  for _, p in ipairs(c.points) do
    if not p.failed and not p.over and (not best or p.tokens_per_s > best.tokens_per_s) then best = p end
  end
  return best
end

-- Candidates grow, those first that make the most tokens; one of which nothing is known counts as if its servers were as fast as any found.
-- How many checks that took, and how many candidates were not grown to their bounds in time.
local function search(list, facts)
  local open, planned, batch, fastest = {}, 0, 2 * options.processors, 1 -- tokens/s of one server
  local limit = options.within > 0 and options.within or LIMIT
  for i, c in ipairs(list) do
    local grow = coroutine.wrap(function() growing(c) end)
    open[i] = { candidate = c, grow = grow, slots = grow(), number = i }
  end
  while #open > 0 and (planned == 0 or core.time() - started < limit) do
    local words, rest = {}, {}
    for _, one in ipairs(open) do one.hoped = one.rate or one.candidate.servers * fastest end
    table.sort(open, function(a, b)
      if a.hoped ~= b.hoped then return a.hoped > b.hoped end
      return a.number < b.number
    end)
    for i = 1, math.min(batch, #open) do
      words[i] = command.check(serve_words(words_of(open[i].candidate, facts, open[i].slots)), options.memory)
    end
    local results = core.run_program(words, options.processors, planned == 0 and 600 or math.max(1, limit - (core.time() - started)))
    for i, one in ipairs(open) do
      if results[i] then
        local c = one.candidate
        planned, one.slots = planned + 1, one.grow(point_of(c, one.slots, facts, results[i]))
        local best = best_point(c)
        one.rate = best and best.tokens_per_s or 0
        fastest = math.max(fastest, one.rate / c.servers)
      end
      if one.slots then rest[#rest + 1] = one end
    end
    open = rest
  end
  return planned, #open
end

-- Measuring -----------------------------------------------------------------------------------------------------------------

-- What a point takes on this machine; nil and the reason where it does not run.
local function measure(c, p, facts)
  local words = command.joined({ "serve", options.script, "--measure", "--quiet", "--prompt-tokens", tostring(prompt) }, command.given(true), words_of(c, facts, p.slots))
  if options.from then table.move({ "--from", options.from }, 1, 2, #words + 1, words) end
  if c.ranks > 1 then table.move({ "-n", tostring(c.ranks) }, 1, 2, #words + 1, words) end
  local result = core.run_program({ words }, 1, MEASURED)[1]
  if not result or result.code ~= 0 then return nil, result and result.errors:match "[^\n]*" or "it did not end" end
  return core.json(result.output:match "[^\n]*")
end

-- The best by predictions are run one after another; of servers on further GPUs one is.
local function measure_best(facts, ranked)
  for i = 1, math.min(options.tries > 0 and options.tries or TRIES, #ranked) do
    local c, p = ranked[i].c, ranked[i].point
    local found, problem = measure(c, p, facts)
    if found then
      p.measured, p.measured_first = c.servers * found.tokens_per_s, found.first_seconds
      if options.latency > 0 and 1e3 * found.seconds > options.latency or options.first > 0 and 1e3 * found.first_seconds > options.first then
        p.exceeds = ("measured, a token takes %.2f ms and a first one %.1f"):format(1e3 * found.seconds, 1e3 * found.first_seconds)
      end
    else
      p.exceeds = "not measured: " .. problem
    end
  end
end

-- Output --------------------------------------------------------------------------------------------------------------------

local function serve_command(c, p, facts)
  local words = command.joined({ "mlua", "serve", options.script }, command.given(options.device_name == "cpu"), { "--from", options.from or "DIR" }, words_of(c, facts, p.slots))
  if c.ranks > 1 then table.move({ "-n", tostring(c.ranks) }, 1, 2, #words + 1, words) end
  return command.text(words)
end

-- Why fewer tokens are made than by the best.
local function reason(c, p, best)
  if p.exceeds then return p.exceeds end
  if p.measured and best.point.measured then return ("%.1f %% fewer tokens/s, measured"):format(100 * (1 - p.measured / best.point.measured)) end
  local fewer = ("%.1f %% fewer tokens/s: "):format(100 * (1 - p.tokens_per_s / best.point.tokens_per_s))
  if c.bound and p.slots * c.servers < best.point.slots * best.c.servers then return fewer .. c.bound end
  local name, mine, others = command.longest(p.predicted, 1 / (p.slots * c.servers), best.point.predicted, 1 / (best.point.slots * best.c.servers))
  return fewer .. ("most of it %s: %.4g us a token, %.4g of the best"):format(name, 1e6 * mine, 1e6 * others)
end

local function print_text(facts, ranked, planned, all, cut)
  for i = 1, math.min(SHOWN, #ranked) do
    local c, p = ranked[i].c, ranked[i].point
    io.write(("%d  %.0f tokens/s%s, weights %s, %s%s: %.2f ms a token (%.2f while a prompt is read), first token %.1f ms, memory %s\n"):format(
      i, p.tokens_per_s, p.measured and (" (measured %.0f)"):format(p.measured) or "", c.weights.name, texts(p.slots), c.servers > 1 and (" on each of %d servers"):format(c.servers) or "", 1e3 * p.seconds, 1e3 * p.reading,
      1e3 * p.first, command.size(p.memory)))
    if i > 1 then io.write("   ", reason(c, p, ranked[1]), "\n") end
    if c.bound then io.write("   beyond the bounds: ", c.bound, "\n") end
    io.write("   ", serve_command(c, p, facts), "\n")
  end
  if cut > 0 then io.write(("%d of the candidates were not searched to their bounds in time: --within SECONDS\n"):format(cut)) end
  io.write(("%d layouts and weights, %d checks in %.1f s; texts of %d tokens, the first after prompts of %d; predicted %s\n"):format(
    all, planned, core.time() - started, facts.context, prompt, facts.rates))
end

local function print_json(facts, ranked, planned, all)
  local out = { candidates = all, planned = planned, seconds = core.time() - started, rates = facts.rates, context = facts.context, prompt = prompt, best = core.list {} }
  for i = 1, math.min(SHOWN, #ranked) do
    local c, p = ranked[i].c, ranked[i].point
    out.best[i] = {
      command = serve_command(c, p, facts), tokens_per_s = p.tokens_per_s, weights = c.weights.name, slots = p.slots, servers = c.servers, ranks = c.ranks,
      seconds = p.seconds, reading_seconds = p.reading, first_seconds = p.first, measured = p.measured, measured_first_seconds = p.measured_first, memory_bytes = p.memory, bound = c.bound, slower = i > 1 and reason(c, p, ranked[1]) or nil,
    }
  end
  io.write(core.to_json(out), "\n")
end

-- No candidate is within the bounds: which of them the fastest step breaks.
local function fail_bounds(list)
  local best, why
  for _, c in ipairs(list) do
    for _, p in ipairs(c.points) do
      why = why or p.failed
      if p.seconds and (not best or p.seconds < best.seconds) then best = p end
    end
  end
  if best then core.fail("no layout is within the bounds: the fastest takes " .. best.over, { help = "a longer --latency or --first, more --gpus or a smaller seq=" }) end
  core.fail("no layout can be planned" .. (why and ": " .. why or ""))
end

-- By what was measured within the bounds, then by predictions, last what measuring excluded.
local function sort(ranked)
  local function class(p) return p.exceeds and 3 or p.measured and 1 or 2 end
  table.sort(ranked, function(a, b)
    local p, q = a.point, b.point
    if class(p) ~= class(q) then return class(p) < class(q) end
    if (p.measured or p.tokens_per_s) ~= (q.measured or q.tokens_per_s) then return (p.measured or p.tokens_per_s) > (q.measured or q.tokens_per_s) end
    return a.number < b.number
  end)
end

return function()
  if options.measure then command.require_here() end
  local facts = read_facts()
  local list = all_candidates(facts)
  local ranked, planned, cut = {}, search(list, facts)
  for i, c in ipairs(list) do
    local point = best_point(c)
    if point then ranked[#ranked + 1] = { c = c, point = point, number = i } end
  end
  if #ranked == 0 then fail_bounds(list) end
  sort(ranked)
  if options.measure then
    measure_best(facts, ranked)
    sort(ranked)
  end
  if options.json then print_json(facts, ranked, planned, #list) else print_text(facts, ranked, planned, #list, cut) end
end
