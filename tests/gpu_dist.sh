#!/usr/bin/env bash
# Several GPUs of one machine, in one go and building nothing: tests/gpu_dist.sh [OUTPUT-FOLDER]
# PARTS picks and orders parts (all but "all", "variants", "gathered", "mixed", "hosts" and "endings"
# unless told otherwise):
#   data      gpt-1.3b under data parallelism: ZeRO-1, FSDP, FSDP that keeps what it gathers; tokens/s
#             of a GPU beside one alone, and the share of time in exposed communication
#   variants  more is kept than gathered again; NCCL's settings and the order of collectives changed
#   stages    gpt-1.3b in pipeline stages: 1F1B, interleaved, zero-bubble, with 16 microbatches;
#             their bubbles, measured and planned
#   split     tensors and context split over two GPUs
#   mixed     four GPUs as two times two: data beside tensors and beside context; copies against NCCL
#   experts   a mixture of experts, whose experts are split over all GPUs; rows are sent
#   gathered  the same with weights gathered instead
#   ranks     build/test --gpu gpu_ranks gpu/edges: layouts against one GPU, messages, ranks that fail
#   endings   ENDINGS (25) times each: a plan that fails, an error in the script, an unknown mesh axis and
#             too little memory, while NCCL connects two GPUs: one message, exit code 1, nothing else
#   hosts     GPUs of this machine as those of two hosts (MLUA_HOSTS=2): layouts against one GPU, deaths
#   sample    a few layouts of every kind against one GPU: f32 within 1e-4, bf16 within 2e-2
#   all       every layout of every model; TURNS=1: each with one of its models and accumulations
# Logs and traces go to the folder; the last lines are a table. Exits 1 if anything failed. GPUS=n
# uses no more, and CUDA_VISIBLE_DEVICES says which; STEPS, SETTINGS and EXPERTS are those of a speed;
# B is the build folder; LIMIT seconds a part, TOTAL seconds all of them; JOBS (1) tests of `ranks` and
# `hosts` run at once. Layouts are of 2, 4 and 8 ranks, in f32 and bf16, or as RANKS and DTYPES say;
# those of fewer ranks than there are GPUs are compared side by side, SHARE (1) at once on the same
# GPUs. Where there are fewer GPUs than ranks, "8-on-2" in the table, ranks share them and take
# themselves for those of several hosts, between which NCCL goes through sockets: so layouts, and they
# alone, do with one GPU.
# A step of eight ranks on one takes some 2.5 s, of four 0.6 s; DIST_STEPS=3 makes three steps, not five.
set -u
cd "$(dirname "$0")/.."
build=${B:-build} out=${1:-$(mktemp -d)} limit=${LIMIT:-300} total=${TOTAL:-3600} steps=${STEPS:-30}
parts=${PARTS:-data stages split experts ranks sample}
read -ra settings <<<"${SETTINGS:-preset=gpt-1.3b}"
read -ra experts <<<"${EXPERTS:-preset=moe-8x aux=0.01}"
mkdir -p "$out"
export MLUA=${MLUA:-$build/mlua} MLUA_CACHE=${MLUA_CACHE:-$out/cache} MLUA_TIMEOUT=${MLUA_TIMEOUT:-12}
found=${CUDA_VISIBLE_DEVICES:-$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null)}
read -ra devices <<<"$(echo "${found:-$(seq 0 $((${GPUS:-0} - 1)))}" | tr ',\n' '  ')"
gpus=${GPUS:-${#devices[@]}}
[ "$gpus" -ge 1 ] || { echo "gpu_dist.sh: there is no GPU here" >&2; exit 2; }
most=$gpus # ranks of what is split over all: a power of two
[ $((most & (most - 1))) = 0 ] || most=2
second=$([ "$gpus" -ge 4 ] && echo 2 || echo 0) # where a second pair of GPUs begins

# on FIRST COUNT COMMAND...: with so many of the GPUs, from that one on
on() {
    local list="${devices[*]:$1:$2}"
    shift 2
    CUDA_VISIBLE_DEVICES=${list// /,} "$@"
}

# row TEXT: of the table; parts that run beside others add theirs too
row() {
    printf '%s\n' "$*" | tee -a "$out/table.txt"
}

# part NAME COMMAND...: run it into NAME.log and note how it went
part() {
    local name=$1 start=$SECONDS status result left=$((total - SECONDS))
    shift
    [ $left -gt 5 ] || { row "$(printf '%-26s left out: %s s are over' "$name" "$total")"; touch "$out/bad"; return 1; }
    [ $left -lt "$limit" ] || left=$limit
    timeout -k 5 "$left" "$@" >"$out/$name.log" 2>&1
    status=$?
    result=$(grep -E '^[0-9]+ passed|layouts; worst' "$out/$name.log" | tail -n 2 | tr '\n' ' ')
    [ $status -lt 124 ] || result="stopped after $left s, $(grep -cE '^ok | ranks$' "$out/$name.log") done"
    [ $status = 0 ] || { touch "$out/bad"; grep -E '^  |^FAIL|mlua:' "$out/$name.log" | head -20; }
    row "$(printf '%-26s %-6s %5d s  %s' "$name" "$([ $status = 0 ] && echo ok || echo FAILED)" \
        $((SECONDS - start)) "$result")"
    return $status
}

# value KEY LOG [STEPS]: the median of the last steps' values of the key; "-" where there are none.
value() {
    sed -n "s/.*\"$1\":\\([0-9.e+-]*\\).*/\\1/p" "$2" | tail -n "${3:-$((steps / 2))}" | sort -g |
        awk '{ v[NR] = $1 } END { if (NR) print v[int((NR + 1) / 2)]; else print "-" }'
}

# speed NAME RANKS MESH MODEL SETTINGS...: beside one GPU alone, whose speed is in alone.MODEL
speed() {
    local name=$1 ranks=$2 mesh=$3 model=$4 log all each alone text
    shift 4
    log=$out/$name.log
    part "$name" "$MLUA" run "models/$model.lua" --device cuda --json -n "$ranks" --mesh "$mesh" \
        sample=0 steps="$steps" "$@" || return
    all=$(value tokens_per_s "$log")
    each=$(awk -v t="$all" -v n="$ranks" 'BEGIN { printf "%.0f", t / n }')
    [ "$ranks" != 1 ] || echo "$each" >"$out/alone.$model"
    alone=$(cat "$out/alone.$model" 2>/dev/null || echo "$each")
    text=$(printf '%-26s %.0f tokens/s, %s of a GPU (%s%% of one alone), %.1f ms, memory %.1f GiB' "" \
        "$all" "$each" "$(awk -v e="$each" -v a="$alone" 'BEGIN { printf "%.1f", 100 * e / a }')" \
        "$(value step_ms "$log")" "$(value memory_gib "$log")")
    if grep -q '"exposed_collective_ms"' "$log"; then
        text+=$(awk -v c="$(value collective_ms "$log" 1)" -v e="$(value exposed_collective_ms "$log" 1)" \
            -v s="$(value whole_step_ms "$log" 1)" 'BEGIN {
            printf "; collectives %.1f ms, exposed %.1f ms, %.1f%% of a step of %.1f ms", c, e, 100 * e / s, s }')
    fi
    if grep -q '"bubble_planned"' "$log"; then
        text+=$(awk -v b="$(value bubble "$log" 1)" -v f="$(value bubble_predicted "$log" 1)" \
            -v p="$(value bubble_planned "$log" 1)" 'BEGIN {
            printf "; bubble %.1f%%, predicted %.1f%%, planned %.1f%%", 100 * b, 100 * f, 100 * p }')
    fi
    row "$text"
}

profiled() { # NAME RANKS MESH MODEL SETTINGS...
    speed "$@" --profile="$out/$1.json"
}

# Tokens of a flat distribution: then the router's is about even, as with a trained model.
tokens() {
    [ -s "$out/tokens.bin" ] && return
    printf '%s\n' 'math.randomseed(1) local f = assert(io.open(os.getenv "TOKENS", "wb"))' \
        'for _ = 1, 4000000 do f:write(string.pack("<I2", math.random(0, 50303))) end f:close()' \
        >"$out/tokens.lua"
    TOKENS=$out/tokens.bin "$MLUA" run "$out/tokens.lua" --device cpu && experts+=(data="$out/tokens.bin")
}

alone() {
    local gpt=$out/alone.gpt moe=$out/alone.gpt_moe
    [ "$1" != experts ] || tokens
    [ -s "$gpt" ] || on 0 1 speed one 1 dp=1 gpt "${settings[@]}" batch=8 &
    [ -s "$moe" ] || [ "$1" != experts ] ||
        on 1 1 speed one-moe 1 dp=1 gpt_moe "${experts[@]}" batch=4 &
    wait
}

data() {
    alone "$@"
    local b=$((8 * most))
    profiled "zero1-dp$most" "$most" "dp=$most" gpt "${settings[@]}" batch=$b
    profiled "kept-dp$most" "$most" "dp=$most" gpt "${settings[@]}" batch=$b layout=fsdp reshard=false
    speed "fsdp-dp$most" "$most" "dp=$most" gpt "${settings[@]}" batch=$b layout=fsdp
}

variants() {
    local kept="layout=fsdp reshard=false" b=$((8 * most))
    alone "$@"
    # shellcheck disable=SC2086
    NCCL_MIN_CTAS=32 speed kept-ctas-32 "$most" "dp=$most" gpt "${settings[@]}" batch=$b $kept
    on 0 2 speed tp2-kept 2 tp=2 gpt "${settings[@]}" batch=16 reshard=false &
    [ "$gpus" -ge 4 ] || wait
    on "$second" 2 speed cp2-kept 2 cp=2 gpt "${settings[@]}" batch=16 reshard=false &
    wait
    # shellcheck disable=SC2086
    NCCL_MAX_CTAS=8 speed kept-ctas-8 "$most" "dp=$most" gpt "${settings[@]}" batch=$b $kept
    # A message's thread blocks in a cluster wait for several multiprocessors at once.
    NCCL_CGA_CLUSTER_SIZE=0 speed "pp$most-no-clusters" "$most" "pp=$most" gpt "${settings[@]}" batch=$b accum=16
    MLUA_OVERLAP=0 speed zero1-in-order "$most" "dp=$most" gpt "${settings[@]}" batch=$b
}

stages() {
    local s
    alone "$@"
    for s in 1f1b interleaved zero-bubble; do # microbatches of 2 rows on four GPUs
        speed "pp$most-$s" "$most" "pp=$most" gpt "${settings[@]}" batch=$((8 * most)) accum=16 schedule=$s ||
            return # what one hangs in the others would too
    done
}

split() {
    alone "$@"
    on 0 2 profiled tp2 2 tp=2 gpt "${settings[@]}" batch=16 &
    [ "$gpus" -ge 4 ] || wait
    on "$second" 2 profiled cp2 2 cp=2 gpt "${settings[@]}" batch=16 &
    wait
}

mixed() {
    local mesh
    [ "$most" -ge 4 ] || { row "mixed                      left out: it takes four GPUs"; return; }
    alone "$@"
    for mesh in dp=2,tp=2 dp=2,cp=2; do
        profiled "${mesh//[=,]/}" 4 "$mesh" gpt "${settings[@]}" batch=32
        MLUA_PEER=0 speed "${mesh//[=,]/}-nccl" 4 "$mesh" gpt "${settings[@]}" batch=32
    done
}

experts() {
    alone experts
    profiled "ep$most" "$most" "ep=$most" gpt_moe "${experts[@]}" batch=$((4 * most)) exchange=2
}

gathered() {
    alone experts
    profiled "ep$most-gathered" "$most" "ep=$most" gpt_moe "${experts[@]}" batch=$((4 * most))
}

# layouts NAME DTYPE BOUND [NAMES]: against one GPU, those of most ranks last
layouts() {
    local ranks at shared hosts worker workers
    for ranks in ${RANKS:-2 4 8}; do
        at=$((ranks < most ? ranks : most)) shared=$((ranks / at))
        hosts=$((shared > ${MLUA_HOSTS:-1} ? shared : ${MLUA_HOSTS:-1}))
        workers=$((gpus / at * ${SHARE:-1}))
        for ((worker = 0; worker < workers; worker++)); do
            on $((worker % (gpus / at) * at)) "$at" \
                part "$1-$ranks$([ $shared = 1 ] || echo "-on-$at")-$((worker + 1))" \
                env MLUA_TUNE=0 MLUA_HOSTS=$hosts MLUA_TIMEOUT=$((MLUA_TIMEOUT * shared)) \
                DIST_ALL=1 DIST_DEVICE=cuda DIST_DTYPE="$2" DIST_BOUND="$3" DIST_ACCUM="${ACCUM:-0}" \
                DIST_RANKS="$ranks" DIST_PART="$((worker + 1))/$workers" DIST_TURNS="${TURNS:-0}" \
                ${4:+DIST_NAMES="$4"} "$build/test" -j 0 dist/every_layout &
        done
        wait
    done
}

layouts_in_both() { # NAME [NAMES]
    local dtype
    for dtype in ${DTYPES:-f32 bf16}; do
        layouts "$1-$dtype" "$dtype" "$([ "$dtype" = f32 ] && echo 1e-4 || echo 2e-2)" "${2:-}"
    done
}

sample() {
    local names="zero1 dp2;fsdp2 kept;tp2 sp;cp2 gathered;cp2 exchanged;cp2 ring;pp2;ep2 rows sent"
    names+=";dp2 tp2 sp zero1;fsdp4;dp2 cp2 ring zero1;pp4 zero-bubble;pp2 dp2 zero-bubble zero1;ep4 zero1"
    names+=";dp2 tp2 pp2;pp4 interleaved dp2;dp2 cp2 tp2 sp;ep4 tp2 sp rows sent"
    layouts_in_both sample "$names"
}

# What crosses the two hosts goes by NCCL through sockets.
hosts() {
    local names="zero1 dp2;tp2 sp;pp2;fsdp4;dp2 tp2 sp zero1;dp2 cp2 ring zero1;pp4 zero-bubble;pp2 dp2 zero-bubble zero1"
    part hosts-ranks "$build/test" --gpu -v -j "${JOBS:-1}" gpu_ranks/hosts
    export MLUA_HOSTS=2
    layouts hosts-f32 f32 1e-4 "$names"
    unset MLUA_HOSTS
}

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null
"$MLUA" doctor 2>&1 | tee "$out/doctor.log"
for p in $parts; do
    case $p in
    sample | all) ;;
    *) [ "$gpus" -ge 2 ] || { row "$(printf '%-26s left out: it takes two GPUs' "$p")"; continue; } ;;
    esac
    case $p in
    data | variants | stages | split | mixed | experts | gathered | hosts | sample) $p "$p" ;;
    endings) ENDINGS=${ENDINGS:-25} part endings "$build/test" --gpu -v -j "${JOBS:-5}" gpu_endings ;;
    ranks) part ranks "$build/test" --gpu -v -j "${JOBS:-1}" gpu_ranks gpu/edges ;;
    all) layouts_in_both all ;;
    *) echo "gpu_dist.sh: there is no part \"$p\"" >&2; exit 2 ;;
    esac
done
echo
cat "$out/table.txt"
[ ! -e "$out/bad" ]
