-- Settings that a script declares and the command line overrides, and named axes.
local core = require "mlua.core"
local from = require "mlua.from"
local m = require "mlua"
local synonyms = require "mlua.synonyms"
local task = require "mlua.task"
local universal = require "mlua.universal"

local function names_of(t)
  local names = {}
  for name in pairs(t) do names[#names + 1] = name end
  return names
end

-- The override's text as a value of the default's type.
local function parse(key, text, default)
  local kind = math.type(default) or type(default)
  local value
  if kind == "integer" then
    value = math.tointeger(tonumber(text))
  elseif kind == "float" then
    value = tonumber(text)
    if value and math.abs(value) == math.huge then value = nil end
  elseif kind == "boolean" then
    value = ({ ["true"] = true, ["1"] = true, ["false"] = false, ["0"] = false })[text]
  elseif kind == "string" then
    value = text
  else
    core.fail(("the setting %s is a %s: the command line cannot set it"):format(key, kind))
  end
  if value == nil then
    core.fail(("%s=%s is not %s"):format(key, text, kind == "float" and "a number" or "of type " .. kind), {
      help = ("the script's default is %s=%s"):format(key, tostring(default)),
    })
  end
  return value
end

---Declare the script's settings with their defaults. `key=value` on the command line overrides one;
---`preset=NAME` first applies the table NAME of `presets`. A value has the type of its default. The
---result raises on unknown keys. A script has one m.config: each key of the command line must be in it.
---`hf` maps settings to the config.json of published models, both ways (hf_config.lua): with --from they are theirs, where the
---command line does not set them.
---@param defaults table settings; `presets` is a table of tables of settings
---@return table
function m.config(defaults)
  if type(defaults) ~= "table" then core.fail("m.config takes a table of settings, got " .. type(defaults)) end
  local presets = defaults.presets or {}
  if type(presets) ~= "table" then
    core.fail("presets is a table of tables of settings, got " .. m.shown(presets), { help = "presets = { small = { width = 4 } }" })
  end
  local values = {}
  for key, value in pairs(defaults) do
    if key ~= "presets" and key ~= "hf" then values[key] = value end
  end
  local known = names_of(values)
  if defaults.presets then known[#known + 1] = "preset" end
  local function check(key, before, after)
    if values[key] ~= nil then return end
    local guess = synonyms.setting(tostring(key), known)
    core.fail(before .. m.shown(key) .. after, {
      help = guess and ("did you mean %s?"):format(guess) or "settings: " .. table.concat(known, ", "),
    })
  end
  local function set(key, value, where)
    check(key, where .. " has no setting ", "")
    if type(value) ~= type(values[key]) then
      core.fail(("%s is a %s, and cannot become %s"):format(key, type(values[key]), m.shown(value)))
    end
    values[key] = math.type(values[key]) == "float" and math.type(value) == "integer" and value + 0.0 or value
  end
  for _, name in ipairs(names_of(presets)) do -- also of those that are not asked for
    local before, preset = "the preset " .. tostring(name), presets[name]
    if type(preset) ~= "table" then
      core.fail(before .. " must be a table of settings, got " .. m.shown(preset), {
        help = "presets = { small = { width = 4 } }",
      })
    end
    for _, key in ipairs(names_of(preset)) do check(key, before .. " sets ", ", which the configuration has not") end
  end
  local overrides = core.options().overrides
  for _, pair in ipairs(overrides) do
    if pair[1] == "preset" and defaults.presets then
      local preset = presets[pair[2]]
      if not preset then
        local guess = core.suggest(pair[2], names_of(presets))
        core.fail(("there is no preset %q"):format(pair[2]), {
          help = guess and ("did you mean %s?"):format(guess) or "presets: " .. table.concat(names_of(presets), ", "),
        })
      end
      for key, value in pairs(preset) do set(key, value, "the configuration") end
    end
  end
  for key, value in pairs(from.settings(values, defaults.hf)) do
    if values[key] ~= nil then set(key, value, "the configuration") end
  end
  for _, pair in ipairs(overrides) do
    local key, text = pair[1], pair[2]
    local common = universal.kinds[key]
    if common then universal.check(key, text) end
    if common and common[1](text) ~= text and values[key] ~= nil then
      values[key] = tonumber(text) or text -- save_every may be 500 or "15m", whatever its default is
    elseif not (key == "preset" and defaults.presets) and (values[key] ~= nil or not common) then
      local value = text -- set reports unknown keys
      if values[key] ~= nil then value = parse(key, text, values[key]) end
      set(key, value, "this script")
    end
  end
  if values.seed then core.set_seed(values.seed) end
  task.fit_window(values, overrides)
  m.settings, m.settings_hf = values, defaults.hf -- the last configuration: defaults of m.train
  return setmetatable({}, {
    __index = function(_, key)
      local value = values[key]
      if value == nil then
        local guess = synonyms.setting(tostring(key), known)
        core.fail(("the configuration has no setting %q"):format(tostring(key)), {
          help = guess and ("did you mean %s?"):format(guess) or "settings: " .. table.concat(known, ", "),
        })
      end
      return value
    end,
    __newindex = function(_, key, value) set(key, value, "the configuration") end,
    __pairs = function() -- in the order of the names
      local names, i = names_of(values), 0
      return function()
        i = i + 1
        return names[i], values[names[i]]
      end
    end,
  })
end

-- The divisors of `whole` next to `by`, which is none: in pairs of a divisor up to the root and its cofactor. Of a
-- whole beyond 2^40, whose root is above MOST, only those whose smaller one of the pair is at most MOST.
local function divisors_near(whole, by)
  local MOST, below, above = 1 << 20, nil, nil
  local function consider(d)
    if d < by and (not below or d > below) then below = d end
    if d > by and (not above or d < above) then above = d end
  end
  for d = 1, MOST do
    if d > whole // d then break end
    if whole % d == 0 then
      consider(d)
      consider(whole // d)
    end
  end
  return below, above
end

---One setting divided by another, which must divide it: m.quotient(cfg, "embed", "heads").
---@param cfg table the result of m.config
---@param whole string the name of a setting
---@param by string the name of another
---@return integer
function m.quotient(cfg, whole, by)
  if type(cfg) ~= "table" or type(whole) ~= "string" or type(by) ~= "string" then
    core.fail("m.quotient takes the settings and the names of two of them", { help = 'm.quotient(cfg, "embed", "heads"); numbers are divided by //' })
  end
  for _, name in ipairs { whole, by } do
    local value = math.tointeger(cfg[name])
    if not value or value < 1 then core.fail(("%s must be a positive integer, got %s"):format(name, m.shown(cfg[name]))) end
  end
  local n, d = math.tointeger(cfg[whole]), math.tointeger(cfg[by])
  if n % d == 0 then return n // d end
  local below, above = divisors_near(n, d)
  core.fail(("%s=%d does not divide %s=%d"):format(by, d, whole, n), {
    help = ("%s=%d%s would"):format(by, below, above and (" or %s=%d"):format(by, above) or ""),
  })
end

---Named axes with sizes.
---@param sizes table<string, integer>
---@return table<string, Axis>
function m.axes(sizes)
  if type(sizes) ~= "table" then core.fail("m.axes takes a table of sizes, got " .. type(sizes), { help = "m.axes { embed = 64 }" }) end
  local axes, known = {}, names_of(sizes)
  for _, name in ipairs(known) do
    if type(name) ~= "string" then
      core.fail(("m.axes takes sizes by name, got %s without one"):format(m.shown(sizes[name])), { help = "m.axes { batch = 4, seq = 128 }" })
    end
  end
  for _, name in ipairs(known) do
    local size = math.tointeger(sizes[name])
    if not size or size < 1 then
      core.fail(("axis %q cannot have size %s"):format(name, m.shown(sizes[name])), {
        help = "a size is a positive integer; divide with //",
      })
    end
    axes[name] = core.axis(name, size)
  end
  return setmetatable(axes, {
    __index = function(_, name)
      local guess = synonyms.setting(tostring(name), known)
      core.fail(("there is no axis %q"):format(tostring(name)), {
        help = guess and ("did you mean %s?"):format(guess) or "axes: " .. table.concat(known, ", "),
      })
    end,
  })
end

---One axis.
---@param name string
---@param size integer
---@return Axis
m.axis = core.axis
