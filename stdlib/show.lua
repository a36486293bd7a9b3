-- `mlua show`: runs, checkpoints and safetensors files, as text, as JSON, as a page.
--
-- What is shown is read into a table first, of which the text and the page are made: so --json has all that they say.
-- By `kind`:
-- - run: path, about (settings.json), progress {step, steps, tokens, seconds}, last {series: value}, evaluation,
--   series {name: curve}, events, checkpoints, profile, torn (the last line of metrics is not whole; vm/show/show.h)
-- - checkpoint: path, record (of manifest.json), tensors, sums, verified
-- - safetensors: path, metadata, problem, tensors, sums
-- What is not finite is core.null. Files are only read. Bytes are bytes, times are seconds.
local core = require "mlua.core"
local tensors = require "mlua.show_tensors"
local text = require "mlua.show_text"

local KERNELS = 200 -- of a profile that are listed

local function exists(folder, name)
  local file = io.open(folder .. "/" .. name)
  return file ~= nil and file:close()
end

-- A run ----------------------------------------------------------------------------------------------------------------------

-- What the device did in the steps that were measured step by step, on the first rank.
local function is_kernel(event)
  return event.ph == "X" and event.pid == 0 and event.cat ~= "host" and event.cat ~= "run" and event.cat ~= "step"
    and type(event.dur) == "number" and event.dur >= 0
end

local function add_time(sums, key, event)
  local sum = sums[key] or { name = event.name, kind = event.cat, count = 0, seconds = 0.0 }
  sum.count, sum.seconds, sums[key] = sum.count + 1, sum.seconds + event.dur / 1e6, sum
end

local function slowest(sums)
  local list = {}
  for _, sum in pairs(sums) do list[#list + 1] = sum end
  table.sort(list, function(a, b) return a.seconds > b.seconds end)
  return core.list(table.move(list, 1, math.min(#list, KERNELS), 1, {}))
end

-- The profile as `mlua run --profile RUN/profile.json` writes it: time by kernel.
local function read_profile(folder)
  local names, kinds, steps, count, seconds = {}, {}, {}, 0, 0.0
  for _, event in ipairs(tensors.load_json(folder, "profile.json").traceEvents or {}) do
    if is_kernel(event) then
      local step = event.args and event.args.step or 0
      event.name, event.cat = event.name or "?", event.cat or "?"
      add_time(names, event.cat .. "\n" .. event.name, event)
      add_time(kinds, event.cat, event)
      seconds = seconds + event.dur / 1e6
      count, steps[step] = count + (steps[step] and 0 or 1), true
    end
  end
  return { seconds = seconds, steps = count, kinds = slowest(kinds), kernels = slowest(names) }
end

local function read_run(path, verify)
  local run = { progress = {}, last = {}, series = {} }
  if exists(path, "metrics.jsonl") then run = core.read_metrics(path .. "/metrics.jsonl") end
  run.kind, run.path = "run", path
  run.about = exists(path, "settings.json") and tensors.load_json(path, "settings.json") or {}
  if exists(path, "profile.json") then run.profile = read_profile(path) end
  local settings = type(run.about.settings) == "table" and run.about.settings or {}
  local steps = math.tointeger(run.about.steps) or math.tointeger(settings.steps) -- m.train's, else the script's
  run.progress.steps = steps
  run.checkpoints = tensors.read_checkpoints(path .. "/checkpoints", verify)
  return run
end

-- What a path is -------------------------------------------------------------------------------------------------------------

local function refuse_folder(path, names)
  local held = {}
  for _, name in ipairs(names) do
    local child = path .. "/" .. name
    if #held < 2 and (exists(child, "settings.json") or exists(child, "manifest.json")) then held[#held + 1] = child end
  end
  local what = #names == 0 and "%s is empty: no run, checkpoint or safetensors files"
    or "%s is no run (settings.json, metrics.jsonl), no checkpoint (manifest.json) and has no safetensors files"
  core.fail(what:format(path), { help = held[1] and "it holds others: mlua show " .. table.concat(held, " ") })
end

local function read(path, verify)
  path = path:match "^(.-)/*$"
  if path == "" then path = "/" end
  local names, problem = core.folder(path)
  if names then
    table.sort(names)
    if exists(path, "manifest.json") then return tensors.read_checkpoint(path, verify) end
    if exists(path, "settings.json") or exists(path, "metrics.jsonl") then return read_run(path, verify) end
    return tensors.read_folder(path, names) or refuse_folder(path, names)
  end
  if not problem:find "Not a directory" then core.fail(problem) end
  if not path:find "%.safetensors$" then
    local help = "mlua show takes the folder of a run or a checkpoint, or a file named *.safetensors"
    core.fail(path .. " is no safetensors file", { help = help })
  end
  return tensors.read_file(path)
end

-- The command ----------------------------------------------------------------------------------------------------------------

-- JSON inside a script element: no "<" of a name may end it.
local function write_page(path, shown)
  local data = core.to_json({ shown = shown }, 0, 7):gsub("<", "\\u003c")
  local file, problem = io.open(path, "wb")
  if file then
    local before, after = core.report_page():match "^(.*)@DATA@(.*)$"
    local _, failed = file:write(before, data, after)
    local closed, unwritten = file:close()
    problem = failed or not closed and unwritten
  end
  if problem then core.fail("cannot write " .. problem) end
end

return function()
  local options, shown = core.options(), {}
  for i, path in ipairs(options.paths) do shown[i] = read(path, options.verify) end
  if options.html then write_page(options.html, shown) end
  if options.json then
    io.write(core.to_json({ shown = shown }, 0, 9), "\n")
  elseif not options.html then
    text.write(shown, options.ascii)
  end
end
