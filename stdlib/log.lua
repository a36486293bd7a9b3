-- What training prints: a progress bar on a terminal, lines elsewhere, JSON objects with --json.
local core = require "mlua.core"
local m = require "mlua"
local run = require "mlua.run"

local function clock(seconds)
  if seconds >= 3600 then return ("%d:%02d:%02d"):format(seconds // 3600, seconds // 60 % 60, seconds // 1 % 60) end
  return ("%d:%02d"):format(seconds // 60, seconds // 1 % 60)
end

-- "nan" whatever its sign bit is.
local function decimal(format, x) return x ~= x and "nan" or format:format(x) end

local function count(x)
  if x >= 1e6 then return ("%.2fM"):format(x / 1e6) elseif x >= 1e4 then return ("%.0fk"):format(x / 1e3) end
  return ("%.0f"):format(x)
end

local since = core.time() -- when the script began, or its last training ended: what precedes a first step

---The log of a training run: .step(step, loss, grad_norm, lr), which gives what the step's line in metrics says,
---.eval(step, loss), .close(); .outside(fn, ...) runs what belongs to no step.
---@param o table m.train's options
---@param flops number of one step
---@param program Program the one that runs most often: a pipeline's says how long its ranks wait
---@return table
function m.training_log(o, flops, program)
  local options, device = core.options(), core.device()
  local columns = not options.json and not options.quiet and core.terminal()
  local remarks = not options.json and not options.quiet and options.rank == 0
  local tokens_step, unit = o.step_tokens, o.seq and "tok" or "samples"
  local log, last, smooth, first = {}, core.time(), nil, true
  local peak, busy = device.peak_flops or 0, 0
  local lines = o.log_every or math.max(1, o.steps // 20)
  local every = columns and (o.log_every or 1) or lines
  -- What a line says: each part with its rank. The highest ranks go first where the columns are few.
  local function parts(step, loss, norm, lr, seconds, further)
    local list = {
      { 1, ("step %d/%d"):format(step, o.steps) }, { 2, "loss " .. decimal("%.4f", loss) }, { 6, norm and "norm " .. decimal("%.3f", norm) or "skipped" },
      { 7, ("lr %.2e"):format(lr) }, { 4, count(tokens_step / seconds) .. " " .. unit .. "/s" },
      { 5, ("%.2f TFLOP/s"):format(flops / seconds / 1e12) },
      { peak > 0 and 5 or 9, peak > 0 and ("MFU %.1f%%"):format(100 * flops / seconds / peak) },
      { 8, ("%.2f GiB"):format(core.device().used_bytes / 2 ^ 30) }, { 3, "left " .. clock((o.steps - step) * seconds) },
    }
    for i, pair in ipairs(further) do table.insert(list, 2 + i, { 3, pair[1] .. " " .. decimal("%.4f", pair[2]) }) end
    return list
  end
  local function join(list, highest)
    local kept = {}
    for _, part in ipairs(list) do
      if part[2] and part[1] <= highest then kept[#kept + 1] = part[2] end
    end
    return table.concat(kept, "  ")
  end
  local function bar(step, list)
    local text, highest = join(list, 9), 9
    while highest > 1 and #text + 14 > columns do
      highest = highest - 1
      text = join(list, highest)
    end
    local width = columns - #text - 4
    if width < 1 then return text:sub(1, columns - 1) end
    local full = math.floor(width * step / o.steps)
    return "[" .. ("#"):rep(full) .. ("-"):rep(width - full) .. "] " .. text
  end
  local reported = false
  local function report_bubble(measured, predicted, planned)
    reported = true
    core.write_error(("pipeline of %d microbatches: bubble %.1f%%, predicted %.1f%% from times of three steps (planned %.1f%%)\n")
      :format(o.accum, 100 * measured, 100 * predicted, 100 * planned))
  end
  function log.outside(fn, ...)
    local begun, before = core.time(), options.profile and core.device().busy_seconds
    fn(...)
    last = last + core.time() - begun
    if before then busy = busy + core.device().busy_seconds - before end
  end
  -- What --json prints and metrics.jsonl holds: {name, value}.
  local function fields_of(step, loss, norm, lr, seconds, further, bubble, predicted, planned)
    local list = {
      { "step", step }, { "loss", loss }, { "grad_norm", norm }, { "lr", lr }, { "tokens", step * tokens_step },
      { "tokens_per_s", tokens_step / seconds }, { "tflops_per_gpu", flops / seconds / 1e12 },
      { "mfu", peak > 0 and flops / seconds / peak }, { "memory_gib", core.device().used_bytes / 2 ^ 30 }, { "step_ms", seconds * 1e3 },
    }
    local function add(name, value) list[#list + 1] = { name, value } end
    table.move(further, 1, #further, #list + 1, list)
    if bubble then
      add("bubble", bubble)
      add("bubble_predicted", predicted)
      add("bubble_planned", planned)
    end
    if options.profile then -- the device's share of the step
      local all = core.device().busy_seconds
      add("device_ms", (all - busy) * 1e3)
      add("busy", (all - busy) / seconds)
      busy = all
    end
    return list
  end
  function log.step(step, loss, norm, lr, further)
    local now = core.time()
    local seconds = now - last
    last = now
    if first then
      if remarks then core.write_error(("first step after %.1f s (loss %s)\n"):format(now - since, decimal("%.4f", loss))) end
    else
      smooth = smooth and 0.9 * smooth + 0.1 * seconds or seconds
    end
    local bubble, predicted, planned = program:bubble()
    if bubble and not reported and remarks then report_bubble(bubble, predicted, planned) end
    local shown, logged = step % every == 0 or first or step == o.steps, step % lines == 0 or first or step == o.steps
    first = false
    local list = (shown or logged) and parts(step, loss, norm, lr, smooth or seconds, further)
    if logged and options.out then core.log_text(join(list, 9) .. "\n") end
    local fields = (options.json or options.out) and fields_of(step, loss, norm, lr, seconds, further, bubble, predicted, planned)
    if options.json then
      core.write_json(run.encode(fields) .. "\n")
    elseif shown and not options.quiet then
      core.write(columns and "\r\27[K" .. bar(step, list) or join(list, 9) .. "\n")
    end
    return fields
  end
  function log.eval(step, loss, further)
    local text = ("step %d  evaluation loss %s"):format(step, decimal("%.4f", loss))
    for _, pair in ipairs(further) do text = text .. "  " .. pair[1]:sub(6) .. " " .. decimal("%.4f", pair[2]) end
    core.log_text(text .. "\n")
    if options.json then
      core.write_json(run.encode { { "step", step }, { "eval_loss", loss }, table.unpack(further) } .. "\n")
    elseif not options.quiet then
      core.write((columns and "\r\27[K" or "") .. text .. "\n")
    end
  end
  function log.close()
    if columns then core.write "\n" end
    since = core.time()
  end
  return log
end
