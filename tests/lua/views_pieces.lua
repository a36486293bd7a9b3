-- Views of tensors that are read in many pieces by several threads: transposed, a part of a joined tensor, cast; every element is
-- where the names of the axes say.
local m, core = require "mlua", require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")
local path = os.tmpname()

local R, C, K = 1300, 1111, 3
local A = m.axes { rows = R, columns = C, parts = K }
local function ramp(zero, a, b) return (zero + (m.iota(A[a]) * 7):cast "f32" + 0) + (zero + ((m.iota(A[b]) * 131):cast "f32")) end
local bases = {
  plain = core.state { name = "plain", axes = { A.columns, A.rows }, kind = "other", init = ramp(m.zeros { A.columns, A.rows }, "rows", "columns") },
  joined = core.state { name = "joined", axes = { A.columns, A.parts, A.rows }, dtype = "bf16", kind = "other",
    init = (ramp(m.zeros { A.columns, A.parts, A.rows }, "rows", "columns") + (m.zeros { A.columns, A.parts, A.rows } + m.iota(A.parts):cast "f32" * 0.1)):cast "bf16" },
}
local header, at = {}, 0
for _, t in ipairs { { "plain", "F32", 4, { C, R } }, { "joined", "BF16", 2, { C, K * R } } } do
  local bytes = t[4][1] * t[4][2] * t[3]
  header[t[1]] = { dtype = t[2], shape = setmetatable(t[4], { __list = true }), data_offsets = { at, at + bytes } }
  at = at + bytes
end
local text = core.to_json(header)
local writer = core.tensor_writer(path, text .. (" "):rep(-#text % 8))
writer:write(bases.plain:get())
writer:write(bases.joined:get())
writer:close()

local states = {}
for i, dtype in ipairs { "f32", "bf16", "f32", "bf16", "f64", "f32" } do
  local axes = i == 6 and { A.parts, A.columns, A.rows } or i % 2 == 1 and { A.rows, A.columns } or { A.columns, A.rows }
  states[i] = core.state { name = "to" .. i, axes = axes, dtype = dtype, kind = "other" }
end
local file = core.tensor_file(path)
local tensors = file:tensors()
local function view(name, offset, stride, count)
  return { file = file, place = tensors[name].place, offset = offset, stride = stride, start = { 0, 0, 0 }, count = count }
end
core.load_views({
  { states[1], { view("plain", 0, { 1, R }, { R, C }) } },
  { states[2], { view("plain", 0, { R, 1 }, { C, R }) } },
  { states[3], { view("joined", R, { 1, K * R }, { R, C }) } }, -- the second third
  { states[4], { view("joined", 2 * R, { K * R, 1 }, { C, R }) } },
  { states[5], { view("joined", 0, { 1, K * R }, { R, C }) } },
  { states[6], { view("joined", 0, { R, K * R, 1 }, { K, C, R }) } },
}, path)
local function third(i) return bases.joined:slice("parts", i, i + 1):sum "parts" end
local function apart(a, b) return (a:cast "f32" - b:cast "f32"):abs():max() end
local worst = m.compile(function()
  return {
    a = apart(states[1], bases.plain), b = apart(states[2], bases.plain:cast "bf16"), c = apart(states[3], third(1)),
    d = apart(states[4], third(2)), e = apart(states[5], third(0)), f = apart(states[6], bases.joined),
    differ = apart(third(0), third(1)),
  }
end)()
for name, value in pairs(worst) do check.equal(value > 0, name == "differ", name) end
os.remove(path)
check.done()
