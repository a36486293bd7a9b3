-- What an edit of mlua run --watch leaves out: tensors of a checkpoint in memory, and back into states to the bit. States of other axes of
-- the same sizes, or of another dtype, are left alone; more than may be taken is refused in one line.
local check, m = require "lib.check", require "mlua"
local core, undo = require "mlua.core", require "mlua.run_undo"

local A = m.axes { batch = 4, embed = 8, hidden = 12 }
local Net = m.module("Net", function(self)
  self.up, self.down = m.param { A.embed, A.hidden }, m.param { A.hidden }
end)
function Net:forward(x) return (x:dot(self.up, "embed") * self.down:read()):sum "hidden" end
local net, adamw = Net(), m.adamw { lr = 0.1, state_dtype = "bf16" }
local step = m.compile(function(i)
  local loss, list = ((net(i.x) - 1) ^ 2):sum(), m.parameters(net)
  adamw.update(list, m.grad(loss, list), { rate = 1, step = i.step })
  return { loss = loss }
end, { x = { A.batch, A.embed }, step = {} })
local x = m.host("f32", 4, 8):fill(0.5)
for i = 1, 3 do step { x = x, step = i } end

local states = {}
for _, state in ipairs(core.states()) do states[state:name()] = state end
local function bits(name)
  local host, list = states[name]:get(), {}
  for i = 1, states[name]:elements() do list[i] = ("%a"):format(host[i]) end
  return table.concat(list, " ")
end

local folder, file = os.tmpname(), core.lsp_memory()
os.remove(folder)
m.save(folder, { net, adamw })
local names = { "up", "up.adamw.m", "up.adamw.v", "down" }
local before, wanted = {}, {}
for _, name in ipairs(names) do before[name], wanted[name] = bits(name), true end
wanted.down = nil
check.equal(undo.hold(file, folder, wanted), 4 * 96 + 2 * 2 * 96, "bytes in memory")
assert(os.execute("rm -r " .. folder)) -- nothing is read from disk
for i = 4, 6 do step { x = x, step = i } end
for _, name in ipairs(names) do check.equal(bits(name) ~= before[name], true, name .. " was trained") end
local down = bits "down"
local loaded = undo.load(file, { "up", "up.adamw.m", "up.adamw.v", "down" })
for _, name in ipairs { "up", "up.adamw.m", "up.adamw.v" } do
  check.equal(loaded[name], true, name)
  check.equal(bits(name), before[name], name)
end
check.equal(loaded.down, nil, "what is not held")
check.equal(bits "down", down, "down")

-- Another dtype or other axes under a name: as text, for states keep theirs.
local function rewritten(from, to)
  local text = assert(io.open(file, "rb")):read "a"
  check.equal(#from, #to)
  check.equal(text:find(from, 1, true) ~= nil, true, from)
  local place = assert(io.open(file, "wb"))
  place:write((text:gsub(from:gsub("%p", "%%%0"), to)))
  place:close()
end
rewritten("f32[embed=8, hidden=12]", "f32[embex=8, hidden=12]")
check.equal(next(undo.load(file, { "up" })), nil, "other axes")
rewritten("f32[embex=8, hidden=12]", "f16[embed=8, hidden=12]")
check.equal(next(undo.load(file, { "up" })), nil, "another dtype")

m.save(folder, { net, adamw })
core.options().undo_memory = 5e-7
local bytes, problem = undo.hold(file, folder, wanted)
check.equal(bytes, nil, "more than may be taken")
check.equal(problem, "they take 768 B, and 537 B of host memory may be taken (--undo-memory)")
check.equal(next(undo.load(file, { "up" })), nil, "nothing is held then")
check.equal(undo.is_of_an_edit(file), true, "the edit before is not undone by this one")
check.equal(undo.hold(file, folder, {}), 0, "an edit that leaves nothing out")
check.equal(undo.is_of_an_edit(file), false, "what the edit before left out stays")
assert(os.execute("rm -r " .. folder))
check.done()
