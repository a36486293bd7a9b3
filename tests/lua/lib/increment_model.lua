-- A model of models/ at a small size, and its increments against its whole program (lib/increments.lua).
local m = require "mlua"
local core = require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check, increments = dofile(root .. "tests/lua/lib/check.lua"), dofile(root .. "tests/lua/lib/increments.lua")

-- The script up to m.train, with these settings; its model and its axes.
local function load_model(name, settings)
  local config, axes, A, model = m.config, m.axes, nil, nil
  m.config = function(spec)
    for key, value in pairs(settings) do spec[key] = value end
    return config(spec)
  end
  m.axes = function(sizes)
    A = axes(sizes)
    return A
  end
  m.train = function(options) model = options.model end
  m.generate = function() end
  dofile(root .. "models/" .. name .. ".lua")
  m.config, m.axes = config, axes
  return model, A
end

local function whole(model, batch, A)
  return m.compile(function(i) return m.log_softmax(30 * model(i.tokens):cast "f32", "vocab"):permute("batch", "seq", "vocab") end,
    { tokens = { m.axis("batch", batch), A.seq, dtype = "i32" } }, { name = "whole" })
end

local function numbers(state)
  return function(n)
    state = (state * 1103515245 + 12345) % 2147483648
    return state // 65536 % n + 1
  end
end

---Compares, or where `refused` is given checks that a refusal has this text.
return function(name, settings, refused)
  for key, value in pairs { batch = 1, seq = 24, layers = 2, data = "" } do settings[key] = settings[key] or value end
  local model, A = load_model(name, settings)
  core.compute_dtype "f32"
  local made = { A = A, forward = function(tokens) return 30 * model(tokens) end } -- logits that differ
  local ok, result = pcall(increments, made, function() return whole(model, 1, A) end, numbers(settings.draws or 7))
  if refused then
    check.equal(not ok and tostring(result):find(refused, 1, true) ~= nil, true, name .. ": " .. tostring(result))
  elseif check.equal(ok, true, name .. ": " .. tostring(result)) or ok then
    check.equal(result.worst <= 1e-5, true, ("%s: off by %g at %s"):format(name, result.worst, result.where))
    check.equal(result.argmax, 0, name .. ": positions with another argmax")
    if os.getenv "INCREMENT_SHOW" then
      print(("%s: off by %.2g in %d positions"):format(name, result.worst, result.positions))
      for _, k in ipairs(result.kept:list()) do print("  " .. k.name, k.kind, tostring(k.state), k.bytes) end
    end
  end
  check.done()
end
