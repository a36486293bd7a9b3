-- Whatever a public function or method is given, its message speaks of it and not of a line inside of the library.
local m = require "mlua"
local core = require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")

local A = m.axes { batch = 4, seq = 8, embed = 16, vocab = 256, ffn = 8, experts = 4 }
local x, w = m.input("x", { A.batch, A.seq, A.embed }), m.param { A.embed, A.seq, name = "w" }
local Net = m.module("Net", function(self) self.wte = m.param { A.vocab, A.embed } end)
function Net:forward(tokens) return self.wte:gather(tokens, "vocab"):dot(self.wte, "embed") end
local net = Net()

local VALUES = {
  "nil", "5", "-1.5", '"text"', "{}", "{ 1, 2 }", "{ x }", "{ A.embed }", "{ foo = 1 }", "x", "w", "A.embed", "net", "Net", "true", "false",
  "math.huge", "0/0", "function() return x end", 'm.host("i32", 4)',
}
local env = { x = x, w = w, A = A, net = net, Net = Net, m = m, math = math }
local values = {}
for i, text in ipairs(VALUES) do values[i] = load("return " .. text, text, "t", env)() end

local count = 0
local function try(label, fn, ...)
  local ok, message = pcall(fn, ...)
  core.take_updates()
  count = count + 1
  local line = not ok and tostring(message):match "[^\n]*mlua:[%w_]+%.lua:%d+[^\n]*"
  if line then check.equal(line, nil, label) end
  return not ok and tostring(message)
end

-- A function of a first value with every second one. Where those of six types are refused by the same words, the first is what
-- is refused, and others add nothing.
local TYPES, OTHERS = { 1, 2, 4, 5, 10, 19 }, { 3, 6, 7, 8, 9, 11, 12, 13, 14, 15, 16, 17, 18, 20 }
local function try_seconds(label, fn, ...)
  local arguments, last, same, first = { ... }, select("#", ...) + 1, true, nil
  local function try_one(j)
    arguments[last] = values[j]
    return try(label:format(VALUES[j]), fn, table.unpack(arguments, 1, last))
  end
  for n, j in ipairs(TYPES) do
    local message = try_one(j)
    if n == 1 then first = message end
    same = same and message and message == first
  end
  for _, j in ipairs(same and {} or OTHERS) do try_one(j) end
end

-- Functions of the library's own use, and those that do the same whatever they are given: write, train.
local OWN = " check_options check_tensor check_layout check_batch added_loss finish_totals other_parameters name_parameter name_created "
  .. "slot_state save report_untrained attributes shown use_layout step_program train generate training_log microbatches "
for name, fn in pairs(m) do
  if type(fn) == "function" and not OWN:find(" " .. name .. " ", 1, true) then
    try(name .. "()", fn)
    for i, first in ipairs(VALUES) do
      try(("%s(%s)"):format(name, first), fn, values[i])
      try_seconds(("%s(%s, %%s)"):format(name, first), fn, values[i])
    end
  end
end
for name, fn in pairs(core.tensor_methods) do
  try(("x:%s()"):format(name), fn, x)
  for i, first in ipairs(VALUES) do
    try(("x:%s(%s)"):format(name, first), fn, x, values[i])
    try_seconds(("x:%s(%s, %%s)"):format(name, first), fn, x, values[i])
  end
end

-- Every argument of a method in turn, beside right ones, as its signature lists them (of ops: ops.def).
local documentation = require "mlua.documentation"
local RIGHT = { ["Axis|string"] = "embed", Axis = A.ffn, integer = 2, Tensor = x, ["Axis[]"] = { A.embed }, string = "f32" }
for name, fn in pairs(core.tensor_methods) do
  local signature, kinds, right = core.documentation(fn), {}, {}
  for i, parameter in ipairs(documentation.split((signature or ""):match "^(.-)%->" or "")) do
    kinds[i] = parameter:match ": (.*)$" or ""
    right[i] = RIGHT[kinds[i]]
  end
  for i = 1, #kinds do
    for j, value in ipairs(VALUES) do
      local list = table.move(right, 1, #kinds, 1, {})
      list[i] = values[j]
      try(("x:%s with %s as argument %d"):format(name, value, i), fn, x, table.unpack(list, 1, #kinds))
    end
  end
end

-- Every option with every value.
local function options(label, names, call)
  for name in names:gmatch "%S+" do
    for i, text in ipairs(VALUES) do try(("%s{%s = %s}"):format(label, name, text), call, name, values[i]) end
  end
end
local function with(fields, key, value)
  fields[key] = value
  return fields
end
local q = m.zeros { A.seq, m.axis("heads", 2), m.axis("head_dim", 4) }
options("train", "model loss optimizer schedule steps batch seq vocab data accum clip eval_every eval_batches eval_share log_every seed skip on_step layout",
  function(key, value)
    if key == "steps" and value == 5 then return end
    m.train(with({ model = net, batch = A.batch, seq = A.seq, steps = 0 }, key, value))
  end)
options("generate", "prompt tokens temperature seq seed quiet", function(key, value)
  m.generate(net, with({ seq = A.seq, tokens = 0, quiet = true }, key, value))
end)
options("moe", "experts ffn top_k router normalize scale aux_loss aux_over z_loss bias_balance capacity shared expert seq init down_init",
  function(key, value) m.moe(with({ A.embed, experts = A.experts, ffn = A.ffn }, key, value))(x) end)
options("attention", "causal window scale score document seq heads head_dim", function(key, value) m.attention(q, q, q, { [key] = value }) end)
options("rope", "base seq head_dim offset positions", function(key, value) m.rope(q, { [key] = value }) end)
options("param", "init decay frozen", function(key, value)
  m.name_parameter(m.param { A.embed, A.ffn, [key] = value }, "p" .. count)
end)
options("buffer", "init name", function(key, value) m.buffer { A.embed, A.ffn, [key] = value } end)
options("rms_norm", "eps gain", function(key, value) m.rms_norm { A.embed, [key] = value }(x) end)
options("layer_norm", "eps bias", function(key, value) m.layer_norm { A.embed, [key] = value }(x) end)
options("cross_entropy", "axis label_smoothing z_loss ignore broadcast", function(key, value)
  m.cross_entropy(m.zeros { A.seq, A.vocab }, m.zeros({ A.seq }, "i32"), { [key] = value })
end)
options("layout", "mesh params acts state reshard stages exchange", function(key, value) m.layout(with({ mesh = { { "dp", 1 } } }, key, value)) end)
options("megatron", "pp dp ep cp tp sp zero context exchange schedule chunks microbatches reshard", function(key, value)
  m.layout.megatron { [key] = value }
end)
options("adamw", "lr beta1 eps weight_decay groups", function(key, value)
  local optimizer = m.adamw { [key] = value }
  m.compile(function() optimizer.update({ w }, { m.ones { A.embed, A.seq } }, { rate = 1, step = 1 }) end)
end)
options("cosine", "warmup final", function(key, value) m.cosine { [key] = value }(5, 10) end)
options("wsd", "warmup decay final", function(key, value) m.wsd { [key] = value }(5, 10) end)
options("compile", "name training layout microbatches often applies", function(key, value)
  m.compile(function(i) return i.x * 2 end, { x = { A.embed } }, { [key] = value })
end)
options("inputs", "x", function(key, value) m.compile(function(i) return i.x * 2 end, { [key] = value }) end)
options("feeds", "x y", function(key, value) m.compile(function(i) return i.x * 2 end, { x = { A.embed } }) { [key] = value } end)
options("axes", "a", function(key, value) m.axes { [key] = value } end)
options("state", "name axes dtype kind init", function(key, value) m.state { [key] = value } end)
options("config", "a presets", function(key, value) m.config { [key] = value } end)
assert(count > 30000)
check.done()
