-- What training prints: a progress bar on a terminal, lines elsewhere, JSON objects with --json.
local core = require "mlua.core"
local m = require "mlua"

local function clock(seconds)
  if seconds >= 3600 then return ("%d:%02d:%02d"):format(seconds // 3600, seconds // 60 % 60, seconds // 1 % 60) end
  return ("%d:%02d"):format(seconds // 60, seconds // 1 % 60)
end

local function number(x)
  if x ~= x then return "NaN" elseif x == math.huge then return "Infinity" elseif x == -math.huge then return "-Infinity" end
  return ("%.17g"):format(x)
end

local function count(x)
  if x >= 1e6 then return ("%.2fM"):format(x / 1e6) elseif x >= 1e4 then return ("%.0fk"):format(x / 1e3) end
  return ("%.0f"):format(x)
end

---The log of a training run: .step(step, loss, grad_norm, lr), .eval(step, loss), .close().
---@param o table m.train's options
---@param flops number of one step
---@return table
function m.training_log(o, flops)
  local options, device = core.options(), core.device()
  local columns = not options.json and core.terminal()
  local tokens_step = o.batch.size * o.seq.size
  local log, started, last, smooth = {}, core.time(), core.time(), nil
  local peak = device.peak_flops or 0
  local every = o.log_every or (columns and 1 or math.max(1, o.steps // 20))
  local function line(step, loss, norm, lr, seconds)
    local speed = tokens_step / seconds
    local text = ("step %d/%d  loss %.4f  norm %.3f  lr %.2e  %s tok/s"):format(step, o.steps, loss, norm, lr, count(speed))
    local tflops = flops / seconds / 1e12
    text = text .. ("  %.2f TFLOP/s"):format(tflops)
    if peak > 0 then text = text .. ("  MFU %.1f%%"):format(100 * flops / seconds / peak) end
    text = text .. ("  %.2f GiB"):format(core.device().used_bytes / 2 ^ 30)
    return text .. ("  left %s"):format(clock((o.steps - step) * seconds))
  end
  local function bar(step, text)
    local width = columns - #text - 4
    if width < 8 then return text:sub(1, columns - 1) end
    local full = math.floor(width * step / o.steps)
    return "[" .. ("#"):rep(full) .. ("-"):rep(width - full) .. "] " .. text
  end
  function log.step(step, loss, norm, lr)
    local now = core.time()
    local seconds = now - last
    last = now
    if step == 1 then
      if not options.json then core.write_error(("first step after %.1f s (loss %.4f)\n"):format(now - started, loss)) end
    else
      smooth = smooth and 0.9 * smooth + 0.1 * seconds or seconds
    end
    if options.json then
      local speed = tokens_step / seconds
      core.write(([[{"step":%d,"loss":%s,"grad_norm":%s,"lr":%s,"tokens":%d,"tokens_per_s":%s,"tflops_per_gpu":%s,"mfu":%s,"memory_gib":%s,"step_ms":%s}]])
        :format(step, number(loss), number(norm), number(lr), step * tokens_step, number(speed), number(flops / seconds / 1e12),
          peak > 0 and number(flops / seconds / peak) or "null", number(core.device().used_bytes / 2 ^ 30), number(seconds * 1e3)) .. "\n")
    elseif step % every == 0 or step == 1 or step == o.steps then
      local text = line(step, loss, norm, lr, smooth or seconds)
      core.write(columns and "\r\27[K" .. bar(step, text) or text .. "\n")
    end
  end
  function log.eval(step, loss)
    if options.json then
      core.write(('{"step":%d,"eval_loss":%s}\n'):format(step, number(loss)))
    else
      core.write((columns and "\r\27[K" or "") .. ("step %d  evaluation loss %.4f\n"):format(step, loss))
    end
  end
  function log.close()
    if columns then core.write "\n" end
  end
  return log
end
