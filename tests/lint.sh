#!/usr/bin/env bash
# Layering, length and formatting. Prints what is wrong and exits 1 if anything is.
set -u
cd "$(dirname "$0")/.."
bad=0
complain() { echo "lint: $*"; bad=1; }
files=$(git ls-files --cached --others --exclude-standard '*.c' '*.h')

# Layering: each room includes only itself and the rooms that it stands on. runtime/compile.c stands on all that
# plans; pipeline stands on plan.
allowed() { # room -> the folders that it may include
    case $1 in
    runtime/base) echo 'runtime/base' ;;
    runtime/graph) echo 'runtime/(base|graph)' ;;
    runtime/passes) echo 'runtime/(base|graph|passes)' ;;
    runtime/shard) echo 'runtime/(base|graph|passes|shard)' ;;
    codegen) echo '(runtime/(base|graph)|codegen)' ;;
    codegen/jit) echo '(runtime/base|codegen|codegen/jit)' ;;
    codegen/emit) echo '(runtime/(base|graph)|codegen|codegen/emit)' ;;
    codegen/lower) echo '(runtime/(base|graph|passes)|codegen|codegen/lower)' ;;
    codegen/kernels) echo '(runtime/(base|graph)|codegen|codegen/(lower|emit|kernels))' ;;
    runtime/plan) echo '(runtime/(base|graph|passes|shard|plan)|codegen|codegen/lower)' ;;
    runtime/pipeline) echo '(runtime/(base|graph|passes|shard|plan|pipeline)|codegen|codegen/lower)' ;;
    runtime) echo '(runtime(/(base|graph|passes|shard|plan|pipeline))?|codegen|codegen/lower)' ;;
    runtime/io) echo 'runtime/(base|graph|io)' ;;
    runtime/comm) echo 'runtime/(base|graph|comm)' ;;
    runtime/device) echo '(runtime/(base|graph|passes|plan|comm|device)|runtime/device/cpu|codegen|codegen/(lower|jit))' ;;
    runtime/device/*) echo "(runtime/(base|graph|passes|plan|comm|device)|$1|codegen|codegen/(lower|jit))" ;;
    runtime/exec) echo '(runtime(/(base|graph|passes|shard|pipeline|plan|device|comm|io|exec))?|codegen|codegen/(lower|jit))' ;;
    *) echo '' ;; # a new room: say here what it stands on
    esac
}
for room in runtime runtime/* runtime/device/* codegen codegen/*; do
    [ -d "$room" ] || continue
    wrong=$(grep -nE '^#include "' "$room"/*.[ch] 2>/dev/null | grep -vE "#include \"$(allowed "$room")/[a-z_0-9]+\.(h|def|inc)\"")
    [ -z "$wrong" ] || complain "$room includes what lies above it:"$'\n'"$wrong"
done
wrong=$(grep -lE '#include *[<"](lua5\.4/)?(lua|lauxlib|lualib)\.h' $files | grep -v '^vm/')
[ -z "$wrong" ] || complain "lua.h outside vm/: $wrong"
wrong=$(grep -lE '#include *[<"](cuda|nvrtc|cublasLt|cudnn|nccl|cupti)[a-z_0-9]*\.h' $files |
    grep -vE '^(runtime/device/cuda|codegen/jit/jit_cuda|runtime/comm/nccl|tests/emulator/)')
[ -z "$wrong" ] || complain "vendor headers outside their wrappers: $wrong"
wrong=$(grep -nE '\b(abort|exit|_exit) *\(' runtime/*/*.c runtime/*/*/*.c codegen/*/*.c 2>/dev/null | grep -v '^runtime/comm/')
[ -z "$wrong" ] || complain "exit or abort in runtime/ or codegen/:"$'\n'"$wrong"

# Length.
for f in $files $(git ls-files --cached --others --exclude-standard '*.lua' ':!editor'); do # editor/ is generated
    n=$(wc -l <"$f")
    [ "$n" -le 700 ] || complain "$f has $n lines (700 at most)"
done
wrong=$(awk 'length > 100 { print FILENAME ":" FNR ": " length " columns" }' $(echo "$files" | grep -v 'ops.def'))
[ -z "$wrong" ] || complain "lines over 100 columns:"$'\n'"$wrong"
wrong=$(awk 'FNR == 1 { start = 0 }
    /^[A-Za-z_].*[^;]$/ && !/^(typedef|enum|struct|union|static const|const|#)/ && /\)? *\{$/ { start = FNR; name = $0 }
    /^}/ { if (start && FNR - start > 60) print FILENAME ":" start ": " FNR - start + 1 " lines"; start = 0 }' \
    $(echo "$files" | grep '\.c$'))
[ -z "$wrong" ] || complain "functions over 60 lines:"$'\n'"$wrong"

# Formatting.
if command -v clang-format >/dev/null; then
    wrong=$(clang-format --dry-run $(echo "$files" | grep '\.c$') 2>&1 | grep -oE '^[^:]+' | sort | uniq -c | grep '\.c$')
    [ -z "$wrong" ] || complain "clang-format would change (lines, file):"$'\n'"$wrong"
fi
[ $bad = 0 ] && echo "lint: clean"
exit $bad
