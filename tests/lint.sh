#!/usr/bin/env bash
# Layering, circles of files, words, length and formatting. Prints what is wrong and exits 1 if anything is.
#   tests/lint.sh                all of it (B is the build folder, whose objects show who calls whom)
#   tests/lint.sh words [PATH]   the lines with retired words below a path
#   tests/lint.sh circles        the circles of files, those that are allowed too
set -u
shopt -s extglob
cd "$(dirname "$0")/.."
build=${B:-build}
bad=0
complain() { echo "lint: $*"; bad=1; }
files=$(git ls-files --cached --others --exclude-standard '*.c' '*.h' '*.cu' '*.cuh')

# Layering: each room includes only itself and the rooms that it stands on. runtime/compile.c stands on all that
# plans; pipeline stands on plan.
allowed() { # room -> the folders that it may include
    case $1 in
    runtime/base) echo 'runtime/base' ;;
    runtime/graph) echo 'runtime/(base|graph)' ;;
    runtime/increment) echo 'runtime/(base|graph|ops/[a-z_]+|increment)' ;;
    runtime/passes) echo 'runtime/(base|graph|passes)' ;;
    runtime/shard) echo 'runtime/(base|graph|passes|shard)' ;;
    runtime/ops) echo 'runtime/graph' ;;
    runtime/ops/*) echo 'runtime/(base|graph|ops/[a-z_]+|passes|shard)' ;;
    codegen) echo '(runtime/(base|graph)|codegen)' ;;
    codegen/jit) echo '(runtime/base|codegen|codegen/jit)' ;;
    codegen/emit) echo '(runtime/(base|graph)|codegen|codegen/emit)' ;;
    codegen/lower) echo '(runtime/(base|graph|ops/[a-z_]+|passes)|codegen|codegen/lower)' ;;
    codegen/kernels) echo '(runtime/(base|graph|ops/[a-z_]+)|codegen|codegen/(lower|emit|kernels))' ;;
    runtime/plan) echo '(runtime/(base|graph|passes|shard|plan)|codegen|codegen/lower)' ;;
    runtime/pipeline) echo '(runtime/(base|graph|ops/[a-z_]+|passes|shard|plan|pipeline)|codegen|codegen/lower)' ;;
    runtime/predict) echo '(runtime/(base|graph|ops/[a-z_]+|passes|shard|plan|pipeline|predict)|codegen|codegen/lower)' ;;
    runtime/optimize) echo '(runtime/(base|graph|ops/[a-z_]+|passes|shard|plan|optimize)|codegen|codegen/lower)' ;;
    runtime) echo '(runtime(/(base|graph|ops/[a-z_]+|passes|shard|plan|pipeline|optimize))?|codegen|codegen/lower)' ;;
    runtime/io) echo 'runtime/(base|graph|io)' ;;
    runtime/text) echo 'runtime/(base|io|text)' ;;
    runtime/data) echo 'runtime/(base|io|text|data)' ;;
    runtime/comm) echo 'runtime/(base|graph|comm)' ;;
    runtime/device) echo '(runtime/(base|graph|ops/[a-z_]+|passes|shard|plan|comm|device)|runtime/device/cpu|codegen|codegen/(lower|jit))' ;;
    runtime/device/*) echo "(runtime/(base|graph|passes|plan|comm|device)|$1|codegen|codegen/(lower|jit))" ;;
    runtime/exec) echo '(runtime(/(base|graph|passes|shard|pipeline|plan|device|comm|io|exec))?|codegen|codegen/(lower|jit))' ;;
    runtime/exec/*) echo "(runtime(/(base|graph|passes|shard|pipeline|plan|device|comm|io|exec))?|$1|codegen|codegen/(lower|jit))" ;;
    runtime/checkpoint) echo 'runtime/(base|graph|shard|device|comm|io|exec|checkpoint)' ;;
    *) echo '' ;; # a new room: say here what it stands on
    esac
}
for room in runtime runtime/* runtime/device/* runtime/ops/* runtime/exec/* codegen codegen/*; do
    [ -d "$room" ] || continue
    wrong=$(grep -nE '^#include "' "$room"/*.[ch] 2>/dev/null | grep -vE "#include \"$(allowed "$room")/[a-z_0-9]+\.(h|def|inc)\"")
    [ -z "$wrong" ] || complain "$room includes what lies above it:"$'\n'"$wrong"
done
wrong=$(grep -lE '#include *[<"](lua5\.4/)?(lua|lauxlib|lualib)\.h' $files | grep -v '^vm/')
[ -z "$wrong" ] || complain "lua.h outside vm/: $wrong"
wrong=$(grep -lE '#include *[<"](cuda|nvrtc|cublasLt|cudnn|nccl|cupti)[a-z_0-9]*\.h' $files |
    grep -vE '^(runtime/device/cuda|codegen/jit/jit_cuda|tests/emulator/)')
[ -z "$wrong" ] || complain "vendor headers outside their wrappers: $wrong"
wrong=$(grep -nE '\b(abort|exit|_exit) *\(' runtime/*/*.c runtime/*/*/*.c codegen/*/*.c 2>/dev/null | grep -v '^runtime/comm/')
[ -z "$wrong" ] || complain "exit or abort in runtime/ or codegen/:"$'\n'"$wrong"

# Knobs become options at the border; besides, the n-th allocation or file operation fails by a knob, and the tokens of
# text are beside the kernel cache. MLUA_DEBUG is asked by ml_debug alone.
border='runtime/(base/(knobs|memory)|exec/options|device/device|comm/launch|io/durable|data/cache)\.[ch]|vm/cli/'
wrong=$(grep -nE '\bml_knobs *\(' $(echo "$files" | grep -E '^(runtime|codegen|vm)/') | grep -vE "^($border)")
[ -z "$wrong" ] || complain "knobs are read at the border alone (runtime/base/README.md); pass an option:"$'\n'"$wrong"

# Words that say less than the term of the field: write that term instead.
retired='tells?|told|telling|goes|gone|had|nobody|whoever|fore(tell|tells|told|telling)|dealt|puts? off|put ([a-z]+ ){1,2}off|leash|minder'
english='tests/README\.md:.*retired|[^:]*:[0-9]+:.*it had [%0-9]' # "file:", or more of the line, where they are right
words() { # [PATH]
    git grep -nIwiE --untracked "([a-z0-9]*_)*($retired)(_[a-z0-9_]*)?" -- ${1:-.} ':!models/*.txt' ':!editor/*' \
        ':(exclude)tests/lint.sh' ':(exclude)tests/parity' ':(exclude)tests/golden/*.lua' ':(exclude)*.py' |
        grep -E '^[^:]*\.(c|h|hh|def|md|cu|cuh)(\.[a-z]+)?:|^stdlib/' | grep -vE "^($english)"
}
if [ "${1:-}" = words ]; then words "${2:-.}"; exit; fi
wrong=$(words | cut -d: -f1 | sed 's:/[^/]*$::' | sort | uniq -c | awk '{ all += $1; list = list ", " $2 " " $1 }
    END { if (all) print all " lines (tests/lint.sh words PATH): " substr(list, 3) }')
[ -z "$wrong" ] || complain "retired words in $wrong"

# Names of files in comments, and in READMEs, are names of the tree. Capitals stand for any name; a few are of other projects,
# and scripts that tests write are their own.
named() { # FILE... -> "FILE:LINE: NAME"
    awk 'FNR == 1 { inside = 0 }
        { text = $0 }
        FILENAME ~ /\.lua$/ { if (!match(text, /--/)) next; text = substr(text, RSTART) }
        FILENAME !~ /\.(lua|md)$/ {
            for (text = ""; rest = $0; ) {
                if (inside) { at = index(rest, "*/"); text = text " " (at ? substr(rest, 1, at - 1) : rest); inside = !at }
                else { at = index(rest, "/*"); if (at) inside = 1; else if (match(rest, /\/\//)) text = text substr(rest, RSTART) }
                $0 = at ? substr(rest, at + 2) : "" } }
        { while (match(text, /[A-Za-z0-9_.\/-]*[A-Za-z0-9_]\.(cuh?|[ch]|def|lua|sh|py|md)([^A-Za-z0-9_.\/*]|\.?$|\. )/)) {
            word = substr(text, RSTART, RLENGTH); before = substr(text, RSTART - 1, 1); text = substr(text, RSTART + RLENGTH)
            sub(/[^A-Za-z0-9_]+$/, "", word); while (sub(/^\.\.?\//, "", word));
            if (before !~ /[*<>={}$\]]/) print FILENAME ":" FNR ": " word } }' "$@"
}
foreign='llm\.c|(sysexits|cudnn|cuda|lua|s)\.h|s\.c|sumneko\.lua|editor/mlua\.lua|tests/[^:]*:[0-9]+: [a-z]+\.lua|[^:]*README.md:[0-9]+: script\.lua'
wrong=$(awk 'NR == FNR { for (known[f = $0]; sub(/^[^\/]*\//, "", f); ) known[f]; next } !($2 in known)' \
    <(git ls-files --cached --others --exclude-standard) \
    <(named $(echo "$files"; git ls-files '*.def' '*.lua' '*README.md' ':!editor/*.lua' ':!tests/golden/*.lua')) |
    grep -vE "(^|: )($foreign)$|: [^:]*[A-Z]{3}[^:]*\.[a-z]+$")
[ -z "$wrong" ] || complain "comments name files that do not exist:"$'\n'"$wrong"

# Circles. An arrow leads from a file to each whose header it includes, or whose function it calls as the objects
# of the build show; NAME.h and NAME.c are one. They are refused but where the parts are
# one thing, which is said here: "files: reason".
one_thing='
runtime/graph/{graph,infer,op_interface}: infer.h and op_interface.h are headers beside graph.h, which graph.c includes
runtime/graph/{graph,types,axes,build,moves,extract}: constructors and types of ops are defined in terms of one another
runtime/ops/recurrence/*: a step is made, hoisted, matched and differentiated in terms of one another
runtime/ops/{attention,linear_scan,ragged}/*: types, definition and rules of one op
runtime/shard/{shard,shard_internal}: a header and its internal header
runtime/shard/{shard,shard_move,shard_local,shard_rules}: the rules of ops call back for their operands
runtime/increment/{places,operands,tables,states,given,mix,chunks,contraction,rows,dispatch,latent,attend}: an op says of which positions it is and how it is computed from its operands there
runtime/passes/{simplify,simplify_elementwise,simplify_movement}: simplification is one fixed point over the rules of three files
runtime/data/{store,index}: index.c reads what lies beside the file of a store, whose fields it sets
runtime/plan/{plan,plan_internal}: a header and its internal header
runtime/exec/{session,program}: a header and its internal header
runtime/exec/{session,program,overflow_retry}: a session settles its programs, whose runs may be repeated
runtime/exec/pipeline/{run,retry}: a run decides whether its step is repeated, and a repeated step is a run
runtime/device/cuda/{cuda_exec,cuda_loop,cuda_enqueue,cuda_profile,cuda_run_checked,cuda_attention_autotune}: the step of a loop is loaded and run as a program is
codegen/kernels/{attention_bind,attention_score}: a score function is bound as parameters of the kernel that it is a part of
vm/{bindings/*,check/*,known/*,language/*,lsp/*,show/*,serve/binding}: one Lua state: bindings raise errors, which print the tensors, programs and lines of bindings
vm/repl/{repl_help,repl_commands,repl_show}: help is both a command and a value that is printed
'
# Whether all these files are of one row.
is_one_thing() { # FILE...
    local row file pattern
    while IFS= read -r row; do
        [ -n "$row" ] || continue
        pattern=${row%%:*} pattern="@(${pattern//\{/@(})" pattern=${pattern//\}/)} pattern=${pattern//,/|}
        for file; do
            # shellcheck disable=SC2053
            [[ $file == $pattern ]] || continue 2
        done
        return 0
    done <<<"$one_thing"
    return 1
}
circles() { # "FROM TO" lines -> "FOLDER[ FOLDER...]: FILES" for each circle
    awk 'function visit(v,    i, w, n, list, members, folders, folder, known, size) {
             number[v] = low[v] = ++count; stack[++top] = v; on[v] = 1
             n = split(out[v], list, " ")
             for (i = 1; i <= n; i++) {
                 w = list[i]
                 if (!(w in number)) { visit(w); if (low[w] < low[v]) low[v] = low[w] }
                 else if (on[w] && number[w] < low[v]) low[v] = number[w]
             }
             if (low[v] != number[v]) return
             do {
                 w = stack[top--]; on[w] = 0; size++; members = members " " w
                 folder = w; sub(/\/[^\/]*$/, "", folder)
                 if (index(" " folders " ", " " folder " ") == 0) folders = folders (size > 1 ? " " : "") folder
             } while (w != v)
             if (size > 1) print folders ":" members
         }
         $1 != $2 && !seen[$1, $2]++ { out[$1] = out[$1] " " $2; from[++arrows] = $1 }
         END { for (i = 1; i <= arrows; i++) if (!(from[i] in number)) visit(from[i]) }'
}
including() {
    grep -HE '^#include "(runtime|codegen|vm)/' $(echo "$files" | grep -E '^(runtime|codegen|vm)/') |
        sed -nE 's/^([^:]*)\.[ch]:#include "([^"]*)\.[a-z]+".*/\1 \2/p'
}
calling() { # a call through a table of functions (of ops, of passes, of stages) is no arrow: the table stands above its callers
    local objects='' f
    for f in $(echo "$files" | grep -E '^(runtime|codegen|vm)/.*\.c$'); do # objects older than their source say nothing
        [ ! "$build/${f%.c}.o" -nt "$f" ] || objects+=" $build/${f%.c}.o"
    done
    # shellcheck disable=SC2086
    [ -z "$objects" ] || nm -Ag $objects 2>/dev/null | sed "s:^$build/::; s:\.o\: *: :" |
        awk '$4 ~ /^(ml_op_interfaces|lower_routines|compile_pass_lists|staged_programs)$/ { next }
             $3 != "U" && NF == 4 { home[$4] = $1 } $2 == "U" { user[++n] = $1; name[n] = $3 }
             END { for (i = 1; i <= n; i++) if (name[i] in home) print user[i], home[name[i]] }'
}
find_circles() { # ALL: those that are allowed too
    { including | circles | sed 's/^/by includes, /'; calling | circles | sed 's/^/by calls, /'; } |
        while IFS= read -r circle; do
            # shellcheck disable=SC2086
            [ -z "${1:-}" ] && is_one_thing ${circle#*: } || echo "$circle"
        done
}
if [ "${1:-}" = circles ]; then find_circles all; exit; fi
wrong=$(find_circles)
[ -z "$wrong" ] || complain "circles of files (tests/lint.sh circles): $(wc -l <<<"$wrong"), of several folders: $(
    grep -cE '^by [a-z]+, [^ :]+ ' <<<"$wrong")"

# Each room explains itself.
for room in runtime runtime/* codegen codegen/* vm stdlib models editor tests; do
    [ ! -d "$room" ] || [ -f "$room/README.md" ] || missing+=" $room"
done
[ -z "${missing:-}" ] || complain "without a README.md:$missing"

# Length.
for f in $files $(git ls-files --cached --others --exclude-standard '*.lua' ':!editor'); do # editor/ is generated
    n=$(wc -l <"$f")
    [ "$n" -le 700 ] || complain "$f has $n lines (700 at most)"
done
wrong=$(awk 'length > 100 { print FILENAME ":" FNR ": " length " columns" }' $(echo "$files" | grep -v 'ops.def'))
[ -z "$wrong" ] || complain "lines over 100 columns:"$'\n'"$wrong"
wrong=$(awk 'FNR == 1 { start = 0 }
    /^[A-Za-z_].*[^;]$/ && !/^(typedef|enum|struct|union|#)/ && !/=/ && /\)? *\{$/ { start = FNR; name = $0 }
    /^}/ { if (start && FNR - start > 60) print FILENAME ":" start ": " FNR - start + 1 " lines"; start = 0 }' \
    $(echo "$files" | grep '\.c$'))
[ -z "$wrong" ] || complain "functions over 60 lines:"$'\n'"$wrong"

# A switch over ops, dtypes or collectives names each of them, so that the compiler reports what a new row concerns: no
# `default:`, and no integer in place of the enum (it would report nothing).
wrong=$(awk 'FNR == 1 { depth = 0 }
    /switch \(/ { at[++depth] = FNR; over[depth] = 0; bare[depth] = /->(op|dtype)\)/ && !/\(\(ml_[a-z_]+\)/
        match($0, /^ */); indent[depth] = RLENGTH; last[depth] = 0 }
    depth && /case ML_(OP_|COLLECTIVE_|KIND_|CLASS_|BOOL|I32|I64|BF16|F32|F64)/ { over[depth] = 1 }
    depth && /^ *default:/ { last[depth] = FNR }
    depth { match($0, /^ */); if ($0 ~ /^ *}/ && RLENGTH <= indent[depth]) {
        if (over[depth] && last[depth]) print FILENAME ":" last[depth] ": default in a switch over ops or dtypes"
        if (over[depth] && bare[depth]) print FILENAME ":" at[depth] ": switch over an integer: cast it to the enum"
        depth-- } }' $(echo "$files" | grep -E '^(runtime|codegen|vm)/.*\.c$'))
[ -z "$wrong" ] || complain "switches that would miss a new op or dtype:"$'\n'"$wrong"

# Formatting.
if command -v clang-format >/dev/null; then
    wrong=$(clang-format --dry-run $(echo "$files" | grep -E '\.cu?h?$') 2>&1 | grep -oE '^[^: ]+\.cu?h?:' | sort | uniq -c)
    [ -z "$wrong" ] || complain "clang-format would change (lines, file):"$'\n'"$wrong"
fi
[ $bad = 0 ] && echo "lint: clean"
exit $bad
