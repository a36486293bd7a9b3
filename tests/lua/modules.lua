-- Modules: their fields, frozen parameters, and what is in force while a forward function runs.
local m = require "mlua"
local core = require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")

local A = m.axes { embed = 4, ffn = 6 }
local Inner = m.module("Inner", function(self) self.gain, self.mean = m.param { A.embed, init = "ones" }, m.buffer { A.embed } end)
function Inner:forward(x)
  self.mean:assign(0.5 * self.mean:read() + x)
  return x * self.gain
end
local Outer = m.module("Outer", function(self)
  self.zeta = m.param { A.embed, A.ffn }
  self.alpha = 3
  self.layers = { Inner(), Inner() }
  self.gone = 1
  self.gone = nil
  self.last = self.layers[2]
  self.alpha = 4
end)
function Outer:forward(x)
  if self.alpha == 0 then error "stopped" end
  for _, layer in ipairs(self.layers) do x = layer(x) end
  return x
end
local outer = Outer()

-- pairs gives the fields in the order in which they were set first; a walk over all of them ends.
local keys, visited = {}, 0
for key in pairs(outer) do keys[#keys + 1] = key end
check.equal(table.concat(keys, " "), "zeta alpha layers last", "fields")
local function walk(value)
  visited = visited + 1
  check.equal(visited < 100, true, "a walk that ends")
  for _, item in pairs(value) do
    if type(item) == "table" then walk(item) end
  end
end
walk(outer)
check.equal(visited, 5, "tables below a module") -- itself, layers, both layers, and the second again
check.equal(next(outer), nil, "what an instance holds beside its fields")
outer.gone = 2
keys = {}
for key in pairs(outer) do keys[#keys + 1] = key end
check.equal(table.concat(keys, " "), "zeta alpha layers last gone", "a field that is set again")

-- Frozen parameters: left out unless asked for, together with no buffer.
local function names(options) return table.concat(select(2, m.parameters(outer, options)), " ") end
check.equal(names(), "zeta layers.1.gain layers.2.gain")
check.equal(m.freeze(outer.layers[1]), outer.layers[1])
check.equal(names(), "zeta layers.2.gain", "with a frozen module")
check.equal(names { frozen = true }, "zeta layers.1.gain layers.2.gain", "frozen ones too")
m.freeze(outer.zeta)
check.equal(names(), "layers.2.gain", "with a frozen parameter")
m.freeze(outer, false)
check.equal(names(), "zeta layers.1.gain layers.2.gain", "nothing frozen")

-- A module may be called outside of a program, and assigns nothing then. Errors leave nothing behind.
local x = m.ones { A.embed }
check.equal(tostring(outer(x)), "f32[embed=4]")
check.equal(#core.take_updates(), 0, "updates outside of a program")
outer.alpha = 0
check.raises("stopped", outer, x)
check.equal(core.tracing(), false, "tracing after an error")
check.equal(core.module_path(), "", "module path after an error")
check.raises("stopped", m.compile, function() return outer(x) end)
local function applying(programs) return m.compile(function() return x end, {}, { applies = programs }) end
local single, several = m.compile(function() return x end), m.compile(function() return { x = x } end)
applying { single, several } -- also one of a function that returns one tensor
for _, wrong in ipairs { { 3 }, 3, "ab", true, several } do check.raises("a program applies the sums of a list of programs, got", applying, wrong) end
check.equal(core.tracing(), false, "tracing after an error in a program")
outer.alpha = 1
local mean = outer.last.mean
check.raises("layers.2.mean is assigned outside of a program", mean.assign, mean, 1)
check.raises("is assigned outside of a program", m.adamw {}.update, { outer.zeta }, { m.ones(m.axes_of(outer.zeta)) }, { rate = 1, step = 1 })

-- A program that is traced while another is keeps the assignments of both apart.
local first = m.state { name = "first", axes = {}, init = 1 }
local second = m.state { name = "second", axes = {}, init = 1 }
local inner
local program = m.compile(function()
  first:assign(first:read() + 1)
  inner = m.compile(function() second:assign(second:read() * 3) end)
end)
program {}
check.equal(first:get()[1], 2.0, "state of the outer program")
check.equal(second:get()[1], 1.0, "state of the inner program, before it runs")
inner {}
check.equal(first:get()[1], 2.0, "the outer's after the inner program has run")
check.equal(second:get()[1], 3.0, "the inner's")

-- Layers that a forward function makes and keeps have their names and initial values in the first program.
local Late = m.module("Late", function() end)
function Late:forward(t)
  if not self.scale then self.scale, self.shift = m.param { A.embed, init = "ones" }, m.buffer { A.embed, init = "ones" } end
  return t * self.scale + self.shift:read()
end
local late = Late()
local run = m.compile(function(i) return late(i.x) end, { x = { A.embed } })
check.all(run { x = { 1, 2, 3, 4 } }, { 2, 3, 4, 5 }, 0, "layers made while the first program was traced")
local Listed = m.module("Listed", function(self) self.layers = {} end)
function Listed:forward(t)
  for i = 1, 2 do
    if not self.layers[i] then self.layers[i] = m.rms_norm { A.embed } end
    t = self.layers[i](t)
  end
  return t
end
local listed = Listed()
m.compile(function(i) return listed(i.x) end, { x = { A.embed } })
check.equal(table.concat(select(2, m.parameters(listed)), " "), "Listed2.layers.1.gain Listed2.layers.2.gain", "layers that are put into a list late")
local Wasteful = m.module("Wasteful", function() end)
function Wasteful:forward(t) return t + self.make { A.embed, init = "ones" }:read() end
for _, what in ipairs { "param", "buffer" } do
  local wasteful = Wasteful()
  wasteful.make = m[what]
  check.raises(("the function forward of Wasteful makes a %s ("):format(what == "param" and "parameter" or what), m.compile,
    function(i) return wasteful(i.x) end, { x = { A.embed } })
end

-- Optional fields are nil where this instance lacks them, whatever their names resemble, and a field may be given what it holds.
do
  local A = m.axes { opt = 4, opt_rows = 2 }
  local L = m.module("Optional", function(self, post)
    self.norm1 = m.layer_norm { A.opt }
    if post then self.norm2 = m.layer_norm { A.opt } end
  end)
  function L:forward(x)
    self.w = self.w or m.param { A.opt }
    if self.norm2 then x = self.norm2(x) end
    return self.norm1(x) * self.w
  end
  local l = L()
  local x = m.ones { A.opt_rows, A.opt }
  l(x)
  check.equal(tostring(l(x)), tostring(x), "a parameter made once")
  check.raises("did you mean norm1", function() return l.nrom1 end)
end
check.done()
