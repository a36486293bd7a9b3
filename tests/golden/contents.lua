-- Values whose shape or dtype is not the tensor's, given for a state, an input and a host array.
local m = require "mlua"
local A = m.axes { embed = 2, ffn = 3, seq = 2 }
local up = m.param { A.embed, A.ffn, name = "up" }
local run = m.compile(function(i) return i.x * 2 end, { x = { A.embed, A.ffn } })
local ids = m.compile(function(i) return i.ids + 1 end, { ids = { A.seq, dtype = "i32" } })

local function told(fn, ...)
  local ok, message = pcall(fn, ...)
  print((ok and "no error" or tostring(message):gsub("^[^\n]*contents.lua:%d+: ", ""):gsub("\n *%d+ | [^\n]*", "")))
end
local function set(values, axes) told(function() up:set(values, axes) end) end
local function feed(x) told(function() run { x = x } end) end

print "-- states"
set(m.host("f32", 3, 2))
set(m.host("f32", 6))
set(m.host("f32", 5))
set(m.host("i32", 2, 3))
set { 1, 2, 3, 4, 5 }
set { { 1, 2 }, { 3, 4 }, { 5, 6 } }
set { { 1, 2, 3 }, { 4, 5 } }
set { { { 1 }, { 2 }, { 3 } }, { { 4 }, { 5 }, { 6 } } }
set(up)
set("weights")
set(m.host("f32", 3, 2), { "ffn" })
set(m.host("f32", 3, 2), { "ffn", "seq" })
set(m.host("f32", 3, 2), { "ffn", "ffn" })
set(m.host("f32", 3, 2), { "ffn", m.axis("embed", 4) })
set(m.host("f32", 2, 3), { "ffn", "embed" })
set(m.host("f32", 3, 2), { A.ffn, "embed" })

print "-- inputs"
feed(m.host("f32", 3, 2))
feed(m.host("bool", 2, 3))
feed(m.host("f32", 2))
feed { { 1, 2, 3 }, 4 }
feed { 1, 2, 3, 4, 5, 6, 7 }
feed { 1, 2, 3, 4, 5, {} }
feed(nil)
told(function() ids { ids = m.host("i64", 2):fill { 7, 5000000000 } } end)
told(function() ids { ids = { 7, 5000000000 } } end)

print "-- host arrays"
told(function() m.host("f32", 2, 3):fill(m.host("f32", 3, 2)) end)
told(function() m.host("f32", 2, 3):reshape(4, 2) end)
told(function() m.host("f32", 2, 3):reshape(2 ^ 40, 2 ^ 40) end)
