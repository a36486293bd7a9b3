-- m.save and m.load: what is saved, what is missing, and messages.
local m, core = require "mlua", require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")
local folder = os.tmpname()
os.remove(folder)

local A = m.axes { batch = 4, embed = 8, ffn = 6 }
local Net = m.module("Net", function(self)
  self.up, self.seen = m.param { A.embed, A.ffn }, m.buffer { A.ffn }
end)
function Net:forward(x)
  local y = x:dot(self.up, "embed")
  self.seen:assign(self.seen:read() + y:sum "batch")
  return y
end
local net, optimizer = Net(), m.adamw { lr = 0.1 }
local later = m.sgd { lr = 0.1, momentum = 0.5 }
local step = m.compile(function(i)
  local loss, parameters = ((net(i.x) - 1) ^ 2):sum(), m.parameters(net)
  optimizer.update(parameters, m.grad(loss, parameters), { rate = 1, step = i.step })
  return { loss = loss }
end, { x = { A.batch, A.embed }, step = {} })
local x = m.host("f32", 4, 8):fill(0.5)
local function run(number) return step { x = x, step = number }.loss end
run(1)

local saved = m.save(folder .. "/deep/a/", { net, optimizer }, { record = { step = 1, list = { 1, 2 } } })
check.equal(saved.path, folder .. "/deep/a", "the path")
check.equal(saved.bytes, 4 * (48 * 3 + 6), "bytes")
local second, third = run(2), run(3)
local record, differences = m.load(folder .. "/deep/a", { net, optimizer })
check.equal(record.step, 1, "the record")
check.equal(record.list[2], 2, "the record's list")
check.equal(#differences.missing + #differences.unexpected + #differences.reshaped, 0, "differences")
check.equal(run(2), second, "the loss of step 2 again")
check.equal(run(3), third, "the loss of step 3 again")

-- Other programs read the parameters.
local tensors = m.read_tensors(folder .. "/deep/a/model-00001-of-00001.safetensors")
check.equal(#tensors.up, 48, "elements")

-- The newest replaces the one of that name; all states, without a list.
m.save(folder .. "/deep/a", nil, { record = { step = 3 } })
check.equal(m.load(folder .. "/deep/a").step, 3, "the record of all")
local list = core.checkpoint_list(folder .. "/deep")
check.equal(#list, 1, "checkpoints")
check.equal(list[1].step, 3, "its step")
check.equal(list[1].whole, true, "whole")

-- What a checkpoint lacks.
m.save(folder .. "/model", net.up)
check.raises("3 missing: seen, up.adamw.m, up.adamw.v", function() m.load(folder .. "/model", { net, optimizer }) end)
check.raises('has no states yet', function() m.load(folder .. "/deep/a", { net, later }) end)
local _, lacks = m.load(folder .. "/model", { net, optimizer }, { strict = false })
check.equal(table.concat(lacks.missing, " "), "seen up.adamw.m up.adamw.v", "missing")
local _, beyond = m.load(folder .. "/deep/a", { net })
check.equal(table.concat(beyond.unexpected, " "), "up.adamw.m up.adamw.v", "unexpected")

-- Damage: the file and the tensor.
local path = folder .. "/deep/a/state-00001-of-00001.safetensors"
local file = assert(io.open(path, "r+b"))
local bytes = file:read "a"
file:seek("set", #bytes - 3)
file:write(string.char(bytes:byte(#bytes - 2) ~ 16))
file:close()
check.raises('state-00001-of-00001.safetensors is damaged: the values of tensor "up.adamw.v"', function() m.load(folder .. "/deep/a") end)
m.load(folder .. "/deep/a", { net }) -- which is undamaged
file = assert(io.open(path, "wb"))
file:write(bytes:sub(1, -2))
file:close()
check.raises(("%s is damaged: it has %d bytes, and %d were written"):format(path, #bytes - 1, #bytes), function() m.load(folder .. "/deep/a", { net }) end)
check.equal(core.checkpoint_list(folder .. "/deep")[1].whole, false, "a damaged one")

-- Another shape, dtype or order of axes; axes that have other names.
local function other(name, axes, dtype) return core.state { name = name, axes = axes, dtype = dtype, init = 0 } end
local wide, turned = other("wide", { A.embed, A.batch }), other("turned", { A.ffn, A.embed })
local whole, renamed = other("whole", { A.embed, A.ffn }, "i32"), other("renamed", { m.axis("width", 8), m.axis("hidden", 6) })
for _, case in ipairs { { wide, "f32[embed=8, batch=4]" }, { turned, "f32[ffn=6, embed=8]" }, { whole, "i32[embed=8, ffn=6]" } } do
  local text = ("up: f32[embed=8, ffn=6] in the checkpoint, %s here"):format(case[2])
  local _, problem = core.checkpoint_load(folder .. "/model", { { case[1], "up" } })
  check.equal(problem, ("the tensors of %s/model are not those of this script: 1 of another shape or dtype: %s"):format(folder, text), "a problem")
  check.equal(select(4, core.checkpoint_load(folder .. "/model", { { case[1], "up" } }, false))[1], text, "reshaped")
end
core.checkpoint_load(folder .. "/model", { { renamed, "up" } })
check.equal(renamed:get()[31], net.up:get()[31], "an element under other names of axes")
check.equal(select(2, core.checkpoint_begin(folder .. "/b", "{}", { { wide, "\xff" } })), "a state's name is not UTF-8: it cannot be saved", "bytes")
check.equal(select(2, core.checkpoint_begin(folder .. "/b", "{}", { { wide, "a" }, { turned, "a" } })), 'two states to be saved are called "a"', "a name")

-- Messages.
check.raises("m.save takes the path of a folder", function() m.save("") end)
check.raises("cannot save or load 5", function() m.save(folder .. "/b", { 5 }) end)
check.raises("takes a list, got the key", function() m.save(folder .. "/b", { net = net }) end)
check.raises("record must be a table", function() m.save(folder .. "/b", { net }, { record = 5 }) end)
check.raises("is no whole checkpoint: it has no manifest.json", function() m.load(folder .. "/nothing") end)
check.raises("strict must be true or false", function() m.load(folder .. "/model", { net }, { strict = 1 }) end)
check.raises("holds files that are no checkpoint", function() m.save(root .. "tests", { net }) end)
check.raises("takes an optimizer", function() m.optimizer_states(net) end)
for _, name in ipairs { "deep/a", "deep", "model", "" } do core.checkpoint_remove(folder .. "/" .. name) end
core.checkpoint_remove() -- waits for the last one
check.equal(io.open(folder), nil, "the folder")
check.done()
