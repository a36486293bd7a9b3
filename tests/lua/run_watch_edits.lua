-- mlua run --watch over drawn edits of a training script: another width of a layer, a norm more or less, another activation, another
-- optimizer's setting, a syntax error, a comment. Losses are, to the bit, those of a run that sees only the edits that change something;
-- of the parameters those alone begin anew that the edit changed. EDITS=50 SEED=1 for more; the script waits at every second step.
local check, scratch = require "lib.check", require "lib.scratch"

local edits, seed = tonumber(os.getenv "EDITS" or 2), tonumber(os.getenv "SEED" or 1)
math.randomseed(seed)
local absolute, folder, write, read = scratch.mlua, scratch.folder, scratch.write, scratch.read
assert(os.execute(("mkdir -p %s/edits"):format(folder)))

local EVERY = 2
local steps = EVERY * (edits + 1)
local SCRIPT = [[
local m = require "mlua"
local cfg = m.config { embed = 16, hidden = %d, seq = 8, batch = 4, steps = %d, edits = %d }
local A = m.axes { embed = cfg.embed, hidden = cfg.hidden, seq = cfg.seq, batch = cfg.batch, vocab = 256 }
local Model = m.module("Model", function(self)
  self.table = m.param { A.vocab, A.embed }
  self.up, self.down = m.param { A.embed, A.hidden }, m.param { A.hidden, A.embed }
  %s
end)
function Model:forward(tokens)
  local x = self.table:gather(tokens, "vocab")
  return (x + m.%s(%s:dot(self.up, "embed")):dot(self.down, "hidden")):dot(self.table, "embed")
end
m.train { model = Model(), batch = A.batch, seq = A.seq, steps = cfg.steps, optimizer = m.adamw { lr = %g }, eval_every = 0,
          on_step = function(step)
            if step %% %d ~= 0 or step == cfg.steps then return end
            print(("waiting at %%d"):format(step)) io.stdout:flush()
            while not io.open(("go-%%d"):format(step)) do os.execute "sleep 0.02" end
          end }
]]
local function text_of(s)
  return SCRIPT:format(s.hidden, steps, edits, s.norm and "self.norm = m.rms_norm { A.embed }" or "--", s.activation, s.norm and "self.norm(x)" or "x", s.lr, EVERY)
end
local function parameters(s) return s.norm and 4 or 3 end

-- The edits: the text, how many parameters continue (nil: the old program does), whether anything changes.
local state = { hidden = 32, norm = false, activation = "gelu", lr = 1e-2 }
local first = text_of(state)
local KINDS = { "comment", "width", "norm", "activation", "lr", "syntax" }
local list, counts = {}, {}
for i = 1, edits do
  local kind = i <= #KINDS and KINDS[(i + seed - 2) % #KINDS + 1] or KINDS[math.random(#KINDS)]
  local before = parameters(state)
  local item = { kind = kind, changes = kind ~= "comment" and kind ~= "syntax" }
  if kind == "width" then state.hidden = state.hidden == 32 and 48 or 32 end
  if kind == "norm" then state.norm = not state.norm end
  if kind == "activation" then state.activation = state.activation == "gelu" and "silu" or "gelu" end
  if kind == "lr" then state.lr = state.lr == 1e-2 and 5e-3 or 1e-2 end
  item.text = text_of(state)
  if kind == "comment" then item.text = item.text .. ("-- %d\n"):format(i) end
  if kind == "syntax" then item.text = item.text:gsub("steps = cfg.steps,", "steps = = cfg.steps,") end
  if kind ~= "syntax" then item.continue = kind == "width" and before - 2 or math.min(before, parameters(state)) end
  list[i], counts[kind] = item, (counts[kind] or 0) + 1
end

-- Of edits without effect the reference run sees none.
local function drive(name, all)
  local lines = { ("mkdir %s && cp first.lua %s/script.lua && cd %s || exit 1"):format(name, name, name),
    ("'%s' run script.lua --out run --device cpu --watch > out 2>&1 &"):format(absolute), "run=$!",
    'seen() { for i in $(seq 3000); do [ "$(grep -c "$1" out)" -ge "$2" ] && return; sleep 0.02; done; echo "no $1 $2" >> out; kill $run; exit 1; }',
    "save() { sleep 0.02; cp ../edits/$1.lua new && mv new script.lua; }" }
  local accepted, refused = 0, 0
  for i, item in ipairs(list) do
    lines[#lines + 1] = ("seen 'waiting at %d$' 1"):format(EVERY * i)
    if all or item.changes then
      if item.continue then accepted = accepted + 1 else refused = refused + 1 end
      lines[#lines + 1] = ("save %d; seen '%s' %d"):format(i, item.continue and "continue by their names" or "old program continues", item.continue and accepted or refused)
    end
    lines[#lines + 1] = ("sleep 0.1; touch go-%d"):format(EVERY * i)
  end
  lines[#lines + 1] = 'wait $run; echo "exit $?" >> out'
  return table.concat(lines, "\n") .. "\n"
end
write("first.lua", first)
for i, item in ipairs(list) do write(("edits/%d.lua"):format(i), item.text) end
write("watched.sh", drive("watched", true))
write("reference.sh", drive("reference", false))
assert(os.execute(("cd %s && { sh watched.sh & sh reference.sh; wait; }"):format(folder)))

local function losses(name)
  local found = {}
  for line in read(name .. "/run/metrics.jsonl"):gmatch "[^\n]+" do
    local step, loss = line:match '"step":(%d+)', line:match '"loss":([^,}]+)'
    if step and loss then found[tonumber(step)] = loss end
  end
  return found
end
local watched, reference = losses "watched", losses "reference"
for step = 1, steps do check.equal(watched[step], reference[step] or "a loss", "loss of step " .. step) end

local text, at = read "watched/out", 1
for i, item in ipairs(list) do
  local wanted = item.continue and ("%d parameters continue by their names"):format(item.continue) or "old program continues"
  local _, last = text:find(wanted, at, true)
  check.equal(last ~= nil, true, ("edit %d (%s): %s"):format(i, item.kind, wanted))
  at = last or at
end
check.equal(text:match "exit (%d+)\n$", "0")
if check.failures > 0 then print(text) end
if edits > #KINDS then
  for _, kind in ipairs(KINDS) do print(kind, counts[kind] or 0) end
end
os.execute("rm -r " .. folder)
check.done()
