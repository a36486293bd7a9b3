#!/usr/bin/env bash
# Dynamic context parallelism on two GPUs beside static layouts, in one run: tests/dynamic.sh [OUTPUT-FOLDER]
# 12 layers, 2048 wide, lengths as tests/dynamic_lengths.lua draws them, up to 4,096, at most 2,048 tokens of a
# sequence a rank, 8 microbatches. The last lines are a table:
#   short, long  static throughput without context parallelism on documents of up to 2,048 tokens (dp=2), and with
#                cp=2 on longer ones
#   static       cp=2 for all documents
#   dynamic      cp="dynamic" for all documents; its ratio to `static`, and to the harmonic mean of `short` and `long`
#                weighted by their shares of tokens
# STEPS a run (16), of which the first 6 do not count; MODEL are further settings.
set -u
cd "$(dirname "$0")/.."
out=${1:-$(mktemp -d)} steps=${STEPS:-16} mlua=${MLUA:-build/mlua}
mkdir -p "$out"
export MLUA_CACHE=${MLUA_CACHE:-$out/cache}
read -ra model <<<"layers=12 embed=2048 heads=16 kv_heads=16 ffn=5632 vocab=32000 sample=0 warmup=200 ${MODEL:-}"
"$mlua" run tests/dynamic_lengths.lua out="$out" --device cpu | tee "$out/lengths.txt" || exit 1

run() { # name, data, options of the layout, settings
    local name=$1 data=$2 layout=$3
    shift 3
    timeout "${LIMIT:-200}" "$mlua" run models/llama.lua "${model[@]}" steps="$steps" data="$out/$data.bin" \
        pack=document -n 2 --layout "zero=false$layout" "$@" --json >"$out/$name.json" 2>"$out/$name.txt" ||
        { echo "$name failed: $(tail -n 3 "$out/$name.txt")"; return 1; }
}
run short short "" seq=2048 batch=16 accum=8 --mesh dp=2
run long long "" seq=4096 batch=8 accum=8 --mesh cp=2
run static all "" seq=4096 batch=8 accum=8 --mesh cp=2
run dynamic all ,cp=dynamic seq=4096 batch=8 accum=8 --mesh cp=2
if [ "${RING:-1}" = 1 ]; then
    run long-ring long ,context=ring seq=4096 batch=8 accum=8 --mesh cp=2
    run static-ring all ,context=ring seq=4096 batch=8 accum=8 --mesh cp=2
    run dynamic-ring all ,cp=dynamic,context=ring seq=4096 batch=8 accum=8 --mesh cp=2
fi
grep -h "^sequences" "$out"/dynamic*.txt
python3 - "$out" <<'PY'
import json, re, statistics, sys
out = sys.argv[1]
share = float(re.search(r"([\d.]+) of tokens", open(out + "/lengths.txt").read()).group(1))
speed = {}
for name in "short long static dynamic long-ring static-ring dynamic-ring".split():
    try:
        lines = [json.loads(line) for line in open(f"{out}/{name}.json") if line.startswith("{")]
    except OSError:
        continue
    lines = [line for line in lines if line.get("step", 0) > 6 and "tokens_per_s" in line]
    if not lines:
        continue
    # each step's tokens over its time: medians of steps, as steps differ in their documents the mean beside
    times = [line["step_ms"] for line in lines]
    tokens = 32768
    speed[name] = tokens / statistics.mean(times) * 1e3
    print(f"{name:13} {speed[name]:9.0f} tokens/s, median step {statistics.median(times):7.1f} ms, "
          f"{min(times):7.1f} to {max(times):7.1f}, {lines[-1].get('memory_gib', 0):.1f} GiB, loss {lines[-1]['loss']:.4f}")
for ring in ("", "-ring"):
    try:
        mean = 1 / ((1 - share) / speed["short"] + share / speed["long" + ring])
        print(f"dynamic{ring}: {speed['dynamic' + ring] / speed['static' + ring]:.3f} of static cp=2, "
              f"{speed['dynamic' + ring] / mean:.3f} of the harmonic mean {mean:.0f} (share of long {share:.3f})")
    except KeyError:
        pass
PY
