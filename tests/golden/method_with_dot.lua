-- A method called with a dot does not get its object; a function of a library called with a colon gets the library.
local m = require "mlua"
local A = m.axes { batch = 2, embed = 4, ffn = 8 }
local h, w = m.zeros { A.batch, A.embed }, m.param { A.embed, A.ffn, name = "w" }
local Net = m.module("Net", function(self)
  self.norm, self.act = m.rms_norm { A.embed }, m.gelu
  self.layers = { m.rms_norm { A.embed } }
end)
function Net:forward(x) return self.act(self.norm(x)) end
function Net:double(x) return self.norm(x):sum("ffn") end
local net = Net()
local function try(fn, ...) print((select(2, pcall(fn, ...)))) end

try(function() return h.dot(w, "embed") end)
try(function() return h.sum("embed") end)
try(function() return h.broadcast { A.ffn } end)
try(function() return (h + 1).softmax("embed") end)
try(function() return w.name() end)
try(function() return w.sum("embed") end)
try(function() return w.set { 1, 2 } end)
try(function() return net.forward(h) end)
try(function() return net.double(h) end)
try(function() return net.norm.forward(h) end)
local double = m.compile(function(feeds) return feeds.x * 2 end, { x = { A.batch } })
try(function() return double.start { x = { 1, 2 } } end)
try(function() return m:softmax(h, "embed") end)
local optimizer = m.adamw { lr = 1e-3 }
try(function() return optimizer:update({ w }, { w * 0 }, { rate = 1, step = 1 }) end)

-- These pass what they should, and fail for another reason.
try(function() return h.dot(h, w, "ffn") end)
try(function() return net.double(net, h) end)
try(function() return Net.double(net, h) end)
try(function() return m.softmax(h, "ffn") end)
