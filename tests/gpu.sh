#!/usr/bin/env bash
# What needs a GPU, in one go and building nothing: tests/gpu.sh [OUTPUT-FOLDER [CASE ...]]
# PARTS picks parts, or a list of them; what runs by default is `right` and then `profile`:
#   right   smoke kernels products attention tiles parity losses racecheck synccheck memcheck initcheck
#           trace: parts that measure nothing run side by side, JOBS (half the cores) at once
#   fast    norms scans loop ragged times flex profile bench, each alone
#   smoke      a few steps of a small model: the driver, NVRTC, cuBLASLt and cuDNN are there
#   kernels    every generated kernel against the reference
#   trace      what --profile says of a small run
#   products   cuBLASLt, and products by groups on warpgroup products
#   attention  cuDNN, and mlua's own kernels as they run by default
#   tiles      the other tiles of warpgroup products (MLUA_WGMMA=2 and 3), MLUA_DETERMINISTIC=0, and what is chosen by time
#   norms      how fast norms, short convolutions, their gradients, sums for biases and losses are, beside a copy
#   scans      how fast scans and their gradients are: elementwise steps beside a copy, states of outer products and the delta
#              rule beside their limits and PyTorch's chunked forms
#   loop       how fast an LSTM layer is, beside cuDNN's by PyTorch
#   ragged     how fast products by groups are
#   times      how fast attention is: cuDNN, mma.sync and each variant; cached attention of a decoding step and a chunk
#   flex       the same score functions and masks in PyTorch's FlexAttention
#   parity     models against PyTorch's numbers, in f32, some in bf16 too
#   profile    each CASE: tokens/s, and time by kind of kernel beside the best there is
#   variants   the same of the first CASE: MLUA_DETERMINISTIC=0, MLUA_CUDNN=0, MLUA_RECOMPUTE=0
#   memcheck, racecheck, synccheck, initcheck   compute-sanitizer (initcheck: memory that nobody wrote)
#   losses     the first 20 losses beside PyTorch's, from the same weights and tokens: gpt2-124m and moe-8x in bf16, and f32
#   bench      each CASE by tests/bench.sh: first steps, tokens/s, memory, PyTorch beside it (PEER_COMPILE)
# A part that takes longer than its limit is killed, and those tests are told that had not ended; no
# part begins when less than 20 s of BUDGET (570) seconds are left. The folder gets table.txt and
# logs.txt, whatever happens. Exits 1 if anything failed. B is the build folder; LIMIT overrides every
# limit; SETTINGS are settings of the cases' runs; DEVICE is cuda.
set -u
cd "$(dirname "$0")/.."
build=${B:-build} out=${1:-$(mktemp -d)} budget=${BUDGET:-570} begun=$SECONDS
[ $# -gt 0 ] && shift
right="racecheck losses attention tiles memcheck initcheck synccheck kernels products parity smoke trace"
parts=" ${PARTS:-right profile} "
parts=${parts/ right / $right }
parts=${parts/ fast / norms scans loop ragged times flex profile bench }
cases=("$@")
[ ${#cases[@]} -gt 0 ] || cases=(gpt2-124m llama-1b moe-8x moe-64x)
read -ra settings <<<"${SETTINGS:-}"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out"
rm -f "$out/table.txt" "$out/logs.txt"
export MLUA=${MLUA:-$build/mlua} MLUA_CACHE=${MLUA_CACHE:-$work/cache}

# note ROW: into the table, and told at once
note() { echo "$1" | tee -a "$out/table.txt"; }

# Of a test program that was killed: what it had not ended.
unfinished() { # LOG PATTERN...
    local log=$1
    shift
    comm -23 <("$build/test" --gpu --list "$@" | sort) <(sed -nE 's/^(ok|FAILED) ([^ :]*).*/\2/p' "$log" | sort) | tr '\n' ' '
}

# part NAME LIMIT COMMAND...: run it, and note how it went
part() {
    local name=$1 limit=${LIMIT:-$2} left=$((budget - SECONDS + begun)) start=$SECONDS status result log=$work/$1.log
    shift 2
    if [ $left -lt 20 ]; then
        note "$(printf '%-20s left out: %d s are left' "$name" $left)"
        return 1
    fi
    [ "$limit" -le $left ] || limit=$left
    # A kernel that never ends lets no signal through but the last one.
    timeout -k 5 "$limit" "$@" >"$log" 2>&1
    status=$?
    { flock 8; echo "==== $name: $*"; cat "$log"; } 8>>"$work/lock" >>"$out/logs.txt"
    result=$(grep -E '^[0-9]+ passed|ERROR SUMMARY|RACECHECK SUMMARY' "$log" | tail -n 2 | tr '\n' ' ')
    if [ $status = 124 ] || [ $status = 137 ]; then result="stopped after $limit s $result"; fi
    note "$(printf '%-20s %-6s %4d s  %s' "$name" "$([ $status = 0 ] && echo ok || echo FAILED)" $((SECONDS - start)) "$result")"
    grep -E '^mlua: ' "$log" | sort -u | head -5
    [ $status = 0 ] && return 0
    touch "$work/bad"
    grep -E '^  |^FAIL|\.lua:[0-9]+: |Invalid|Race|hazard|[Ee]rror| off by ' "$log" | cut -c1-200 | head -25 | grep . || tail -n 12 "$log" | cut -c1-200
    return 1
}

# tests NAME LIMIT PATTERN...: of build/test
tests() {
    local name=$1 limit=$2
    shift 2
    part "$name" "$limit" "$build/test" --gpu -v "$@" || [ ! -f "$work/$name.log" ] ||
        grep -qE '^[0-9]+ passed' "$work/$name.log" || note "  had not ended: $(unfinished "$work/$name.log" "$@")"
}

# times NAME LIMIT PATTERN: what a test prints
times() {
    BENCH=${BENCH:-1} tests "$1" "$2" -j 0 "$3"
    grep -E 'TFLOP/s|% of ' "$work/$1.log" 2>/dev/null | tee -a "$out/table.txt"
}

sanitizer=$(command -v compute-sanitizer || ls "${CUDA_HOME:-/usr/local/cuda}"/bin/compute-sanitizer 2>/dev/null)
sanitize() { # NAME PATTERN..., where NAME begins with the tool's
    local name=$1 tool=${1%%-*}
    shift
    if [ -z "$sanitizer" ]; then
        note "$(printf '%-20s absent: there is no compute-sanitizer' "$name")"
        return
    fi
    # Library kernels are not ours to check, and MLUA_TUNE=0 keeps their many candidates out.
    MLUA_TUNE=0 MLUA_CUDNN=0 part "$name" 200 "$sanitizer" --tool "$tool" --error-exitcode 9 \
        --print-limit 20 "$build/test" --gpu -v -j 0 "$@" # in one process, which is the one that is watched
}

script_of() { case $1 in gpt*) echo models/gpt.lua ;; moe*) echo models/gpt_moe.lua ;; *) echo models/llama.lua ;; esac }

profile() { # CASE [NAME]
    local name=${2:-$1}
    local log=$work/profile-$name.log
    part "profile-$name" 75 "$MLUA" run "$(script_of "$1")" --device "${DEVICE:-cuda}" preset="$1" steps=16 --json \
        --profile "$work/$name.json" --profile-steps 5:6 "${settings[@]}" || return
    # Steps from the eighth on run as they do without a profile.
    grep '^{"step"' "$log" | tail -n +9 | sed -nE 's/.*"tokens_per_s":([0-9.]+).*/\1/p' | sort -n |
        awk -v name="$name" '{ a[NR] = $1 } END { if (NR) printf "  %s: %.0f tokens/s (median of %d steps)\n", name, a[int((NR + 1) / 2)], NR }' |
        tee -a "$out/table.txt"
    grep '^{"step"' "$log" | sed -n '1p;$p' | sed -nE 's/.*("step":[0-9]+,"loss":[^,]+).*("memory_gib":[^,]+).*/  \1 \2/p'
    sed -n '/^kind /,/^total /p; /^sum of best/p' "$log" | tee -a "$out/table.txt"
}

losses() { # NAME ARGUMENT...
    local name=losses-$1
    part "$name" 150 "${PYTHON:-python3}" tests/losses_torch.py "${@:2}" --device "${DEVICE:-cuda}"
    grep -E '^(step|largest|PyTorch| +[0-9])' "$work/$name.log" 2>/dev/null | tee -a "$out/table.txt"
}

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null
"$MLUA" doctor 2>&1 | tee "$work/doctor.log"

run_part() {
    case $1 in
    smoke) part smoke 60 "$MLUA" run models/gpt.lua --device "${DEVICE:-cuda}" steps=20 sample=0 --json "${settings[@]}" ;;
    kernels)
        tests kernels 150 gpu_ops gpu/ gpu_copies gpu_segments
        part scan 60 "$MLUA" run tests/lua/scan.lua --device "${DEVICE:-cuda}" --dtype f32
        ;;
    trace) tests trace 30 -j 0 gpu_profile ;;
    products) tests products 90 gpu_gemm gpu_ragged/wide gpu_ragged/drawn ;;
    attention) tests attention 240 gpu_attention/parts gpu_attention/f32 gpu_attention/bf16_cudnn gpu_attention/bf16_template ;;
    tiles) tests tiles 240 gpu_attention/bf16_tiles gpu_attention/bf16_unordered gpu_attention/bf16_chosen ;;
    norms) times norms 30 gpu_norms/ ;;
    scans)
        times scans 30 gpu_recurrence/
        times linear-scan 60 gpu_linear_scan/times
        times delta-scan 60 gpu_delta_scan/times
        "${PYTHON:-python3}" -c "import torch" 2>/dev/null || return
        for peer in elementwise-scan linear-scan gated-delta; do part "torch-$peer" 90 "${PYTHON:-python3}" tests/peers_torch.py "$peer"; done
        grep -h "ms" "$work"/torch-*.log | tee -a "$out/table.txt"
        ;;
    loop)
        times loop 30 gpu_loop/times
        "${PYTHON:-python3}" -c "import torch" 2>/dev/null || return
        part lstm 60 "${PYTHON:-python3}" tests/peers_torch.py lstm
        grep LSTM "$work/lstm.log" | tee -a "$out/table.txt"
        ;;
    ragged) times ragged 60 gpu_ragged/times ;;
    times)
        times times 240 gpu_attention/times
        times cached-attention 60 gpu_cached_attention/times
        ;;
    flex)
        "${PYTHON:-python3}" -c "import torch" 2>/dev/null || return
        part flex 120 "${PYTHON:-python3}" tests/attention_torch.py
        grep forward "$work/flex.log" | tee -a "$out/table.txt"
        ;;
    parity)
        for dtype in f32 bf16; do
            # The weights of the others are too large for gradients of bf16 to be near those of f64 (rounding deltanet's alone moves them by 0.14).
            for model in gpt llama bert rwkv $([ $dtype = bf16 ] || echo t5 vit llava lora mamba deltanet kda hybrid); do
                echo "require('mlua.core').compute_dtype '$dtype' dofile 'tests/lua/parity_$model.lua'" >"$work/parity.lua"
                part "parity-$model-$dtype" 60 "$MLUA" run "$work/parity.lua" --device "${DEVICE:-cuda}"
                grep -vE '^mlua: ' "$work/parity-$model-$dtype.log" | tail -n 2
            done
        done
        ;;
    profile) for c in "${cases[@]}"; do profile "$c"; done ;;
    variants)
        MLUA_DETERMINISTIC=0 profile "${cases[0]}" any-order
        MLUA_CUDNN=0 profile "${cases[0]}" own-attention
        MLUA_RECOMPUTE=0 profile "${cases[0]}" no-recompute
        ;;
    memcheck) sanitize memcheck gpu_ops gpu_ragged/wide gpu_ragged/drawn gpu_attention/bf16_template_heads_first ;;
    racecheck) # slow: in two halves
        # An arrival at an mbarrier orders what its own thread did, to this tool: where one thread arrives
        # for its warp behind __syncwarp, it tells of races that are none (version 2025.3).
        sanitize racecheck-attention gpu_attention/bf16_template_heads_first
        sanitize racecheck-others gpu_ops/reductions gpu_ops/scans gpu_ragged/wide
        ;;
    initcheck) sanitize initcheck gpu_ops gpu_ragged/wide gpu_ragged/drawn gpu_attention/bf16_template_heads_first ;;
    synccheck) sanitize synccheck gpu_ragged/wide gpu_attention/bf16_template_heads_first ;;
    losses)
        if ! "${PYTHON:-python3}" -c "import torch" 2>/dev/null; then
            note "$(printf '%-20s absent: there is no PyTorch (PYTHON names an interpreter that has it)' losses)"
            return
        fi
        # In bf16 a leap of the norm (from 4 to 13 in step 16) amplifies what rounding leaves. With an f32 residual stream
        # PyTorch's norms are compared over the ten steps before. With a stream rounded to bf16, as mlua's is, over 20: there
        # mlua may be 0.1 % and twice as far off as any two of six PyTorch runs are from one another whose rows come in
        # other orders, which changes the order of sums alone (0.5 and 0.9 % in two pairs, behind the leaps). Warm-ups are
        # longer than 20 steps for norms and for moe-8x, yet shorter than the presets', for more to happen in 20 steps. In
        # f32 only the order of sums differs; a moe's losses part after 10 to 15 steps, otherwise in each run, probably
        # where a token near a tie is routed to another expert: ten steps, within the same bounds.
        losses gpt2-124m gpt preset=gpt2-124m warmup=20
        losses gpt2-124m-norms gpt preset=gpt2-124m warmup=200 steps=10 --norm-bound 0.002 --median-norm-bound 0.001
        losses gpt2-124m-rounded gpt preset=gpt2-124m warmup=200 --residual bf16 --again rows --orders 5 --norm-of-own 2 \
            --norm-bound 0.001 --early-norm-bound 0.001 --median-norm-bound 0.0005
        losses moe-8x moe preset=moe-8x warmup=400
        losses gpt2-124m-f32 gpt preset=gpt2-124m batch=8 warmup=20 --dtype f32
        losses moe-f32 moe layers=4 embed=512 heads=8 kv_heads=4 ffn=704 seq=512 batch=4 vocab=50304 lr=5e-4 steps=10 --dtype f32
        ;;
    bench)
        for c in "${cases[@]}"; do
            part "bench-$c" 120 tests/bench.sh gpu "$c"
            grep '^[{|]' "$work/bench-$c.log" 2>/dev/null | tee -a "$out/table.txt"
        done
        ;;
    esac
}

for p in $parts; do
    case " $right norms scans loop ragged times flex profile variants bench " in
    *" $p "*) ;;
    *) echo "gpu.sh: there is no part \"$p\"" >&2; exit 2 ;;
    esac
done
# The longest first.
jobs=${JOBS:-$((($(nproc) + 1) / 2))}
for p in $parts; do
    case $p in
    racecheck | losses | attention | tiles | memcheck | initcheck | synccheck | kernels | products | parity | smoke)
        while [ "$(jobs -rp | wc -l)" -ge "$jobs" ]; do wait -n; done
        run_part "$p" &
        ;;
    esac
done
wait
for p in $parts; do
    case $p in trace | norms | scans | loop | ragged | times | flex | profile | variants | bench) run_part "$p" ;; esac
done
echo
cat "$out/table.txt"
[ ! -e "$work/bad" ]
