#!/usr/bin/env bash
# Matched training: the same model, seed, order and text in bf16, fp8 and f16, and how far their losses are apart beside what rounding
# alone does to bf16: tests/matched.sh [OUTPUT-FOLDER [SETTING ...]]
# The text is what MEGABYTES (100) of files of documentation and sources under TEXT (folders) hold, each content once, as bytes: vocab=256.
# A run is a dtype and what changes its sums' order: bf16, bf16-attention (other kernels: MLUA_WGMMA=0), bf16-accum (accum=2), bf16-accum4,
# bf16-attention-accum. Sigma is the standard deviation of bf16's runs. Compared are mean losses of the last TAIL (200) of STEPS (2000) steps,
# the mean over a dtype's runs: fp8 within max(0.004, 2 sigma) of bf16's mean, f16 and f32 within max(0.002, 2 sigma). Three runs give a rough sigma:
# one more run of bf16 itself is further than 2 sigma from their mean in 23 of 100 cases (Student's t, 2 degrees of freedom), of six runs in 12.
# SCRIPT (models/gpt.lua), DEVICE (cuda), MLUA and RUNS ("bf16 bf16-attention bf16-accum fp8 f16") choose.
# GPUS ("0 1 2") runs as many at a time, each on a GPU of its own.
# The folder gets losses.txt, a column a run. Exits 1 where a run fails or is further off.
set -u
cd "$(dirname "$0")/.."
out=${1:-$(mktemp -d)} steps=${STEPS:-2000} tail=${TAIL:-200} mlua=${MLUA:-build/mlua} device=${DEVICE:-cuda}
script=${SCRIPT:-models/gpt.lua} runs=${RUNS:-bf16 bf16-attention bf16-accum fp8 f16}
gpus=(${GPUS:-})
[ $# -gt 0 ] && shift
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out"
read -ra folders <<<"${TEXT:-/usr/share/doc /usr/share/perl /usr/lib/python3 /usr/lib/python3.11 /usr/lib/python3.12 /usr/local/lib /usr/include}"

# The files' contents in the order of their sums, each once, up to so many megabytes.
collect() {
    find "${folders[@]}" -xdev -type f \( -name '*.txt' -o -name '*.py' -o -name '*.h' -o -name '*.md' -o -name '*.rst' -o -name '*.html' -o \
        -name '*.pod' -o -name '*.pm' -o -name copyright \) -size +1k -size -2000k -print0 2>/dev/null | xargs -0 -P 8 -n 200 md5sum 2>/dev/null |
        sort -u -k1,1 | cut -c35- | tr '\n' '\0' | xargs -0 cat 2>/dev/null | head -c "${MEGABYTES:-100}000000"
}
collect >"$work/text.txt"
echo "text: $(stat -c %s "$work/text.txt") bytes"

# train NAME: its losses, a line a step
train() {
    local dtype=${1%%-*} extra=()
    [[ $1 == *-accum* ]] && extra=(accum="${1##*-accum}") && [ "${extra[0]}" = accum= ] && extra=(accum=2)
    local other=()
    [[ $1 == *-attention* ]] && other=(MLUA_WGMMA=0)
    [ ${#gpus[@]} -gt 0 ] && other+=(CUDA_VISIBLE_DEVICES="${gpus[slot]}")
    env "${other[@]}" "$mlua" run "$script" --device "$device" --dtype "$dtype" --json data="$work/text.txt" \
        steps="$steps" sample=0 "${extra[@]}" "${settings[@]}" 2>"$work/$1.err" | grep -o '"loss": *[-0-9.e]*' | sed 's/.*: *//' >"$work/$1"
    [ "$(wc -l <"$work/$1")" -ge "$steps" ] || { echo "$1 ended early:" && tail -n 3 "$work/$1.err"; return 1; }
    printf '%-16s mean loss of the last %d steps %.5f\n' "$1" "$tail" "$(mean "$1")"
}
mean() { tail -n "$tail" "$work/$1" | awk '{ s += $1 } END { print s / NR }'; }
settings=(layers=12 embed=768 heads=12 vocab=256 seq=1024 batch=16 warmup=$((steps / 10)) lr=6e-4 "$@")

# worker SLOT: trains each run that no other worker has claimed
worker() {
    local slot=$1 run
    for run in $runs; do
        mkdir "$work/$run.claim" 2>/dev/null || continue
        train "$run" && touch "$work/$run.ok"
    done
}
failed=0 done=()
for slot in $(seq 0 $((${#gpus[@]} > 1 ? ${#gpus[@]} - 1 : 0))); do worker "$slot" & done
wait
for run in $runs; do [ -e "$work/$run.ok" ] && done+=("$run") || failed=1; done
(cd "$work" && paste "${done[@]}" | sed "1i ${done[*]}" >losses) && cp "$work/losses" "$out/losses.txt"
for run in "${done[@]}"; do echo "${run%%-*} $(mean "$run")"; done | awk '
    { n[$1]++; s[$1] += $2; q[$1, n[$1]] = $2 }
    END {
        if (!n["bf16"]) exit 1
        base = s["bf16"] / n["bf16"]
        for (i = 1; i <= n["bf16"]; i++) v += (q["bf16", i] - base) ^ 2
        sigma = n["bf16"] > 1 ? sqrt(v / (n["bf16"] - 1)) : 0
        printf "bf16: mean %.5f, sigma %.5f of %d runs\n", base, sigma, n["bf16"]
        for (name in n) if (name != "bf16") {
            bound = name == "fp8" ? 0.004 : 0.002
            if (2 * sigma > bound) bound = 2 * sigma
            off = s[name] / n[name] - base
            far = off > bound || off < -bound
            printf "%s: %+.5f, mean of %d, allowed %.5f: %s\n", name, off, n[name], bound, far ? "FAILED" : "ok"
            bad += far
        }
        exit bad > 0
    }' || failed=1
exit $failed
