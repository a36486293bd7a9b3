/* What a run leaves when it ends, however that comes: no processes of its own, all of others', and
 * no temporary files. */
#include <stdlib.h>
#include <string.h>

#include "tests/process/support.h"

/* ended FILE...: once none of the processes whose numbers the files hold runs any more, within 5 s;
 * there FILE LINES: once it has so many. */
#define FUNCTIONS                                                                                  \
    "ended() { for i in $(seq 100); do left=; for p in $(cat \"$@\"); do case $(cut -d' ' -f3 "    \
    "/proc/$p/stat 2>/dev/null) in ''|Z|X) ;; *) left=$p ;; esac; done; [ $left ] || return 0; "   \
    "sleep 0.05; done; echo \"process $left is left\"; return 1; }; "                              \
    "there() { for i in $(seq 400); do [ -e $1 ] && [ $(wc -l <$1) -ge $2 ] && return; "           \
    "sleep 0.05; done; echo \"no $1\"; exit 9; }; "                                                \
    "none() { for i in $(seq 60); do find $1 -name \"$2\" | grep -q . || return 0; sleep 0.05; "   \
    "done; find $1 -name \"$2\"; return 1; }; "

static const char kernel_script[] = "local m = require 'mlua'\n"
                                    "local run = m.compile(function(i) return m.exp(i.x) * 0.3125 "
                                    "end, { x = { m.axis('a', 4) } })\n"
                                    "print(run { x = { 1, 2, 3, 4 } }[1])\n";

/* A compiler with a part of its own that outlives it. */
static void write_slow_compiler(process_room *room) {
    process_write(room, "kernel.lua", kernel_script);
    process_write(room, "slow_cc",
                  "#!/bin/sh\nsleep 100 &\necho $! >>part\necho $$ >>driver\nwait\n");
    process_write(room, "two.lua",
                  "local m = require 'mlua'\n"
                  "local run = m.compile(function(i) return m.exp(i.x) * 0.625 end, { x = { "
                  "m.axis('a', 4) } }, { layout = m.layout.ddp { dp = 2 } })\n");
    process_shell(room, 0, "chmod +x slow_cc");
}

#define OTHER "sh -c 'sleep 101 & echo $! >other; exec \"$MLUA\" run --device cpu -n 2 "

/* A shell that started something and then became the launcher: that continues; what a rank starts
 * and leaves behind is ended. */
PROCESS_TEST(children_of_others) {
    process_write(room, "leaves.lua",
                  "if require 'mlua.core'.options().rank == 1 then\n"
                  "  os.execute 'sleep 100 & echo $! >left'\nend\n"
                  "print 'done'\n");
    process_result r =
        process_shell(room, 0, FUNCTIONS OTHER "leaves.lua' && ended left && kill $(cat other)");
    CHECK_TEXT(r.output, "done\n");
    process_write(room, "waits.lua", "os.execute 'echo $PPID >>ranks'\nwhile true do end\n");
    r = process_shell(room, 130,
                      FUNCTIONS OTHER
                      "waits.lua' & there ranks 2; kill -TERM $!; wait $!; code=$?; "
                      "ended ranks && kill $(cat other) && exit $code");
    process_expect(&r, "interrupted");
    process_write(room, "fails.lua", "error 'this fails'");
    r = process_shell(room, 1, OTHER "fails.lua'; code=$?; kill $(cat other) && exit $code");
    process_expect(&r, "this fails");
    process_shell(room, 0,
                  FUNCTIONS "rm ranks; " OTHER "waits.lua' & there ranks 2; kill -KILL $!; "
                            "ended ranks && kill $(cat other)");
}

/* Who started it ignored SIGCHLD: compilers and ranks are waited for all the same. */
PROCESS_TEST(children_ignored) {
    process_write(room, "kernel.lua", kernel_script);
    process_write(room, "one.lua", "print 'one'");
    process_result r = process_shell(
        room, 0,
        "export MLUA_CACHE=\"$PWD/cache\"; env --ignore-signal=CHLD true || { echo one; exit 0; }; "
        "env --ignore-signal=CHLD \"$MLUA\" run --device cpu kernel.lua && "
        "env --ignore-signal=CHLD \"$MLUA\" run --device cpu -n 2 one.lua");
    process_expect(&r, "one\n");
}

/* A compiler and its parts end with a process that is killed, and its files are removed. */
PROCESS_TEST(killed_while_compiling) {
    write_slow_compiler(room);
    process_shell(room, 0,
                  FUNCTIONS
                  "export CC=./slow_cc MLUA_CACHE=\"$PWD/cache\"; \"$MLUA\" run --device cpu "
                  "kernel.lua & there driver 1; find cache -name 'tmp-*' | grep -q . || exit 3; "
                  "kill -KILL $!; ended part driver && none cache 'tmp-*'");
    process_shell(room, 0,
                  FUNCTIONS
                  "export CC=./slow_cc MLUA_CACHE=\"$PWD/cache\"; rm part driver; \"$MLUA\" run "
                  "--device cpu -n 2 two.lua & there driver 1; kill -KILL $!; ended part driver && "
                  "none cache 'tmp-*'");
}

/* A signal to the process alone ends its compilers, and it at once. */
PROCESS_TEST(stopped_while_compiling) {
    static const char *const signals[] = {"TERM", "HUP", "INT"};
    write_slow_compiler(room);
    for (int i = 0; i < 3; i++) {
        process_result r = process_shell(
            room, i == 1 ? 128 + 1 : 128 + 2,
            FUNCTIONS
            "export CC=./slow_cc MLUA_CACHE=\"$PWD/cache\"; rm -f part driver; \"$MLUA\" run "
            "--device cpu kernel.lua & there driver 1; kill -%s $!; wait $!; code=$?; "
            "ended part driver && none cache 'tmp-*' && exit $code",
            signals[i]);
        process_expect(&r, "mlua: interrupted");
        CHECK(r.seconds < 20);
    }
}

/* SIGHUP ends a run as SIGTERM does (exit code 129), ranks too, unless its parent set it to be
 * ignored. */
PROCESS_TEST(hang_up) {
    process_write(room, "waits.lua", "os.execute 'echo $PPID >>ranks'\nwhile true do end\n");
    static const char *const ranks[] = {"", "-n 2"};
    for (int i = 0; i < 2; i++) {
        process_result r = process_shell(
            room, 129,
            FUNCTIONS "rm -f ranks; \"$MLUA\" run --device cpu %s waits.lua & there ranks %d; "
                      "kill -HUP $!; wait $!; code=$?; ended ranks && exit $code",
            ranks[i], i + 1);
        process_expect(&r, "mlua: interrupted\n");
    }
    process_write(room, "sends.lua",
                  "os.execute 'kill -HUP $PPID; sleep 0.2'\nprint 'continues'\n");
    process_result r = process_shell(room, 0, "trap '' HUP; \"$MLUA\" run --device cpu sends.lua");
    CHECK_TEXT(r.output, "continues\n");
}

/* The folder that serves where the cache cannot be written is removed with the process, or with the
 * next one where that was killed; what another process may use stays. */
PROCESS_TEST(temporary_folders) {
    process_write(room, "file", "");
    process_write(room, "kernel.lua", kernel_script);
    process_write(room, "killed.lua", "dofile 'kernel.lua'\nos.execute 'kill -KILL $PPID'\n");
    process_write(room, "exits.lua", "dofile 'kernel.lua'\nos.exit()\n");
    process_shell(
        room, 0,
        FUNCTIONS
        "export MLUA_CACHE=\"$PWD/file/cache\" TMPDIR=\"$PWD/tmp\"; mkdir tmp tmp/mlua-of-another\n"
        "count() { ls tmp | wc -l; }\n"
        "\"$MLUA\" run --device cpu kernel.lua && [ $(count) = 1 ] || exit 3\n"
        "\"$MLUA\" run --device cpu exits.lua && [ $(count) = 1 ] || exit 4\n"
        "\"$MLUA\" run --device cpu killed.lua; [ $? = 137 ] && [ $(count) = 2 ] || exit 5\n"
        "\"$MLUA\" run --device cpu kernel.lua && [ $(count) = 1 ] || exit 6\n"
        "\"$MLUA\" run --device cpu killed.lua; [ $(count) = 2 ] || exit 7\n"
        "export MLUA_CACHE=\"$PWD/cache\" && \"$MLUA\" run --device cpu kernel.lua || exit 8\n"
        "[ $(count) = 1 ]");
}

/* A reader who has seen enough ends the run, with no more words. */
PROCESS_TEST(output_cut_off) {
    process_write(room, "prints.lua", "while true do print 'a line' end\n");
    for (int i = 1; i <= 2; i++) {
        process_result r = process_shell(
            room, 0,
            "{ \"$MLUA\" run --device cpu -n %d prints.lua; echo $? >code; } | head -n 1; cat code",
            i);
        CHECK_TEXT(r.output, "a line\n141\n");
    }
}
