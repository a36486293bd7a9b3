#!/usr/bin/env bash
# Several GPUs of one machine, in one go and building nothing: tests/gpu_dist.sh [OUTPUT-FOLDER]
#   1. build/test --gpu gpu_ranks    layouts against one GPU, messages, ranks that fail
#   2. every layout of every model that fits the GPUs, against one GPU: f32 within 1e-4, bf16 2e-2
#   3. gpt-1.3b under data parallelism with ZeRO-1, tensors split, stages: tokens/s of a GPU beside
#      one alone
# Logs go to the folder; the last lines are a table. Exits 1 if anything failed.
# PARTS="ranks f32 bf16 speed" picks parts; GPUS=n uses no more; STEPS and SETTINGS are those of each
# speed; B is the build folder; LIMIT seconds each part.
set -u
cd "$(dirname "$0")/.."
build=${B:-build} out=${1:-$(mktemp -d)} limit=${LIMIT:-1500} steps=${STEPS:-30}
parts=${PARTS:-ranks f32 bf16 speed}
read -ra settings <<<"${SETTINGS:-preset=gpt-1.3b}"
mkdir -p "$out"
export MLUA=${MLUA:-$build/mlua} MLUA_CACHE=${MLUA_CACHE:-$out/cache}
gpus=${GPUS:-$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | wc -l)}
[ "$gpus" -ge 2 ] || { echo "gpu_dist.sh: $gpus GPUs here, and 2 are needed" >&2; exit 2; }
rows=() bad=0

# part NAME COMMAND...: run it into NAME.log and note how it went
part() {
    local name=$1 start status result
    shift
    start=$(date +%s)
    timeout -k 10 "$limit" "$@" >"$out/$name.log" 2>&1
    status=$?
    result=$(grep -E '^[0-9]+ passed|layouts; worst' "$out/$name.log" | tail -n 2 | tr '\n' ' ')
    [ $status = 124 ] && result="stopped after $limit s $result"
    [ $status = 0 ] || { bad=1; grep -E '^  |^FAIL|mlua:' "$out/$name.log" | head -20; }
    rows+=("$(printf '%-26s %-6s %5d s  %s' "$name" "$([ $status = 0 ] && echo ok || echo FAILED)" \
        $(($(date +%s) - start)) "$result")")
    return $status
}

layouts() { # DTYPE BOUND
    part "layouts-$1" env DIST_ALL=1 DIST_DEVICE=cuda DIST_DTYPE="$1" DIST_BOUND="$2" DIST_RANKS="$gpus" \
        "$build/test" -j 1 dist/every_layout
}

# Median of the last two thirds of the steps; "-" where there are none.
median() { # KEY LOG
    sed -n "s/.*\"$1\":\\([0-9.e+-]*\\).*/\\1/p" "$2" | tail -n +$((steps / 3 + 1)) | sort -g |
        awk '{ v[NR] = $1 } END { if (NR) print v[int((NR + 1) / 2)]; else print "-" }'
}

alone=
speed() { # NAME RANKS MESH SETTINGS...
    local name=$1 ranks=$2 mesh=$3 all each
    shift 3
    part "speed-$name" "$MLUA" run models/gpt.lua --device cuda --json -n "$ranks" --mesh "$mesh" \
        "${settings[@]}" sample=0 steps="$steps" "$@" || return
    all=$(median tokens_per_s "$out/speed-$name.log")
    each=$(awk -v t="$all" -v n="$ranks" 'BEGIN { printf "%.0f", t / n }')
    [ -n "$alone" ] || alone=$each
    rows+=("$(printf '%-26s %s tokens/s, %s of a GPU (%s%% of one alone), memory %s GiB' "" "$(printf %.0f "$all")" "$each" \
        "$(awk -v e="$each" -v a="$alone" 'BEGIN { printf "%.1f", 100 * e / a }')" \
        "$(printf %.1f "$(median memory_gib "$out/speed-$name.log")")")")
}

speeds() {
    local n
    speed one 1 dp=1 batch=8
    for n in 2 4 8; do
        [ "$n" -le "$gpus" ] || break
        speed "zero1-dp$n" "$n" "dp=$n" batch=$((8 * n))
        MLUA_OVERLAP=0 speed "zero1-dp$n-in-order" "$n" "dp=$n" batch=$((8 * n)) # to compare
        speed "fsdp-dp$n" "$n" "dp=$n" batch=$((8 * n)) layout=fsdp
        speed "tp$n" "$n" "tp=$n" batch=$((8 * n))
        speed "pp$n" "$n" "pp=$n" batch=$((8 * n)) accum=$((2 * n)) # microbatches of 4 rows
    done
}

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null
"$MLUA" doctor 2>&1 | tee "$out/doctor.log"
for p in $parts; do
    case $p in
    ranks) part ranks "$build/test" --gpu gpu_ranks ;;
    f32) layouts f32 1e-4 ;;
    bf16) layouts bf16 2e-2 ;;
    speed) speeds ;;
    *) echo "gpu_dist.sh: there is no part \"$p\"" >&2; exit 2 ;;
    esac
done
echo
printf '%s\n' "${rows[@]}"
exit $bad
