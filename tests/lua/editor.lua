-- The definitions that `mlua editor` writes.
local core = require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")
local binary = os.getenv "MLUA" or root .. "build/mlua"

local pipe = io.popen(("'%s' editor"):format(binary))
local stored = pipe:read "a"
pipe:close()

-- The definitions are Lua, and document every public function with each of its parameters.
check.equal(load(stored) ~= nil, true, "definitions that load")
local m = require "mlua"

-- What is wrong with the definition of a function: nil, or a text.
local function undocumented(name)
  local at, _, list = stored:find(("\nfunction %s(%%(.-%%)) end\n"):format(name:gsub("%.", "%%.")))
  if not at then return name .. ": no definition" end
  local comment = {}
  for line in stored:sub(math.max(1, at - 6000), at):gmatch "[^\n]*\n" do
    if line == "\n" then comment = {} else comment[#comment + 1] = line end
  end
  local above = table.concat(comment)
  if not above:find "^%-%-%-" then return name .. ": no text" end
  for parameter in list:gmatch "[%w_%.]+" do
    local known = parameter == "..." and above:find "%-%-%-@param %.%.%. " or above:find(("---@param %s"):format(parameter), 1, true)
    if not known then return ("%s: no @param for %s"):format(name, parameter) end
  end
end
-- The prompt lists all of them.
local listed = io.popen(("echo 'help(m)' | '%s' repl --device cpu"):format(binary)):read "a"
for name, value in pairs(m) do
  if type(value) == "function" then check.equal(listed:find("%f[%w_]" .. name .. "%f[^%w_]") ~= nil, true, "help(m) lists " .. name) end
end

local wrong = {}
local function document(prefix, t)
  for name, value in pairs(t) do
    if type(value) == "function" then wrong[#wrong + 1] = undocumented(prefix .. name) end
  end
end
document("m.", m)
document("m.init.", m.init)
document("m.layout.", m.layout)
table.sort(wrong)
check.equal(table.concat(wrong, "\n"), "", "what is not documented")

-- Classes have a field for each that their values have.
local function check_class(class, keys)
  local text = stored:match(("\n(%%-%%-%%-@class %s[:\n].-)\n\n"):format(class))
  check.equal(text ~= nil, true, "the class " .. class)
  for key in pairs(keys) do
    local known = text and (text:find(("---@field %s "):format(key), 1, true) or text:find(("---@field %s? "):format(key), 1, true))
    check.equal(known ~= nil, true, ("%s.%s"):format(class, key))
  end
end
local A = m.axes { embed = 4, batch = 2 }
local p = m.param { A.embed, name = "p" }
local terms
local mine = m.optimizer("mine", { lr = 0.1 }, function(value, gradient, _, t)
  terms = t
  return value - t.lr * gradient
end) {}
local program = m.compile(function() mine.update({ p }, m.grad((p * p):sum(), { p }), { rate = 1, step = 1 }) end)
check_class("RuleTerms", terms)
check_class("Optimizer", mine)
check_class("Plan", program:plan())
check_class("ParameterAttributes", m.attributes(p))
local layout = m.layout.megatron { stages = nil }
check_class("LayoutOptions", layout)
local _, message = pcall(m.train, { nothing = 1 })
local options = {}
for name in message.help:match "options: (.*)":gmatch "[%w_]+" do options[name] = true end
check_class("TrainOptions", options)
_, message = pcall(m.layout.megatron, { nothing = 1 })
options = {}
for name in message.help:match "options: (.*)":gmatch "[%w_]+" do options[name] = true end
check_class("LayoutPreset", options)
local Net = m.module("Net", function(self) self.w = m.param { m.axis("vocab", 256), A.embed } end)
function Net:forward(tokens)
  local x = self.w:gather(tokens, "vocab")
  m.add_loss(x:sum(), 1)
  return x:dot(self.w, "embed")
end
local outputs
local result = m.train {
  model = Net(), batch = A.batch, seq = m.axis("seq", 4), steps = 1, eval_every = 1, log_every = 10,
  on_step = function(_, out) outputs = out end,
}
check_class("StepOutputs", outputs)
check_class("TrainResult", result)
check.equal(stored:find("---Dtypes: floats of several", 1, true) ~= nil, true, "promotion of dtypes")
check.equal(m.rank(), 0, "the rank")
check.equal(select(2, m.rank()), 1, "ranks")
check.done()
