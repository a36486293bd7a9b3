-- What would silently have no effect: assignments outside programs, parameters without names.
local m = require "mlua"
local A = m.axes { embed = 4 }
local function try(fn)
  local _, message = pcall(fn)
  print(message)
end

local gain = m.param { A.embed, name = "gain", init = "ones" }
try(function() gain:assign(gain * 2) end)
print(m.compile(function() return gain:read():sum() end)())

local loose = m.param { A.embed }
try(function() m.compile(function() return loose:read():sum() end) end)

-- A module that assigns states may be called outside, to see its type.
local Mean = m.module("Mean", function(self) self.mean = m.buffer { A.embed } end)
function Mean:forward(x)
  self.mean:assign(0.9 * self.mean + 0.1 * x)
  return x - self.mean
end
local mean = Mean()
print(mean(m.ones { A.embed }))
local step = m.compile(function(feeds) return mean(feeds.x):sum() end, { x = { A.embed } })
print(step { x = { 1, 1, 1, 1 } }, step { x = { 1, 1, 1, 1 } })

-- Modules that refer to themselves and to what holds them.
local Child = m.module("Child", function(self, parent) self.w, self.parent = m.param { A.embed }, parent end)
local Parent = m.module("Parent", function(self) self.me, self.child = self, Child(self) end)
print(table.concat(select(2, m.parameters(Parent())), " "))
try(function() m.module "Block" end)
try(function() m.stack(nil, Child) end)
