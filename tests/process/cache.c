/* The kernel cache's folder: full, not executable, deleted, written to by others, oddly named. */
#include <string.h>

#include "tests/process/support.h"

static const char script[] = "local m = require 'mlua'\n"
                             "local A = m.axes { a = 8 }\n"
                             "local f = m.compile(function(t) return { y = m.gelu(t.x):sum() } end,"
                             " { x = { A.a } })\n"
                             "print(('%.4f'):format(f { x = { 1, 1, 1, 1, 1, 1, 1, 1 } }.y))"
                             "\n";
static const char result[] = "6.7295";

/* Mount small file systems in a namespace of its own: `mounts` is "PATH OPTIONS" for each. The test
 * is skipped where the system allows no such namespace. */
static void need_mounts(process_room *room) {
    static const char probe[] = "mkdir -p probe && unshare -rm mount -t tmpfs tmpfs probe";
    if (process_shell(room, PROCESS_ANY_CODE, probe).code != 0)
        test_skip("unshare -rm mount is not permitted here");
}

static process_result run_mounted(process_room *room, int code, const char *mounts,
                                  const char *environment) {
    process_write(room, "script.lua", script);
    return process_shell(room, code,
                         "mkdir -p cache work && unshare -rm sh -c '%s %s $MLUA run --device cpu "
                         "script.lua'",
                         mounts, environment);
}

PROCESS_TEST(cache_without_room) {
    need_mounts(room);
    process_result r = run_mounted(room, 0, "mount -t tmpfs -o size=4k,mode=700 tmpfs cache &&",
                                   "MLUA_CACHE=cache TMPDIR=$PWD/work");
    process_expect(&r, result);
    process_expect(&r, "compiled kernels are not saved: ");
    process_expect(&r, "No space left on device");
    r = process_shell(room, 0, "ls -A work");
    CHECK_TEXT(r.output, ""); /* the temporary folder is removed */
    /* Everywhere; what lies below /tmp, the script and perhaps the binary, is opened before. */
    r = process_shell(room, 1,
                      "exec 9<\"$MLUA\"; unshare -rm sh -c 'for d in /mnt /media /var/tmp /dev/shm "
                      "/tmp; do mount -t tmpfs -o size=4k,mode=700 tmpfs $d; done; cd /; "
                      "MLUA_CACHE=/mnt TMPDIR=/media /proc/self/fd/9 run --device cpu -' "
                      "<script.lua");
    process_expect(&r, "no folder takes compiled kernels: /mnt: ");
    process_expect(&r, "; /media: No space left on device; /tmp: No space left on device");
    process_expect(&r, "help: make room in one of them, or name another: MLUA_CACHE=DIR");
    CHECK(strstr(r.output, "bug of mlua") == NULL);
}

/* A full TMPDIR concerns only those who ask for it: the compiler's files are in the cache. */
PROCESS_TEST(temporary_folder_without_room) {
    need_mounts(room);
    process_result r = run_mounted(room, 0, "mount -t tmpfs -o size=4k tmpfs work &&",
                                   "MLUA_CACHE=cache TMPDIR=$PWD/work");
    CHECK_TEXT(r.output, ml_arena_format(room->arena, "%s\n", result));
}

PROCESS_TEST(cache_that_forbids_execution) {
    need_mounts(room);
    process_result r = run_mounted(room, 0, "mount -t tmpfs -o noexec,mode=700 tmpfs cache &&",
                                   "MLUA_CACHE=cache");
    CHECK_TEXT(r.output, ml_arena_format(room->arena, "%s\n", result));
}

PROCESS_TEST(cache_with_an_odd_name) {
    process_write(room, "script.lua", script);
    process_result r = process_run(room, 0, "MLUA_CACHE=-x", "run --device cpu script.lua");
    CHECK_TEXT(r.output, ml_arena_format(room->arena, "%s\n", result));
    process_shell(room, 0, "ls ./-x/*.so");
}

/* The folder is deleted after the first kernels were compiled, and made again. */
PROCESS_TEST(cache_that_is_deleted) {
    process_write(room, "script.lua",
                  "local m = require 'mlua'\n"
                  "local A = m.axes { a = 8 }\n"
                  "for _, op in ipairs { m.gelu, m.silu } do\n"
                  "  local f = m.compile(function(t) return { y = op(t.x):sum() } end, { x = { A.a "
                  "} })\n"
                  "  f { x = { 1, 1, 1, 1, 1, 1, 1, 1 } }\n"
                  "  os.execute 'rm -r cache'\n"
                  "end\n"
                  "print 'done'\n");
    process_result r = process_run(room, 0, "MLUA_CACHE=cache", "run --device cpu script.lua");
    CHECK_TEXT(r.output, "done\n");
}

/* Entries that others may have written are not loaded: the next run compiles again. */
PROCESS_TEST(cache_with_planted_entries) {
    process_write(room, "script.lua", script);
    process_result r = process_run(room, 0, "MLUA_CACHE=cache", "run --device cpu script.lua");
    static const char *const faults[][2] = {
        {"chmod 666", "other users may write to it"},
        {"sh -c 'for f; do mv $f kept && ln -s ../kept $f; done' -", "it is a link"},
        {"chown 12345", "another user owns it"},
    };
    for (int i = 0; i < 3; i++) {
        process_result fault = process_shell(room, PROCESS_ANY_CODE, "%s cache/*.so", faults[i][0]);
        if (fault.code != 0) continue; /* chown, for other users than root */
        r = process_run(room, 0, "MLUA_CACHE=cache", "run --device cpu script.lua");
        process_expect(&r, result);
        process_expect(&r, faults[i][1]);
        r = process_run(room, 0, "MLUA_CACHE=cache", "run --device cpu script.lua");
        CHECK_TEXT(r.output, ml_arena_format(room->arena, "%s\n", result));
    }
}

/* Sources replace links of their names, and are not written to where these point. */
PROCESS_TEST(kept_sources_follow_no_links) {
    process_write(room, "script.lua", script);
    process_run(room, 0, "MLUA_KEEP=kept", "run --device cpu script.lua");
    process_shell(room, 0, "cd kept && for f in *.c; do ln -sf ../victim $f; done");
    process_run(room, 0, "MLUA_KEEP=kept", "run --device cpu script.lua");
    process_shell(room, 0, "! test -e victim && for f in kept/*.c; do test ! -L $f; done");
}

/* So do those of a plan for a device that this machine lacks. */
PROCESS_TEST(kept_sources_of_a_check) {
    process_run(room, 0, "MLUA_KEEP=kept",
                "check \"$ROOT/models/gpt.lua\" layers=1 embed=64 heads=2 --device h200");
    process_shell(room, 0, "grep -q __global__ kept/*.cu");
}

/* What users have in a folder that they name as the cache stays, whatever it is called. */
PROCESS_TEST(cache_among_other_files) {
    process_write(room, "script.lua", script);
    process_shell(room, 0, "touch -d '2 days ago' cc_results.csv ccABCDEF.o tmp-notes.txt");
    process_run(room, 0, "MLUA_CACHE=.", "run --device cpu script.lua");
    process_shell(room, 0, "ls cc_results.csv ccABCDEF.o tmp-notes.txt && ! ls -d tmp-*.*.d");
}

/* A limit on the size of files is no death by signal, and leaves nothing in the cache. */
PROCESS_TEST(cache_with_limited_files) {
    process_write(room, "script.lua", script);
    process_result r = process_shell(room, 1,
                                     "ulimit -f 8; MLUA_CACHE=cache TMPDIR=$PWD/none "
                                     "$MLUA run --device cpu script.lua");
    process_expect(&r, "no folder takes compiled kernels: ");
    process_expect(&r, "File too large");
    r = process_shell(room, 0, "ls cache");
    CHECK(strstr(r.output, "tmp-") == NULL);
}

/* As many objects as compilers, where these may run at once. */
PROCESS_TEST(compilers_at_once) {
    process_write(room, "two.lua",
                  "local m = require 'mlua'\n"
                  "local A = m.axes { a = 8, b = 5 }\n"
                  "local f = m.compile(function(t)\n"
                  "  return { y = m.gelu(t.x):sum(), z = m.silu(t.w):max() }\n"
                  "end, { x = { A.a }, w = { A.b } })\n"
                  "print(('%.4f'):format(f { x = { 1, 1, 1, 1, 1, 1, 1, 1 }, "
                  "w = { 0, 0, 0, 0, 1 } }.y))\n");
    static const char *const expected[][3] = {
        {"MLUA_COMPILERS=1", "one", "compiling 2 kernels in 1 batches"},
        {"MLUA_THREADS=2", "two", "compiling 2 kernels in 2 batches"}};
    for (int i = 0; i < 2; i++) {
        process_result r = process_run(
            room, 0,
            ml_arena_format(room->arena, "-u MLUA_COMPILERS %s MLUA_DEBUG=1 MLUA_CACHE=%s",
                            expected[i][0], expected[i][1]),
            "run --device cpu two.lua");
        process_expect(&r, expected[i][2]);
        process_expect(&r, result);
        process_shell(room, 0, "test $(ls %s/*.so | wc -l) = %d", expected[i][1], i + 1);
    }
}
