#!/usr/bin/env bash
# Dynamic context parallelism beside static layouts, in one run: RANKS=2 tests/dynamic.sh [OUTPUT-FOLDER]
# 12 layers, 2048 wide, lengths as tests/dynamic_lengths.lua draws them, up to 2,048 tokens for each of RANKS GPUs
# (2; 4 ...), 8 microbatches of 2,048 tokens a rank. Each run prints a line as it ends, the last lines are ratios:
#   cp1, cp2 ... static throughput with so many ranks a sequence on the documents that need so many
#   static       all documents with RANKS ranks a sequence
#   dynamic      cp="dynamic" for all documents; its ratio to `static`, and to the harmonic mean of cp1, cp2 ...
#                weighted by their shares of tokens
#   bounded      likewise with cp_tokens=EACH: documents of more tokens are split, whether a row of one rank holds them or not
#   alone        RANKS times one GPU's throughput on the windows of `static`, each on it alone: the same products and query-key
#                pairs without messages, filling or uneven ranks, which bounds any placement
# STEPS a run (16), of which the first 6 do not count; MODEL are further settings, EACH the tokens of a rank's microbatch, ZERO=true has ZeRO-1.
set -u
cd "$(dirname "$0")/.."
out=${1:-$(mktemp -d)} steps=${STEPS:-16} mlua=${MLUA:-build/mlua} ranks=${RANKS:-2} each=${EACH:-2048}
most=$((each * ranks))
mkdir -p "$out"
export MLUA_CACHE=${MLUA_CACHE:-$out/cache}
read -ra model <<<"layers=12 embed=2048 heads=16 kv_heads=16 ffn=5632 vocab=32000 sample=0 warmup=200 ${MODEL:-}"
"$mlua" run tests/dynamic_lengths.lua out="$out" most=$most each="$each" --device cpu | tee "$out/lengths.txt" || exit 1

table=$(cat <<'PY'
import json, re, statistics, sys
out, tokens, only = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
shares = {name: float(s) for name, s in re.findall(r"(cp\d+) ([\d.]+)", open(out + "/lengths.txt").read())}
speed = {}
for name in only or ["alone", *(n + r for r in ("", "-ring") for n in [*shares, "static", "dynamic", "bounded"])]:
    try:
        lines = [json.loads(line) for line in open(f"{out}/{name}.json") if line.startswith("{")]
    except OSError:
        continue
    lines = [line for line in lines if line.get("step", 0) > 6 and "tokens_per_s" in line]
    if not lines:
        continue
    # tokens of a step over its mean time, as steps differ in their documents; the median beside it
    times = [line["step_ms"] for line in lines]
    speed[name] = tokens / statistics.mean(times) * 1e3
    if only:
        print(f"{name:13} {speed[name]:9.0f} tokens/s, median step {statistics.median(times):7.1f} ms, "
              f"{min(times):7.1f} to {max(times):7.1f}, {lines[-1].get('memory_gib', 0):.1f} GiB, loss {lines[-1]['loss']:.4f}")
for name, ring in [(n, r) for n in ("dynamic", "bounded") for r in ("", "-ring")] if not only else ():
    try:
        static = {n: speed.get(n + ring) or speed[n] for n in shares}
        mean = 1 / sum(share / static[n] for n, share in shares.items())
        alone = f", {speed[name + ring] / speed['alone']:.3f} of alone" if "alone" in speed else ""
        print(f"{name}{ring}: {speed[name + ring] / speed['static' + ring]:.3f} of static, "
              f"{speed[name + ring] / mean:.3f} of the harmonic mean {mean:.0f} (shares {shares}){alone}")
    except KeyError:
        pass
PY
)
train() { # NAME DATA TOKENS ROWS RANKS CP LAYOUT: microbatches of ROWS windows of TOKENS for CP ranks, 8 * each * RANKS tokens a step
    local batch=$((8 * each * $5 / $3))
    if timeout "${LIMIT:-200}" "$mlua" run models/llama.lua "${model[@]}" steps="$steps" data="$out/$2.bin" \
        pack=document seq="$3" batch="$batch" accum=$((batch / $4)) -n "$5" \
        --mesh dp=$(($5 / $6)),cp="$6" --layout "zero=${ZERO:-false}$7" --json >"$out/$1.json" 2>"$out/$1.txt"; then
        python3 -c "$table" "$out" $((8 * ranks * each)) "$1"
    else
        echo "$1 failed: $(tail -n 3 "$out/$1.txt")"
    fi
}
run() { # NAME DATA CP LAYOUT: windows for CP ranks, in groups of CP
    train "$1" "$2" $((each * $3)) $((ranks / $3)) "$ranks" "$3" "$4"
}
compare() { # SUFFIX LAYOUT
    for ((cp = 1; cp <= ranks; cp *= 2)); do
        [ "$cp" = 1 ] && [ -n "$1" ] || run "cp$cp$1" "cp$cp" "$cp" "$2"
    done
    run "static$1" all "$ranks" "$2"
    run "dynamic$1" all "$ranks" ",cp=dynamic$2"
    run "bounded$1" all "$ranks" ",cp=dynamic,cp_tokens=$each$2"
}
compare "" ""
[ "${RING:-1}" = 0 ] || compare -ring ,context=ring
train alone all "$most" 1 1 1 ""
grep -h "^sequences" "$out"/dynamic*.txt
python3 -c "$table" "$out" $((8 * ranks * each))
