-- mlua run --watch: an edit that changes nothing leaves every loss as it is, to the bit; a wider layer begins anew, the others continue, and the old
-- one is there again when the edit is undone, from memory, not from the run's folder; a layer put before others shifts names, which is printed
-- first; another optimizer begins with moments of its own. An error, own loops and another batch, seed, dtype, mesh, data or accumulation leave the program running, and say why. The script waits at
-- steps 10, 20, 30 and 35 for its edits; the run keeps each text of it that ran.
local check, scratch = require "lib.check", require "lib.scratch"
local core = require "mlua.core"

local absolute, folder, write, read = scratch.mlua, scratch.folder, scratch.write, scratch.read

local script = [[
local m = require "mlua"
local cfg = m.config { embed = 16, hidden = 32, seq = 8, batch = 4, steps = 40, dtype = "f32", waits = false }
local A = m.axes { embed = cfg.embed, hidden = cfg.hidden, seq = cfg.seq, batch = cfg.batch, vocab = 256 }
local Block = m.module("Block", function(self)
  self.up, self.down = m.param { A.embed, A.hidden }, m.param { A.hidden, A.embed }
end)
function Block:forward(x) return x + m.gelu(x:dot(self.up, "embed")):dot(self.down, "hidden") end
local Model = m.module("Model", function(self)
  self.table = m.param { A.vocab, A.embed }
  self.blocks = m.stack(2, Block)
end)
function Model:forward(tokens)
  local x = self.table:gather(tokens, "vocab")
  for _, block in ipairs(self.blocks) do x = block(x) end
  return x:dot(self.table, "embed")
end
m.train { model = Model(), batch = A.batch, seq = A.seq, steps = cfg.steps, layout = m.layout.fsdp { dp = 2 }, optimizer = m.adamw { lr = 1e-2 }, schedule = m.cosine {}, eval_every = 0,
          on_step = function(step)
            if not cfg.waits or (step % 10 ~= 0 and step ~= 35) or step == 40 then return end
            print(("waiting at %d"):format(step)) io.stdout:flush()
            while not io.open(("go-%d"):format(step)) do os.execute "sleep 0.05" end
          end }
]]
assert(os.execute("mkdir " .. folder))
write("script.lua", script)
write("broken.lua", (script:gsub('self.up, "embed"', 'self.upp, "embed"')))
local REFUSED = { -- a text's change, and what is said of it
  { "batch = 4", "batch = 8", "batch was 4 and is 8" }, { "steps = cfg.steps,", "steps = cfg.steps, seed = 2,", "seed was 0 and is 2" },
  { "f32", "bf16", 'dtype was "f32" and is "bf16"' }, { "dp = 2", "tp = 2", "the layout has another mesh" },
  { "steps = cfg.steps,", 'steps = cfg.steps, data = "script.lua",', "data was not set and is script.lua" },
  { "steps = cfg.steps,", "steps = cfg.steps, accum = 2,", "accum was 1 and is 2" }, { "m.train {.*", "Model()", "the script has no m.train" },
}
for i, change in ipairs(REFUSED) do write(("refused-%d.lua"):format(i), (script:gsub(change[1], change[2]))) end
write("inserted.lua", (script:gsub("m.stack%(2, Block%)", "{ m.rms_norm { A.embed }, Block(), Block() }"):gsub("m.adamw { lr = 1e%-2 }", "m.lion { lr = 1e-3 }")))
write("same.lua", script .. "-- no change\n")
write("wider.lua", (script:gsub("hidden = 32", "hidden = 48")))
write("drive.sh", [[
cd "$1" && mlua=$2
"$mlua" run script.lua waits=true --out plain --device cpu -n 2 > plain.out 2>&1 &
plain=$!
"$mlua" run script.lua waits=true --out run --device cpu -n 2 --watch > out 2>&1 &
watcher=$!
seen() { for i in $(seq 1200); do [ "$(grep -c "$1" out)" -ge "$2" ] && return; sleep 0.05; done; echo "no $1" >> out; }
save() { sleep 0.02; cp "$1" new && mv new script.lua; }
seen 'waiting at 10' 1
save broken.lua; seen 'old program continues' 1
for i in $(seq $3); do save refused-$i.lua; seen 'old program continues' $((i + 1)); done
save same.lua; seen 'continue by their names' 1
sleep 0.1; touch go-10
seen 'waiting at 20' 1
save wider.lua; seen 'continue by their names' 2
sleep 0.1; touch go-20
seen 'waiting at 30' 1
[ -e run/undo ] && echo "an undo on disk" >> out
save same.lua; seen 'continue by their names' 3
sleep 0.1; touch go-30
seen 'waiting at 35' 1
save inserted.lua; seen 'continue by their names' 4
sleep 0.1; touch go-35
wait $watcher; echo "exit $?" >> out
wait $plain; echo "plain exit $?" >> out
cat out
]])
local pipe = assert(io.popen(("sh %s/drive.sh %s %s %d"):format(folder, folder, absolute, #REFUSED)))
local text = pipe:read "a"
pipe:close()

local function losses(name)
  local list = {}
  for line in read(name .. "/metrics.jsonl"):gmatch "[^\n]+" do
    local step, loss = line:match '"step":(%d+)', line:match '"loss":([^,}]+)'
    if step and loss then list[tonumber(step)] = loss end
  end
  return list
end
local plain, watched = losses "plain", losses "run"
for step = 1, 20 do check.equal(watched[step], plain[step], "loss of step " .. step) end
for step = 21, 40 do check.equal(watched[step] ~= nil and watched[step] ~= plain[step], true, "loss of step " .. step) end

local at = 1
local function expect(line)
  local first, last = text:find(line, at, true)
  check.equal(first ~= nil, true, line)
  at = last or at
end
expect 'Block has no field "upp"'
expect "the old program continues"
for _, change in ipairs(REFUSED) do expect(change[3]) end
for _, line in ipairs {
  "5 parameters continue by their names", "continues run from step-00000010: step 10",
  "~ blocks.*.up f32[embed=16, hidden=32] -> f32[embed=16, hidden=48], 2 of them", "1 parameters continue by their names",
  "12 states that the edit leaves out are in host memory for an undo (24.0 KiB)", "they begin anew", "continues run from step-00000020: step 20", "~ blocks.*.up f32[embed=16, hidden=48] -> f32[embed=16, hidden=32]",
  "as they were before an edit left them out: ", "+ blocks.1.gain f32[embed=16]", "+ blocks.3.down f32[hidden=32, embed=16]", "- blocks.1.down f32[hidden=32, embed=16]",
  "3 parameters continue by their names; what is new (+)", "has no blocks.1.gain, blocks.3.up, blocks.3.down, table.lion.m", "continues run from step-00000035: step 35", "exit 0", "plain exit 0",
} do expect(line) end
check.equal(text:find("an undo on disk", 1, true), nil)
for name, version in pairs { ["script.lua"] = "inserted", ["script.lua.before-step-10"] = "same", ["script.lua.before-step-30"] = "wider", ["script.lua.before-step-35"] = "same" } do
  check.equal(read("run/" .. name) == (name:find "10" and script or read(version .. ".lua")), true, name)
end
local _, changes = read("run/log.txt"):gsub("the script has changed", "")
check.equal(changes, 4, "changes in the run's log")
if check.failures > 0 then print(text) end
local refused = assert(io.popen(("cd %s && '%s' run script.lua --watch 2>&1"):format(folder, absolute))):read "a"
check.equal(refused:find("--watch needs a folder", 1, true) ~= nil, true)
write("loop.lua", 'local m = require "mlua"\nlocal x = m.param { m.axis("a", 2), name = "x" }\nlocal f = m.compile(function() return { y = x:sum() } end)\nprint(f().y)\n')
refused = assert(io.popen(("cd %s && '%s' run loop.lua --watch --out own --device cpu 2>&1"):format(folder, absolute))):read "a"
check.equal(refused:find("--watch continues trainings of m.train, and the script has none", 1, true) ~= nil, true, refused)
os.execute("rm -r " .. folder)
check.done()
