-- Saves that may be interrupted, and what is left of them. The states of checkpoint `value` have that value, or one that
-- depends on it. do=save: into the folder step-N, and in the place of `same`; do=check: what is there is whole, of one save.
local m, core = require "mlua", require "mlua.core"
local cfg = m.config { ["do"] = "save", value = 1, layout = "dp" }
local A = m.axes { rows = 12, columns = 5000 }
local layout = m.layout {
  mesh = { { "dp", 1 }, { "tp", 1 } }, params = { tp = { "columns" } }, acts = { dp = { "rows" }, tp = { "columns" } }, state = { dp = "flat" },
}
m.use_layout(layout, "the script")
local states = {}
for i, axes in ipairs { { A.rows, A.columns }, { A.columns }, { A.rows }, {} } do
  states[i] = core.state { name = "w" .. i, axes = axes, kind = i == 1 and "parameter" or "optimizer", init = m.zeros(axes) }
end
local sizes = { 60000, 5000, 12, 1 }

local function values(state, size, value)
  local host = core.host("f32", size)
  for k = 1, size do host[k] = value * 1000000 + state * 100000 + k end
  return host
end

local function loaded() -- which save the states are of
  local first = states[1]:get()[1]
  local value = first // 1000000
  for i, state in ipairs(states) do
    local host, expected = state:get(), values(i, sizes[i], value)
    for k = 1, sizes[i] do
      if host[k] ~= expected[k] then core.fail(("state %d is torn"):format(i)) end
    end
  end
  return value
end

local function path(value) return ("all/step-%08d"):format(value) end
if cfg["do"] == "save" then
  local shapes = { { 12, 5000 }, { 5000 }, { 12 }, {} }
  for i, state in ipairs(states) do
    local host, flat = core.host("f32", table.unpack(shapes[i])), values(i, sizes[i], cfg.value)
    for k = 1, sizes[i] do host[k] = flat[k] end
    state:set(host)
  end
  m.save("same", nil, { record = { step = cfg.value } })
  m.save(path(cfg.value), nil, { record = { step = cfg.value } })
  core.checkpoint_remove(path(cfg.value - 1))
else
  local newest
  for _, checkpoint in ipairs(core.checkpoint_list "all") do
    if checkpoint.whole then newest = newest or checkpoint end
  end
  local record = m.load(newest.path)
  if loaded() ~= newest.step or record.step ~= newest.step then core.fail "the newest is of another step" end
  local same = m.load "same"
  if loaded() ~= same.step then core.fail "the replaced one is of another step" end
  core.write(("newest %d same %d\n"):format(newest.step, same.step))
end
