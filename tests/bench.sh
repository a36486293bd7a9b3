#!/usr/bin/env bash
# Benchmarks as JSON lines: tests/bench.sh cpu|gpu [case ...]
# PEERS=DIR runs torch_cpu.py or torch_train.py of that folder beside each case, in turn, in this run;
# PYTHON names the interpreter that has torch. Medians over the steady steps. MLUA names the binary.
set -u
cd "$(dirname "$0")/.."
mlua=${MLUA:-build/mlua} python=${PYTHON:-python3} peers=${PEERS:-}
cache=$(mktemp -d)
trap 'rm -rf "$cache"' EXIT

median() { sort -n | awk '{ a[NR] = $1 } END { if (NR) print (NR % 2 ? a[(NR + 1) / 2] : (a[NR / 2] + a[NR / 2 + 1]) / 2) }'; }
field() { sed -nE "s/.*\"$1\": ?\"?([-+0-9.eE]+).*/\1/p"; }
now() { date +%s.%N; }

# time_first SETTINGS...: seconds from the command to the end of its first step
time_first() {
    local start end
    start=$(now)
    "$mlua" run "$@" steps=1 --json >/dev/null 2>"$cache/err" || { cat "$cache/err" >&2; echo null; return; }
    end=$(now)
    awk "BEGIN { printf \"%.2f\", $end - $start }"
}

# run_case NAME STEPS SKIP PEER-COMMAND -- SCRIPT SETTINGS...
run_case() {
    local name=$1 steps=$2 skip=$3 peer=$4
    shift 5
    local cold warm out speed memory tflops peer_out='' peer_speed=null ratio=null
    cold=$(MLUA_CACHE="$cache/$name" time_first "$@")
    warm=$(MLUA_CACHE="$cache/$name" time_first "$@")
    out=$(MLUA_CACHE="$cache/$name" "$mlua" run "$@" steps="$steps" --json)
    speed=$(echo "$out" | tail -n +$((skip + 1)) | field tokens_per_s | median)
    tflops=$(echo "$out" | tail -n +$((skip + 1)) | field tflops_per_gpu | median)
    memory=$(echo "$out" | tail -n 1 | field memory_gib)
    if [ -n "$peers" ] && [ -n "$peer" ]; then
        peer_out=$($python $peer | tail -n 1)
        peer_speed=$(echo "$peer_out" | sed -nE 's/.*"tok_s(_gpu)?": ?([0-9.]+).*/\2/p')
        ratio=$(awk "BEGIN { printf \"%.2f\", ${speed:-0} / ${peer_speed:-1} }")
    fi
    printf '{"case":"%s","tokens_per_s":%.0f,"tflops":%.2f,"memory_gib":%.2f,"first_step_cold_s":%s,"first_step_warm_s":%s,"first_loss":%s,"last_loss":%s,"peer_tokens_per_s":%s,"ratio":%s}\n' \
        "$name" "${speed:-0}" "${tflops:-0}" "${memory:-0}" "$cold" "$warm" "$(echo "$out" | head -1 | field loss)" \
        "$(echo "$out" | tail -1 | field loss)" "${peer_speed:-null}" "$ratio"
    [ -z "$peer_out" ] || echo "$peer_out"
}

wanted() { [ ${#cases[@]} -eq 0 ] && return 0; local c; for c in "${cases[@]}"; do [ "$c" = "$1" ] && return 0; done; return 1; }

mode=${1:-cpu}
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
else
    peer() { echo "$peers/torch_train.py --model $1 -B $2 -T $3"; }
    wanted gpt2-124m && run_case gpt2-124m 20 5 "$(peer gpt2-124m 64 1024)" -- models/gpt.lua --device cuda preset=gpt2-124m
    wanted gpt-1.3b && run_case gpt-1.3b 15 5 "$(peer gpt-1.3b 8 2048)" -- models/gpt.lua --device cuda preset=gpt-1.3b
    wanted gpt2-1.5b && run_case gpt2-1.5b 15 5 "$(peer gpt2-1.5b 16 1024)" -- models/gpt.lua --device cuda preset=gpt2-1.5b
    wanted llama-1b && run_case llama-1b 15 5 "$(peer llama-1b 4 4096)" -- models/llama.lua --device cuda preset=llama-1b
    wanted llama-3b && run_case llama-3b 15 5 "$(peer llama-3b 2 4096)" -- models/llama.lua --device cuda preset=llama-3b
    wanted moe-8x && run_case moe-8x 15 5 "$(peer moe-8x 4 4096)" -- models/gpt_moe.lua --device cuda preset=moe-8x
    wanted moe-64x && run_case moe-64x 15 5 "$(peer moe-64x 4 4096)" -- models/gpt_moe.lua --device cuda preset=moe-64x
fi
exit 0
