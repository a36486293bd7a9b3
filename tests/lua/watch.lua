-- mlua watch, line by line: a report, an edit that breaks the script, one that mends and widens it, one that changes nothing, and a
-- module that is loaded. Predicted times are left out: they change with the tables of rates.
local check = require "lib.check"

local binary = os.getenv "MLUA" or "build/mlua"
local folder = os.tmpname()
os.remove(folder)
local function write(name, text)
  local file = assert(io.open(folder .. "/" .. name, "w"))
  file:write(text)
  file:close()
end

local script = [[
local m = require "mlua"
local size = require "size"
local A = m.axes { embed = size.embed, vocab = 256, batch = 4, seq = 8 }
local Model = m.module("Model", function(self) self.table = m.param { A.vocab, A.embed } end)
function Model:forward(tokens) return self.table:gather(tokens, "vocab"):dot(self.table, "embed") end
m.train { model = Model(), batch = A.batch, seq = A.seq, steps = 1, optimizer = m.sgd { lr = 0.1 }, layout = m.layout.ddp {} }
]]
assert(os.execute("mkdir " .. folder))
write("size.lua", "return { embed = 16 }\n")
write("gpt.lua", script)
write("broken.lua", (script:gsub("A.vocab, A.embed", "A.vocab, A.embd")))
write("normed.lua", (script:gsub("self.table = m.param { A.vocab, A.embed }", "%0 self.norm = m.rms_norm { A.embed }"):gsub(":dot", ":mul(self.norm(self.table:gather(tokens, 'vocab'))):dot")))
write("drive.sh", [[
cd "$1" && mlua=$2
"$mlua" watch gpt.lua --device h200 --mesh dp=2 > out 2>&1 &
watcher=$!
seen() { for i in $(seq 600); do [ "$(grep -c "$1" out)" -ge "$2" ] && return; sleep 0.05; done; echo "no $1" >> out; }
save() { sleep 0.02; cp "$1" new && mv new "$2"; }
seen 'ranks  ' 1
save broken.lua gpt.lua; seen 'stays the one' 1
save normed.lua gpt.lua; seen 'parameters  ' 2
touch gpt.lua; seen 'no difference' 1
echo 'return { embed = 32 }' > size.new; mv size.new size.lua; seen 'parameters  ' 3
kill $watcher; wait $watcher 2>/dev/null
sed 's/^[0-9][0-9:]*  //' out
]])
local absolute = binary:sub(1, 1) == "/" and binary or assert(io.popen "pwd"):read "l" .. "/" .. binary
local pipe = assert(io.popen(("sh %s/drive.sh %s %s"):format(folder, folder, absolute)))
local text = pipe:read "a"
pipe:close()
os.execute("rm -r " .. folder)

local expected = [[
watching gpt.lua
  parameters       4.1 k
  states           40.0 KiB
  peak memory      64.1 MiB
  work a step      520.8 kFLOP
  predicted step   (a time)
  tokens/s         (a speed)
  tokens a step    32
  kernels          6
  to compile       6
  products         3
  attention        0
  ranks            2
  dp all-reduce    3, 16.0 KiB sent by a rank
gpt.lua changed
gpt.lua:4: there is no axis "embd"
    4 | local Model = m.module("Model", function(self) self.table = m.param { A.vocab, A.embd } end)
  help: did you mean embed?
  the report before this error stays the one to compare with
gpt.lua changed
  + norm.gain f32[embed=16]
  parameters       4.1 k -> 4.1 k (+0.4%)
  states           40.0 KiB -> 40.1 KiB (+0.3%)
  peak memory      64.1 MiB -> 64.1 MiB (+0.0%)
  work a step      520.8 kFLOP -> 528.0 kFLOP (+1.4%)
  predicted step   (a time) -> (a time)
  tokens/s         (a speed) -> (a speed)
  kernels          6 -> 10 (+66.7%)
  to compile       6 -> 10 (+66.7%)
  dp all-reduce    3, 16.0 KiB -> 4, 16.1 KiB
gpt.lua changed
  no difference
./size.lua changed
  ~ norm.gain f32[embed=16] -> f32[embed=32]
  ~ table f32[vocab=256, embed=16] -> f32[vocab=256, embed=32]
  parameters       4.1 k -> 8.2 k (+100.0%)
  states           40.1 KiB -> 80.2 KiB (+100.0%)
  peak memory      64.1 MiB -> 64.1 MiB (+0.1%)
  work a step      528.0 kFLOP -> 973.6 kFLOP (+84.4%)
  predicted step   (a time) -> (a time)
  tokens/s         (a speed) -> (a speed)
  dp all-reduce    4, 16.1 KiB -> 4, 32.1 KiB
]]
local found = {}
for line in text:gmatch "[^\n]*" do
  if line:find "^  predicted step" then line = line:gsub("[%d.]+ [mu]?s", "(a time)"):gsub(" %([-+].*", "") end
  if line:find "^  tokens/s" then line = line:gsub("%f[%w]%d+%f[%W]", "(a speed)", 2):gsub(" %([-+].*", "") end
  found[#found + 1] = line
end
local at = 0
for line in expected:gmatch "[^\n]+" do
  at = at + 1
  check.equal(found[at], line, "line " .. at)
end
check.equal(#text > 0 and found[at + 1], "")
if check.failures > 0 then print(text) end
check.done()
