-- The command line: exit codes and messages, as a shell sees them.
local core = require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")
local binary = os.getenv "MLUA" or root .. "build/mlua"
local script = os.tmpname()

local function write(text)
  local f = assert(io.open(script, "w"))
  f:write(text)
  f:close()
end

-- Run the binary; the output must contain each of the texts.
local function run(code, arguments, ...)
  local pipe = io.popen(("%s '%s' %s </dev/null 2>&1; echo exit: $?"):format(
    arguments:match "^ENV (.-) MLUA" or "", binary, (arguments:gsub("^ENV .- MLUA ", ""))))
  local output = pipe:read "a"
  pipe:close()
  check.equal(output:match "exit: (%d+)\n$", tostring(code), arguments)
  for _, text in ipairs { ... } do
    if not output:find(text, 1, true) then check.equal(output, text, arguments) end
  end
  return output
end

run(2, "", "usage: mlua COMMAND", "mlua --help")
run(0, "--help", "run SCRIPT", "MLUA_DEBUG", "MLUA_OOM")
run(0, "check --help", "usage: mlua check", "--types")
run(0, "help repl", "usage: mlua repl")
run(0, "--version", "mlua ")
run(2, "chekc", "did you mean check?")
run(2, "run", "run needs a script")
run(2, "run --devise cpu x.lua", "run has no option --devise", "did you mean --device?")
run(2, "run --types x.lua", "run has no option --types")
run(2, "run x.lua y.lua", "what is \"y.lua\"?")
run(2, "run x.lua --seed", "--seed needs a value")
run(2, "run x.lua --seed=1x", "--seed takes an integer")
run(2, "run x.lua --mesh dp", "--mesh takes sizes")
run(2, "check x.lua --mesh dp=2,tp=2,dp=4", "--mesh has two sizes of \"dp\"")
run(1, "run " .. root .. "models/gtp.lua", "cannot open", "No such file", "did you mean " .. root .. "models/gpt.lua?")
-- The libraries of the GPU that it opens keep memory of their own.
run(0, "ENV ASAN_OPTIONS=detect_leaks=0 MLUA doctor", "C compiler")
run(0, "editor", "---@meta mlua", "function Tensor:slice(axis, start, stop) end", "function m.attention(q, k, v, options) end")

write "print(...)\nprint(require 'mlua.core'.options().seed)"
run(0, script .. " --seed 5", "5")
run(0, "run --device cpu " .. script .. " lr=1", "declares no settings")
write "#!/usr/bin/env mlua\nlocal m = require 'mlua'\nlocal c = m.config { lr = 1.5, on = false, name = 'x' }\nprint(c.lr, c.on, c.name)"
run(0, script .. " lr=2 on=true name=a=b", "2.0\ttrue\ta=b")
run(0, script .. " on=false", "1.5\tfalse\tx")
run(1, script .. " lr=two", "lr=two is not a number")
run(1, script .. " lr=1e400", "lr=1e400 is not a number")
for preset, message in pairs {
  ["['50%'] = { b = 2 }"] = "the preset 50% sets \"b\", which the configuration has not",
  ["tiny = { a = 2, 7 }"] = "the preset tiny sets 1, which the configuration has not",
  ["tiny = 7"] = "the preset tiny must be a table of settings, got 7",
} do
  write("require 'mlua'.config { a = 1, presets = { " .. preset .. " } }")
  run(1, script, message)
end
write "error(setmetatable({}, {__tostring = function() return 'an object' end}))"
run(1, script, "an object")
write "\xEF\xBB\xBF#!/usr/bin/env mlua\nprint 'a mark of UTF-8 before it'"
run(0, script, "a mark of UTF-8 before it")
write "local m, t = require 'mlua', {}\n\nprint(m.gelu(t.hiden))"
run(1, script, ":3: gelu takes a tensor, got nil", "t.hiden is nil")
write "error()"
run(1, script, "nil")
write "os.exit(7)"
run(7, script)
write "local m = require 'mlua'\nlocal f = m.compile(function(i) return i.x:sum() end, { x = { m.axis('batch', 4) } })\nfor i = 1, 6 do f { x = { 1, 2, 3, 4 } } end\nos.exit(3)"
local trace = os.tmpname()
os.remove(trace)
run(3, "run --device cpu --profile=" .. trace .. " " .. script)
check.equal(io.open(trace) ~= nil, true, "the profile of a script that ends by os.exit")
os.remove(trace)
write "local function f() return f() + 1 end f()"
run(1, script, "stack overflow")
write "local m = require 'mlua'\nlocal x = nil\nprint(x.y)"
run(1, "ENV MLUA_DEBUG=1 MLUA " .. script, "attempt to index a nil value", "stack traceback")
write "local t = {} for i = 1, 1e9 do t[i] = ('x'):rep(1000) .. i end"
if os.execute(("ulimit -v 400000; '%s' --version >/dev/null 2>&1"):format(binary)) then -- not with sanitizers
  run(1, "ENV ulimit -v 400000; MLUA " .. script, "memory")
end
write "while true do end"
run(130, "ENV timeout --preserve-status -s INT 1 MLUA " .. script, "interrupted")

-- A script that polls core.stopped() ends in its own way.
write [[
local core = require "mlua.core"
core.stopped()
io.popen("kill -INT $PPID"):close()
while not core.stopped() do end
print "saved"
]]
run(130, script, "saved")

-- check: what does not fit, without copies to the host, is refused, with the largest tensors and their lines.
write [[
local m = require "mlua"
local A = m.axes { batch = 64, seq = 4096, embed = 8192, ffn = 32768 }
local up, down = m.param { A.embed, A.ffn, name = "up" }, m.param { A.ffn, A.embed, name = "down" }
m.compile(function(i)
  local x = i.x
  for _ = 1, 4 do x = x + m.gelu(x:dot(up, "embed")):dot(down, "ffn") end
  return m.grad((x * x):sum(), { up })[1]:sum()
end, { x = { A.batch, A.seq, A.embed, dtype = "bf16" } })
]]
run(1, "ENV MLUA_HOST_LINK=0 MLUA check --device h100 " .. script, "parameters      536.9 M in 2 tensors", "peak memory", "of memory, and NVIDIA H100, 79 GiB has",
  "bf16[batch=64, seq=4096, ffn=32768]", script .. ":6")
run(0, "check --device b200 --types " .. script, "state up", "f32[embed=8192, ffn=32768]")
run(0, "check --device b200 --json " .. script, '"parameters":536870912', '"peak_bytes":', '"largest":[{"type":')
run(2, "check --device h300 " .. script, "there is no device \"h300\"", "cpu, cuda, null, h200, h100")
run(2, "run --device h200 " .. script, "there is no device \"h200\"", "mlua check plans for h200")

-- Kernels that the compiler refuses.
write "local m = require 'mlua'\nm.compile(function(i) return m.exp(i.x) * 0.54321 end, { x = { m.axis('seq', 5) } }) { x = 1 }"
run(1, "ENV CC=false MLUA_CACHE=build/no-cache MLUA " .. script, "does not compile", "source in")

-- A GPU that is not there.
write "print(require 'mlua.core'.device().name)"
run(1, "ENV CUDA_VISIBLE_DEVICES= MLUA run --device cuda " .. script, "--device cpu")
run(0, "run --device cpu " .. script, "cpu")

-- A loss that is not a number: which step, and which module gave it.
write [[
local m = require "mlua"
local A = m.axes { embed = 16, vocab = 256, seq = 16, batch = 4 }
local Block = m.module("Block", function(self) self.w = m.param { A.embed, m.axis("out", 16) } end)
function Block:forward(x) return x + m.log(x:dot(self.w, "embed"):rename("out", "embed") * 1e30 * 1e30) end
local Model = m.module("Model", function(self)
  self.table = m.param { A.vocab, A.embed }
  self.blocks = m.stack(3, Block)
end)
function Model:forward(tokens)
  local x = self.table:gather(tokens, "vocab")
  for _, block in ipairs(self.blocks) do x = block(x) end
  return x:dot(self.table, "embed")
end
m.train { model = Model(), batch = A.batch, seq = A.seq, vocab = 256, steps = 3 }
]]
run(1, "run --device cpu " .. script, "step 1: loss", "the first output that is not finite is that of blocks.1")
os.remove(script)
check.done()
