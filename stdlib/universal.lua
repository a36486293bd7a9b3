-- Settings of every script, whether it declares them with m.config or not. What the script declares, it uses itself; of the
-- others m.train takes what the command line says.
local core = require "mlua.core"
local m = require "mlua"

local universal = {}

local UNITS = { s = 1, m = 60, h = 3600, d = 86400 }

-- {steps = 500} or {seconds = 900}; {} where it is 0.
local function interval(text)
  local steps, count, unit = math.tointeger(tonumber(text)), tostring(text):match "^(%d+%.?%d*)([smhd])$"
  if steps and steps >= 0 then return steps > 0 and { steps = steps } or {} end
  if count and tonumber(count) > 0 then return { seconds = tonumber(count) * UNITS[unit] } end
end

-- {newest = 2, every = 1000}
local function keeping(text)
  local newest, every = tostring(text):match "^(%d+),?(%d*)$"
  newest, every = math.tointeger(tonumber(newest)), every ~= "" and math.tointeger(tonumber(every)) or nil
  if newest and newest >= 1 and (not every or every >= 1) then return { newest = newest, every = every } end
end

local function natural(text)
  local n = math.tointeger(tonumber(text))
  return n and n >= 0 and n or nil
end
local function positive(text)
  local n = natural(text)
  return n and n > 0 and n or nil
end
local function text(value) return type(value) == "string" and value or nil end
local function one_of(...)
  local known = { ... }
  return function(value)
    for _, name in ipairs(known) do
      if name == value then return value end
    end
  end
end

-- What reads each, and what it takes in words.
universal.kinds = {
  data = { text, "a file, a folder, or several with weights" }, eval_data = { text, "what data= takes" },
  tokenizer = { text, "a file" }, pack = { one_of("concat", "document"), "concat or document" },
  save_every = { interval, "a number of steps or a time: 500, \"15m\", \"2h\"; 0: at the end alone" },
  keep = { keeping, "how many of the newest checkpoints, and each of how many steps for ever: 2, \"2,1000\"" },
  on_nan = { one_of("stop", "skip"), "stop or skip" },
  check_every = { natural, "an integer, 0 or more: the steps between comparisons of replicas" },
  fp8_except = { text, "patterns of parameters' names: \"*.wo,blocks.0.*\"" },
  log_every = { positive, "a positive integer" }, eval_every = { natural, "an integer, 0 or more" },
}

---Raises unless the text of the command line is one of this setting.
---@param key string
---@param value string
function universal.check(key, value)
  local kind = universal.kinds[key]
  if kind[1](value) == nil then core.fail(("%s=%s: %s is %s"):format(key, value, key, kind[2])) end
end

---What the command line says of a setting that the script does not declare; nil where it does.
---@param key string
---@return any
function universal.given(key)
  local declared = rawget(m, "settings")
  if declared and declared[key] ~= nil then return nil end
  local found
  for _, pair in ipairs(core.options().overrides) do
    if pair[1] == key then
      universal.check(key, pair[2])
      found = universal.kinds[key][1](pair[2])
    end
  end
  return found
end

---A setting, declared or not, as its kind reads it; nil where nothing sets it.
---@param key string
---@return any
function universal.value(key)
  local declared = rawget(m, "settings")
  if not declared or declared[key] == nil then return universal.given(key) end
  local value = universal.kinds[key][1](declared[key])
  if value == nil then core.fail(("the setting %s is %s, and must be %s"):format(key, m.shown(declared[key]), universal.kinds[key][2])) end
  return value
end

---All settings as they are: those that the script declares, and those of every script that the command line gives.
---@return table<string, any>
function universal.all()
  local all = {}
  for key, value in pairs(rawget(m, "settings") or {}) do all[key] = value end
  for _, pair in ipairs(core.options().overrides) do
    if universal.kinds[pair[1]] and all[pair[1]] == nil then all[pair[1]] = tonumber(pair[2]) or pair[2] end
  end
  return all
end

return universal
