#!/usr/bin/env bash
# Everything that needs a GPU, in one go and building nothing: tests/gpu.sh [OUTPUT-FOLDER [CASE ...]]
#   1. build/test --gpu           every kernel, product and attention against the reference
#   2. parity with PyTorch        both models, in f32 and bf16
#   3. compute-sanitizer          memcheck on all kernel tests, racecheck on those with shared memory
#   4. tests/bench.sh gpu CASE... (gpt2-124m where none is named)
# Logs go to the folder; the last lines are a table. Exits 1 if anything failed.
# PARTS="test parity memcheck racecheck bench" picks parts; B is the build folder; LIMIT seconds each part.
set -u
cd "$(dirname "$0")/.."
build=${B:-build} out=${1:-$(mktemp -d)} limit=${LIMIT:-240}
[ $# -gt 0 ] && shift
parts=${PARTS:-test parity memcheck racecheck bench}
cases=("$@")
[ ${#cases[@]} -gt 0 ] || cases=(gpt2-124m)
mkdir -p "$out"
export MLUA=${MLUA:-$build/mlua} MLUA_CACHE=${MLUA_CACHE:-$out/cache}
rows=() bad=0

# part NAME COMMAND...: run it into NAME.log and note how it went
part() {
    local name=$1 start end status result
    shift
    start=$(date +%s)
    timeout "$limit" "$@" >"$out/$name.log" 2>&1
    status=$?
    end=$(date +%s)
    result=$(grep -E '^[0-9]+ passed|ERROR SUMMARY|RACECHECK SUMMARY' "$out/$name.log" | tail -n 2 | tr '\n' ' ')
    [ $status = 124 ] && result="stopped after $limit s $result"
    [ $status = 0 ] || { bad=1; grep -E '^  |^FAIL|Invalid|Race|hazard|error' "$out/$name.log" | head -40; }
    rows+=("$(printf '%-22s %-6s %5d s  %s' "$name" "$([ $status = 0 ] && echo ok || echo FAILED)" $((end - start)) "$result")")
}

sanitizer=$(command -v compute-sanitizer || ls "${CUDA_HOME:-/usr/local/cuda}"/bin/compute-sanitizer 2>/dev/null)
sanitize() { # NAME TOOL PATTERN...
    local name=$1 tool=$2
    shift 2
    if [ -z "$sanitizer" ]; then
        rows+=("$(printf '%-22s %-6s' "$name" 'absent: there is no compute-sanitizer')")
        return
    fi
    # Library kernels are not ours to check, and MLUA_TUNE=0 keeps their many candidates out.
    MLUA_TUNE=0 MLUA_CUDNN=0 part "$name" "$sanitizer" --tool "$tool" --error-exitcode 9 \
        --print-limit 20 "$build/test" --gpu "$@"
}

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null
"$MLUA" doctor 2>&1 | tee "$out/doctor.log"
for p in $parts; do
    case $p in
    test) part tests "$build/test" --gpu ;;
    parity)
        for dtype in f32 bf16; do
            for model in gpt llama; do
                echo "require('mlua.core').compute_dtype '$dtype' dofile 'tests/lua/parity_$model.lua'" \
                    >"$out/parity.lua"
                part "parity-$model-$dtype" "$MLUA" run "$out/parity.lua" --device "${DEVICE:-cuda}"
                tail -n 3 "$out/parity-$model-$dtype.log"
            done
        done
        ;;
    memcheck) sanitize memcheck memcheck gpu_ops gpu_attention/f32 gpu_attention/bf16_template ;;
    racecheck) sanitize racecheck racecheck gpu_ops/reductions gpu_ops/scans gpu_attention/bf16_template ;;
    bench)
        for c in "${cases[@]}"; do
            part "bench-$c" tests/bench.sh gpu "$c"
            grep '^{' "$out/bench-$c.log"
        done
        ;;
    *) echo "gpu.sh: there is no part \"$p\"" >&2; exit 2 ;;
    esac
done
echo
printf '%s\n' "${rows[@]}"
exit $bad
