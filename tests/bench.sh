#!/usr/bin/env bash
# Benchmarks as JSON lines: tests/bench.sh cpu|gpu|decode-gpu [case ...], tests/bench.sh load, tests/bench.sh export
# Beside PyTorch where PYTHON (an interpreter, default python3) has it: on a GPU tests/peers_torch.py, which
# compiles by PEER_COMPILE (blocks, or model, which takes a minute more), or torch_train.py of the folder PEERS,
# with PEER_OPTIONS (--stream bf16; of PEERS also --fp8); DTYPE (bf16) is mlua's;
# on a CPU torch_cpu.py of that folder. Medians over the steady steps. MLUA names the binary.
# On a GPU both sides train on the same tokens (DATA, a file of u16 tokens; by default drawn by Zipf's
# law), mlua before and after PyTorch, so that what the clocks do in between shows; first steps count
# from the command, PyTorch's without a cache. A row for the README's table follows each case.
# decode-gpu: models of random weights continue prompts, before and after torch_generate.py of the folder PEERS (CHUNK=8192 reads prompts as
# m.generate does on a GPU; WEIGHTS=int8 or fp8; PROMPT, TOKENS, TEMPERATURE).
# load: a checkpoint and a Hugging Face folder of models/gpt.lua (PRESET, DEVICE) are written, each is read by dd and loaded,
# from page cache and cold. Seconds; read_n_s is of as many dd as cores. FOLDER has room for them; it is emptied afterwards.
# export: the checkpoint's weights as a Hugging Face folder (DTYPE, f32), synced, beside dd conv=fsync of as many bytes, EXPORTS times each
# in turn; then the folder is loaded.
set -u
cd "$(dirname "$0")/.."
mlua=${MLUA:-build/mlua} python=${PYTHON:-python3} peers=${PEERS:-}
cache=$(mktemp -d)
trap 'rm -rf "$cache"' EXIT

median() { sort -n | awk '{ a[NR] = $1 } END { if (NR) print (NR % 2 ? a[(NR + 1) / 2] : (a[NR / 2] + a[NR / 2 + 1]) / 2) }'; }
field() { grep -oE "\"$1\": ?[-+0-9.eE]+" | sed 's/.*: *//'; }
now() { date +%s.%N; }
compute() { awk "BEGIN { printf \"$1\", $2 }"; }

# timed_run OUTPUT ARGUMENT...: run mlua, and print the seconds from the command to the end of its first step
timed_run() {
    local output=$1 start
    shift
    start=$(now)
    "$mlua" run "$@" --json 2>"$cache/err" | { read -r line; now >"$cache/then"; echo "$line"; grep -a '^{'; } >"$output"
    if [ "${PIPESTATUS[0]}" = 0 ]; then
        compute %.2f "$(cat "$cache/then") - $start"
        grep '^mlua: ' "$cache/err" >&2
    else
        cat "$cache/err" >&2
        echo null
    fi
}

# run_case NAME STEPS SKIP PEER-COMMAND -- SCRIPT SETTINGS...
run_case() {
    local name=$1 steps=$2 skip=$3 peer=$4
    shift 5
    local cold warm out=$cache/out speed memory tflops peer_out='' peer_speed=null ratio=null
    export MLUA_CACHE="$cache/$name"
    cold=$(timed_run "$out" "$@" steps=1)
    warm=$(timed_run "$out" "$@" steps="$steps")
    speed=$(tail -n +$((skip + 1)) "$out" | field tokens_per_s | median)
    tflops=$(tail -n +$((skip + 1)) "$out" | field tflops_per_gpu | median)
    memory=$(tail -n 1 "$out" | field memory_gib)
    if [ -n "$peers" ]; then
        peer_out=$($python $peer | tail -n 1)
        peer_speed=$(echo "$peer_out" | field tok_s)
        ratio=$(compute %.2f "${speed:-0} / ${peer_speed:-1}")
    fi
    printf '{"case":"%s","tokens_per_s":%.0f,"tflops":%.2f,"memory_gib":%.2f,"first_step_cold_s":%s,"first_step_warm_s":%s,"first_loss":%s,"last_loss":%s,"peer_tokens_per_s":%s,"ratio":%s}\n' \
        "$name" "${speed:-0}" "${tflops:-0}" "${memory:-0}" "$cold" "$warm" "$(head -1 "$out" | field loss)" \
        "$(tail -1 "$out" | field loss)" "${peer_speed:-null}" "$ratio"
    [ -z "$peer_out" ] || echo "$peer_out"
}

# u16 tokens below 50,257 in which the n-th most frequent one has about 1/n of the first one's share
draw_tokens() { # FILE
    cat >"$cache/tokens.lua" <<'LUA'
math.randomseed(1, 2)
local file, list = assert(io.open(os.getenv "TOKENS", "wb")), {}
for i = 1, 2 ^ 21 do list[i] = string.pack("<I2", 50257 ^ math.random() // 1 | 0) end
file:write(table.concat(list))
file:close()
LUA
    TOKENS=$1 "$mlua" run "$cache/tokens.lua" --device cpu
}

has_torch() { "$python" -c 'import importlib.util as u; raise SystemExit(not u.find_spec("torch"))' >/dev/null 2>&1; }

run_peer() { # NAME BATCH SEQ
    if [ -n "$peers" ]; then
        "$python" "$peers/torch_train.py" --model "$1" -B "$2" -T "$3" --data "$data" ${PEER_OPTIONS:-} | tail -n 1
    else
        "$python" tests/peers_torch.py "$1" -B "$2" -T "$3" --data "$data" --compile "${PEER_COMPILE:-blocks}" ${PEER_OPTIONS:-}
    fi
}

# gpu_case NAME SCRIPT BATCH SEQ
gpu_case() {
    local name=$1 script=$2 batch=$3 seq=$4 skip=3 cold warm peer='' run before after speed best=null busy=null
    local train=("$script" --device "${DEVICE:-cuda}" --dtype "${DTYPE:-bf16}" preset="$name" data="$data" batch="$batch" seq="$seq" lr=3e-4 warmup=20) # as the peer's
    export MLUA_CACHE="$cache/$name" TORCHINDUCTOR_CACHE_DIR="$cache/inductor-$name" TRITON_CACHE_DIR="$cache/triton-$name"
    cold=$(timed_run "$cache/before" "${train[@]}" steps=15)
    ! has_torch || peer=$(run_peer "$name" "$batch" "$seq")
    warm=$(timed_run "$cache/after" "${train[@]}" steps=12)
    for run in before after; do tail -n +$((skip + 1)) "$cache/$run" | field tokens_per_s >"$cache/$run.speeds"; done
    before=$(median <"$cache/before.speeds") after=$(median <"$cache/after.speeds")
    speed=$(cat "$cache"/{before,after}.speeds | median)
    "$mlua" run "${train[@]}" steps=5 --json --profile "$cache/trace.json" --profile-steps 3:3 2>"$cache/err" | grep -a '^{"profile"' >"$cache/profile" ||
        cat "$cache/err" >&2
    # beside the median step: a single one may fall where the clocks are down
    if [ -s "$cache/profile" ] && [ -n "$speed" ]; then
        told() { field "$1" <"$cache/profile" | head -n 1; }
        best=$(compute %.1f "$(told roofline_ms) / 10 / ($batch * $seq / $speed)")
        busy=$(compute %.1f "100 * $(told whole_step_device_ms) / $(told whole_step_ms)")
    fi
    local memory peer_speed peer_memory peer_first='' ratio=null
    memory=$(tail -n 1 "$cache/after" | field memory_gib)
    peer_speed=$(echo "$peer" | field tok_s_gpu) peer_memory=$(echo "$peer" | field peak_gib)
    if [ -n "$peer_speed" ]; then
        ratio=$(compute %.3f "${speed:-0} / $peer_speed")
        peer_first=$(compute %.1f "$(echo "$peer" | field import_s) + $(echo "$peer" | field first_step_s)")
    fi
    printf '{"case":"%s","tokens_per_s":%.0f,"before":%.0f,"after":%.0f,"memory_gib":%.2f,"first_step_cold_s":%s,"first_step_warm_s":%s,' \
        "$name" "${speed:-0}" "${before:-0}" "${after:-0}" "${memory:-0}" "$cold" "$warm"
    printf '"first_loss":%s,"last_loss":%s,"percent_of_best":%s,"percent_busy":%s,' "$(head -n 1 "$cache/before" | field loss)" \
        "$(tail -n 1 "$cache/before" | field loss)" "$best" "$busy"
    printf '"peer_tokens_per_s":%s,"ratio":%s,"peer_memory_gib":%s,"peer_first_step_s":%s,"peer_first_loss":%s,"peer_last_loss":%s}\n' \
        "${peer_speed:-null}" "$ratio" "${peer_memory:-null}" "${peer_first:-null}" "$(echo "$peer" | field loss_first | grep . || echo null)" \
        "$(echo "$peer" | field loss_last | grep . || echo null)"
    printf '| %s | %s x %s | %.0f | %s | %s | %.1f / %s | %s / %s (%s) s | %s %% | %s %% |\n' "$name" "$batch" "$seq" "${speed:-0}" \
        "${peer_speed:--}" "$ratio" "${memory:-0}" "${peer_memory:--}" "$cold" "$warm" "${peer_first:--}" "$best" "$busy"
    [ -n "$speed" ] && [ -s "$cache/profile" ] && { ! has_torch || [ -n "$peer_speed" ]; }
}

wanted() { [ ${#cases[@]} -eq 0 ] && return 0; local c; for c in "${cases[@]}"; do [ "$c" = "$1" ] && return 0; done; return 1; }

# ---- loading ----
files_of() { find "$1" -name '*.safetensors' | sort; }
drop() { local f; sync; for f in $(files_of "$1"); do dd if="$f" iflag=nocache count=0 2>/dev/null; done; }
read_one() { local f; for f in $(files_of "$1"); do dd if="$f" of=/dev/null bs=16M 2>/dev/null; done; }
read_all() { # by as many processes as cores, each a range of every file
    local f i n each
    n=$(nproc)
    for f in $(files_of "$1"); do
        each=$((($(stat -c %s "$f") / 16777216 + n) / n))
        for ((i = 0; i < n; i++)); do dd if="$f" of=/dev/null bs=16M skip=$((i * each)) count=$each 2>/dev/null & done
    done
    wait
}
seconds() { local start; start=$(now); "$@" >/dev/null; compute %.3f "$(now) - $start"; }
# load_row NAME FOLDER COMMAND...: the command's own line at MLUA_DEBUG=1 says how long it loaded
load_row() {
    local name=$1 folder=$2 how one all line load gib
    shift 2
    gib=$(files_of "$folder" | xargs stat -c %s | awk '{ s += $1 } END { printf "%.2f", s / 2 ^ 30 }')
    for how in warm cold; do
        if [ $how = cold ]; then drop "$folder"; else read_one "$folder"; fi
        one=$(seconds read_one "$folder")
        [ $how = warm ] || drop "$folder"
        all=$(seconds read_all "$folder")
        [ $how = warm ] || drop "$folder"
        line=$(MLUA_DEBUG=1 "$@" 2>&1 >/dev/null </dev/null | grep -a '^loaded ' | tail -n 1)
        load=$(echo "$line" | sed -E 's/.* in ([0-9.]+) s.*/\1/')
        [ -n "$load" ] || { echo "$name: nothing was loaded: $*" >&2; return 1; }
        printf '{"case":"%s-%s","gib":%s,"read_1_s":%s,"read_n_s":%s,"load_s":%s,"of_read_1":%.2f,"of_read_n":%.2f,"detail":"%s"}\n' "$name" $how \
            "$gib" "$one" "$all" "$load" \
            "$(compute %.3f "$one / $load")" "$(compute %.3f "$all / $load")" "$line"
        rm -rf "$folder/checkpoints/step-00000002"
    done
}
# make_run: a checkpoint in $folder/run of the command in `model`
make_run() {
    folder=$(mktemp -d "${FOLDER:-/tmp}/mlua-load.XXXXXX")
    trap 'rm -rf "$cache" "$folder"' EXIT
    model=(models/gpt.lua --device "${DEVICE:-cpu}" "preset=${PRESET:-gpt2-124m}" batch=1 seq=32 positions=1024 save_every=1000)
    "$mlua" run "${model[@]}" steps=1 --out "$folder/run" --quiet
}
# by as many dd as there are files, one after another
copy_synced() { local f n=0; for f in $(files_of "$1"); do dd if="$f" of="$folder/copy$((n++))" bs=16M conv=fsync 2>/dev/null; done; }
synced() { "$@" && sync; }
export_case() {
    local i dd line written gib
    for ((i = 0; i < ${EXPORTS:-1}; i++)); do
        rm -rf "$folder/hf" "$folder"/copy*
        sync
        written=$(seconds synced env MLUA_DEBUG=1 "$mlua" export "$folder/run" "$folder/hf" --hf --dtype "${DTYPE:-f32}" 2>"$cache/err")
        [ -d "$folder/hf" ] || return 1
        gib=$(files_of "$folder/hf" | xargs stat -c %s | awk '{ s += $1 } END { printf "%.2f", s / 2 ^ 30 }')
        dd=$(seconds copy_synced "$folder/hf")
        line=$(grep -a '^loaded ' "$cache/err")
        printf '{"case":"export","gib":%s,"seconds":%s,"dd_fsync_s":%s,"of_dd":%.2f,"detail":"%s"}\n' "$gib" "$written" "$dd" \
            "$(compute %.3f "$dd / $written")" "$line"
    done
    rm -f "$folder"/copy*
}
load_cases() {
    make_run && load_row checkpoint "$folder/run" "$mlua" run "${model[@]}" steps=2 --out "$folder/run" --resume --quiet || return 1
    export_cases
}
export_cases() {
    [ -n "${folder:-}" ] || make_run || return 1
    export_case && load_row from "$folder/hf" "$mlua" run "${model[@]}" --from "$folder/hf" steps=1
}

# Tokens of one sequence and the sum of a large state in turns: the bytes of the weights a token's time, beside the bytes that are read in
# that time. *_cpu: by the processor's time over its threads, which other programs on the machine hardly change.
write_decode() {
    cat >"$cache/decode.lua" <<'LUA'
local m, core, Decoder = require "mlua", require "mlua.core", require "mlua.decode"
local cfg = m.config { layers = 12, embed = 768, heads = 12, ffn = 2048, vocab = 32000, seq = 256, rounds = 9, tokens = 20, probe = 256, threads = 2 }
local A = m.axes { embed = cfg.embed, heads = cfg.heads, head_dim = cfg.embed // cfg.heads, ffn = cfg.ffn, vocab = cfg.vocab, seq = cfg.seq }
local Block = m.module("Block", function(self)
  self.norm1, self.norm2 = m.rms_norm { A.embed }, m.rms_norm { A.embed }
  self.wq, self.wk, self.wv = m.param { A.embed, A.heads, A.head_dim }, m.param { A.embed, A.heads, A.head_dim }, m.param { A.embed, A.heads, A.head_dim }
  self.wo, self.gate, self.up, self.down = m.param { A.heads, A.head_dim, A.embed }, m.param { A.embed, A.ffn }, m.param { A.embed, A.ffn }, m.param { A.ffn, A.embed }
end)
function Block:forward(x)
  local h = self.norm1(x)
  local a = m.attention(m.rope(h:dot(self.wq, "embed")), m.rope(h:dot(self.wk, "embed")), h:dot(self.wv, "embed"), { causal = true })
  x = x + a:dot(self.wo, "heads", "head_dim")
  h = self.norm2(x)
  return x + m.swiglu(h:dot(self.gate, "embed"), h:dot(self.up, "embed")):dot(self.down, "ffn")
end
local Llama = m.module("Llama", function(self)
  self.table, self.blocks, self.norm = m.param { A.vocab, A.embed }, m.stack(cfg.layers, Block), m.rms_norm { A.embed }
end)
function Llama:forward(tokens)
  local x = self.table:gather(tokens, "vocab")
  for _, block in ipairs(self.blocks) do x = block(x) end
  return self.norm(x):dot(self.table, "embed")
end
local model, bytes = Llama(), 0
for _, p in ipairs(m.module_states(model)) do
  local count = 1
  for _, axis in ipairs(m.axes_of(p)) do count = count * axis.size end
  bytes = bytes + 4 * count
end
local large = m.state { axes = { m.axis("rows", 1024), m.axis("columns", 256 * cfg.probe) }, name = "large", init = 1.0 }
local read = m.compile(function() return { sum = large:read():sum() } end, {}, { name = "read" })
local d, s = Decoder.new(model, { seq = A.seq, slots = 1 }), nil
local function begin()
  if s then d:close(s) end
  s = d:open({ 1, 2, 3, 4 }, { temperature = 0 })
  for _ = 1, 4 do d:step { s } end
end
local function median(list) table.sort(list) return list[#list // 2 + 1] end
local function timed(count, f)
  local wall, cpu = {}, {}
  for i = 1, count do
    local t, c = core.time(), os.clock()
    f()
    wall[i], cpu[i] = core.time() - t, (os.clock() - c) / cfg.threads
  end
  return median(wall), median(cpu), wall[1]
end
local all, least = { {}, {}, {}, {} }, math.huge
for _ = 1, cfg.rounds do
  begin()
  local w, c = timed(5, function() read {} end)
  local dw, dc, dl = timed(math.min(cfg.tokens, cfg.seq - #s.ids - 1), function() d:step { s } end)
  least = math.min(least, dl)
  for i, value in ipairs { dw, dc, bytes / dw / (cfg.probe * 2 ^ 20 / w), bytes / dc / (cfg.probe * 2 ^ 20 / c) } do table.insert(all[i], value) end
end
print(('{"case":"decode-%dx%d","weights_mb":%.1f,"token_ms":%.3f,"token_ms_cpu":%.3f,"token_ms_least":%.3f,"of_read":%.2f,"of_read_cpu":%.2f}'):format(cfg.layers, cfg.embed,
  bytes / 1e6, median(all[1]) * 1e3, median(all[2]) * 1e3, least * 1e3, median(all[3]), median(all[4])))
LUA
}

# Generation on a GPU: presets of models/, beside torch_generate.py of the folder PEERS; bytes as that counts them.
write_decode_gpu() {
    cat >"$cache/decode_gpu.lua" <<'LUA'
-- A model of models/ with random weights continues prompts of random tokens, all alike in length: tokens/s, the time to the first tokens,
-- the time until steps are ready, and the bytes of weights and cache that a step reads over its time, as torch_generate.py counts them.
local m, core, Decoder = require "mlua", require "mlua.core", require "mlua.decode"
local function number(name, default) return math.tointeger(os.getenv(name)) or default end
local rows, prompt, tokens = number("ROWS", 1), number("PROMPT", 512), number("TOKENS", 256)
local config, axes, A, model, cfg = m.config, m.axes, nil, nil, nil
m.config = function(spec) cfg = config(spec) return cfg end
m.axes = function(sizes) A = axes(sizes) return A end
m.train = function(options) model = options.model end
m.generate = function() end
dofile("models/" .. os.getenv "SCRIPT" .. ".lua")
local function elements(p)
  local count = 1
  for _, axis in ipairs(m.axes_of(p)) do count = count * axis.size end
  return count
end
local all, experts = 0, 0
for _, p in ipairs(m.module_states(model)) do
  local of_experts = false
  for _, axis in ipairs(m.axes_of(p)) do of_experts = of_experts or axis.name == "experts" and #m.axes_of(p) > 2 end
  all, experts = all + elements(p), experts + (of_experts and elements(p) or 0)
end
local clock = core.time()
local sums = m.compile(function()
  local sum
  for _, p in ipairs(m.module_states(model)) do
    local one = p
    for _, axis in ipairs(m.axes_of(p)) do one = one:slice(axis.name, 0, 1) end
    one = one:sum():cast "f32"
    sum = sum and sum + one or one
  end
  return { sum = sum }
end, {}, { name = "weights" })
sums {}
local weights_s = core.time() - clock
clock = core.time()
local d = Decoder.new(model, { seq = A.seq, slots = rows, chunk = number("CHUNK", 512), weights = os.getenv "WEIGHTS" })
local temperature = tonumber(os.getenv "TEMPERATURE" or 1)
local asked = { temperature = temperature, seed = 1 }
d:prepare({ asked }, rows)
local compile_s = core.time() - clock
local state = 12345
local function random(n)
  state = (state * 1103515245 + 12345) % 2147483648
  return state // 65536 % n
end
local list
local function begin()
  for _, s in ipairs(list or {}) do d:close(s) end
  list = {}
  for i = 1, rows do
    local ids = {}
    for j = 1, prompt do ids[j] = random(d.vocab) end
    list[i] = d:open(ids, { temperature = temperature, seed = i })
  end
end
local function all_ready()
  for _, s in ipairs(list) do if not s.ready then return false end end
  return true
end
local function prefill()
  while not all_ready() do
    local reading = {}
    for _, s in ipairs(list) do if not s.ready then reading[#reading + 1] = s end end
    d:step(reading)
  end
end
begin()
prefill()
for _ = 1, 4 do d:step(list) end
local ready_s = core.time() - clock
local first = math.huge
for _ = 1, 3 do
  begin()
  local t = core.time()
  prefill()
  first = math.min(first, core.time() - t)
end
local t = core.time()
for _ = 1, tokens - 1 do d:step(list) end
t = (core.time() - t) / (tokens - 1)
local kept = 0
for _, k in ipairs(d.cache.kept:list()) do kept = kept + (k.kind == "pool" and k.bytes or 0) end
local met = experts
if experts > 0 then -- of the experts that rows choose at random, as many are expected
  local share = 1 - (1 - cfg.top_k / cfg.experts) ^ rows
  met = experts * share
end
local bytes = 2 * (all - experts + met) * (d.weights and 0.5 or 1) + rows * kept * (prompt + tokens / 2)
print(('{"model":"%s","B":%d,"prompt":%d,"tokens":%d,"weights":"%s","kernels":"%s","params_m":%.1f,"ms_token":%.3f,"tok_s":%.1f,"ttft_ms":%.1f,"compile_s":%.2f,"ready_s":%.2f,"weights_s":%.1f,"kept_bytes":%d,"gb_s":%.0f}'):format(
  os.getenv "NAME", rows, prompt, tokens, d.weights or "bf16", os.getenv "KERNELS" or "", all / 1e6, t * 1e3, rows / t, first * 1e3, compile_s, ready_s, weights_s, kept, bytes / t / 1e9))
LUA
}
# decode_gpu_case NAME SCRIPT ROWS: without a kernel compiled before, then the peer, then with these kernels stored
decode_gpu_case() {
    local when
    export MLUA_CACHE="$cache/decode-$1-$3" TORCHINDUCTOR_CACHE_DIR="$cache/inductor-$1-$3" TRITON_CACHE_DIR="$cache/triton-$1-$3"
    for when in cold warm; do
        NAME=$1 SCRIPT=$2 ROWS=$3 KERNELS=$when "$mlua" run "$cache/decode_gpu.lua" --device "${DEVICE:-cuda}" preset="$1" seq=784 || return 1
        [ $when = warm ] || [ -z "$peers" ] || [ "$2" != llama ] || "$python" "$peers/torch_generate.py" --model "$1" -B "$3" | tail -n 1
    done
}

mode=${1:-cpu} failed=0
shift
cases=("$@")
if [ "$mode" = cpu ]; then
    wanted gpt-6x384 && run_case gpt-6x384 8 2 "$peers/torch_cpu.py 6 384 6 256 16 256" -- models/gpt.lua --device cpu \
        layers=6 embed=384 heads=6 vocab=256 batch=16 seq=256 sample=0
    wanted gpt-12x768 && run_case gpt-12x768 6 2 "$peers/torch_cpu.py 12 768 12 50304 4 64" -- models/gpt.lua --device cpu \
        layers=12 embed=768 heads=12 vocab=50304 batch=4 seq=64 sample=0
    if wanted check-124m; then
        for i in 1 2 3 4 5 6 7; do
            start=$(now); "$mlua" check models/gpt.lua preset=gpt2-124m >/dev/null; end=$(now)
            awk "BEGIN { print $end - $start }"
        done | median | awk '{ printf "{\"case\":\"check-124m\",\"seconds\":%.3f}\n", $1 }'
    fi
    if wanted samples; then # examples of 1,024 tokens a second and core, by how sample makes them
        cat >"$cache/samples.lua" <<'LUA'
local m = require "mlua"
local A, how = m.axes { batch = 256, seq = 1024 }, m.config { how = "fill" }.how
local Model = m.module("Model", function(self) self.gain = m.param { A.seq } end)
function Model:forward(x) return (x:cast "f32" * self.gain):sum() end
local model, corpus, tokens, targets = Model(), m.corpus(), m.host("i32", 1, 1024), m.host("i32", 1, 1024)
local makers = {
  fill = function(_, random) return random:fill(tokens, 0, 50256) end,
  corpus = function(index) return corpus:fill(tokens, targets, index, { seed = 1 }) and tokens end,
  set = function() for i = 1, 1024 do tokens[i] = i * 31 % 50257 end return tokens end,
  list = function() local ids = {} for i = 1, 1024 do ids[i] = i * 31 % 50257 end return ids end,
  draw = function(_, random) local ids = {} for i = 1, 1024 do ids[i] = random:integer(0, 50256) end return ids end,
}
local first, last
m.train { model = model, batch = A.batch, steps = 40, inputs = { tokens = { A.batch, A.seq, dtype = "i32" } },
  sample = function(index, random) return { tokens = makers[how](index, random) } end,
  loss = function(i) return model(i.tokens) * 1e-9, 1 end,
  on_step = function(step) first, last = step == 1 and os.clock() or first, os.clock() end }
print(('{"case":"samples-%s","per_s_and_core":%.0f}'):format(how, 39 * A.batch.size / (last - first)))
LUA
        for how in fill corpus set list draw; do "$mlua" run --device cpu --quiet "$cache/samples.lua" how=$how; done
    fi
    if wanted decode; then
        write_decode
        "$mlua" run --device cpu --quiet "$cache/decode.lua"
        "$mlua" run --device cpu --quiet "$cache/decode.lua" layers=4 embed=256 heads=4 ffn=704 vocab=256 probe=16 tokens=200
    fi
elif [ "$mode" = load ] || [ "$mode" = export ]; then
    "${mode}_cases" || failed=1
elif [ "$mode" = decode-gpu ]; then
    write_decode_gpu
    "$mlua" doctor --bench | grep -i 'bench' >&2
    while read -r name script rows; do
        wanted "$name-$rows" && { decode_gpu_case "$name" "$script" "$rows" </dev/null || failed=1; }
    done <<'CASES'
llama-3b llama 1
llama-1b llama 1
llama-3b llama 32
moe-8x gpt_moe 1
moe-8x gpt_moe 32
CASES
else
    data=${DATA:-$cache/tokens.bin}
    [ -n "${DATA:-}" ] || draw_tokens "$data"
    echo '| model | batch x length | mlua tokens/s | PyTorch | ratio | peak GiB, mlua / PyTorch | first step, cold / warm (PyTorch) | best times of the step | GPU busy |'
    echo '| --- | --- | --- | --- | --- | --- | --- | --- | --- |'
    while read -r name script batch seq; do
        wanted "$name" && { gpu_case "$name" "models/$script.lua" "$batch" "$seq" </dev/null || failed=1; }
    done <<'CASES'
gpt2-124m gpt 64 1024
gpt-1.3b gpt 8 2048
gpt2-1.5b gpt 16 1024
llama-1b llama 4 4096
llama-3b llama 2 4096
moe-8x gpt_moe 4 4096
moe-64x gpt_moe 4 4096
CASES
fi
exit $failed
