/* Errors of a run are reported in words, with an exit code, and leaves nothing behind. */
#include <stdlib.h>
#include <string.h>

#include "tests/process/support.h"

/* A model with what training needs, as small as it gets. */
static const char small_script[] =
    "local m = require 'mlua'\n"
    "local cfg = m.config { batch = 2, seq = 8, steps = 2, accum = 1 }\n"
    "local A = m.axes { embed = 8, heads = 2, head_dim = 4, vocab = 256, seq = cfg.seq, batch = "
    "cfg.batch }\n"
    "local Model = m.module('Model', function(self)\n"
    "  self.table, self.norm = m.param { A.vocab, A.embed }, m.rms_norm { A.embed }\n"
    "  self.wq, self.wo = m.param { A.embed, A.heads, A.head_dim }, m.param { A.heads, A.head_dim, "
    "A.embed }\n"
    "end)\n"
    "function Model:forward(tokens)\n"
    "  local x = self.table:gather(tokens, 'vocab')\n"
    "  local q = self.norm(x):dot(self.wq, 'embed')\n"
    "  x = x + m.attention(q, m.rope(q), q, { causal = true }):dot(self.wo, 'heads', 'head_dim')\n"
    "  return x:dot(self.table, 'embed')\n"
    "end\n"
    "m.train { model = Model(), batch = A.batch, seq = A.seq, vocab = 256 }\n";

/* Whatever allocation fails, the run ends with its result (the first failure may only start Lua's
 * garbage collector) or a message about memory. The kernels are compiled before, so that a run is
 * a matter of milliseconds; those that fail within a compile job are tried with a cache of their
 * own. How many fail does not depend on the machine's speed. */
static int fail_allocations(process_room *room, const char *arguments, int64_t first) {
    int failed = 0;
    for (int64_t n = first, passed = 0; passed < 3; n += 1 + n / (test_all() ? 32 : 8)) {
        process_result r = process_run(room, PROCESS_ANY_CODE,
                                       ml_arena_format(room->arena, "MLUA_OOM=%lld", (long long)n),
                                       "%s", arguments);
        bool reported = strstr(r.output, "memory") != NULL;
        EXPECT(!(r.code != 0 && (r.code != 1 || !reported)), "MLUA_OOM=%lld: exit code %d:\n%s",
               (long long)n, r.code, r.output);
        failed += r.code == 1;
        passed = n > 1000 && r.code == 0 ? passed + 1 : 0;
    }
    return failed;
}

PROCESS_TEST(out_of_memory_in_training) {
    process_write(room, "small.lua", small_script);
    process_run(room, 0, "", "run --device cpu small.lua");
    CHECK(fail_allocations(room, "run --device cpu small.lua", 1) > 20);
}

PROCESS_TEST(out_of_memory_in_other_commands) {
    process_write(room, "small.lua", small_script);
    CHECK(fail_allocations(room, "check --device h200 --types small.lua accum=2", 7) > 10);
    process_write(room, "lines",
                  "x = m.input('x', {m.axis('a', 4)})\nx:sum()\nx:sum('b')\nx + 1\n");
    CHECK(fail_allocations(room, "repl --device cpu < lines", 7) > 10);
    fail_allocations(room, "doctor", 1);
    fail_allocations(room, "editor", 5);
}

/* ---- Compilers, devices, files --------------------------------------------------------------- */

static const char kernel_script[] = "local m = require 'mlua'\n"
                                    "local run = m.compile(function(i) return m.exp(i.x) * 0.3125 "
                                    "end, { x = { m.axis('a', 4) } })\n"
                                    "print(run { x = { 1, 2, 3, 4 } }[1])\n";

/* A knob that is misspelt or has a value that it does not take is reported, and ignored. */
PROCESS_TEST(knobs_that_are_wrong) {
    process_write(room, "empty.lua", "");
    process_result r = process_run(room, 0,
                                   "MLUA_CHEK=cpu MLUA_CHECK=gpu MLUA_DEBUG=much MLUA_TMA=2 "
                                   "MLUA_PEER=9 MLUA_OVERLAP=-1",
                                   "run --device cpu empty.lua");
    process_expect(&r, "mlua: MLUA_CHEK is ignored: did you mean MLUA_CHECK?\n");
    process_expect(&r, "mlua: MLUA_CHECK=gpu is ignored: it takes cpu\n");
    process_expect(&r, "mlua: MLUA_DEBUG=much is ignored: it takes 0..5\n");
    process_expect(&r, "mlua: MLUA_TMA=2 is ignored: it takes 0|1\n");
    process_expect(&r, "mlua: MLUA_PEER=9 is ignored: it takes 0..8\n");
    process_expect(&r, "mlua: MLUA_OVERLAP=-1 is ignored: it takes 0|1\n");
    r = process_run(room, 0, "MLUA_CHECK=0 MLUA_CHECK_OF_ANOTHER_PROGRAM=1",
                    "run --device cpu empty.lua");
    CHECK_TEXT(r.output, "");
    r = process_run(room, 0, "MLUA_DUMP=simplfy", "check \"$ROOT/models/gpt.lua\" layers=1");
    process_expect(&r,
                   "mlua: MLUA_DUMP=simplfy is ignored: there is no such pass\n  help: passes: ");
}

PROCESS_TEST(sources_that_cannot_be_kept) {
    process_write(room, "kernel.lua", kernel_script);
    process_result r = process_run(room, 0, "MLUA_KEEP=/proc/none", "run --device cpu kernel.lua");
    process_expect(&r, "mlua: MLUA_KEEP=/proc/none saves nothing: cannot write /proc/none/");
}

/* A GPU that is there but cannot be used is no reason to be silent and slow. */
PROCESS_TEST(driver_that_is_broken) {
    process_result known = process_run(room, 0, "", "doctor");
    if (strstr(known.output, "NVRTC") == NULL)
        test_skip("this mlua was built without the CUDA toolkit's headers");
    process_write(room, "kernel.lua", kernel_script);
    process_shell(room, 0, "cc -shared -o libcuda.so.1 -x c /dev/null");
    process_result r = process_run(room, 0, "LD_LIBRARY_PATH=\"$PWD\"", "run kernel.lua");
    process_expect(&r,
                   "mlua: the CPU serves, because the GPU cannot: the NVIDIA driver is too old");
    r = process_run(room, 1, "LD_LIBRARY_PATH=\"$PWD\"", "run kernel.lua --device cuda");
    process_expect(&r, "the NVIDIA driver is too old");
}

PROCESS_TEST(kernel_that_does_not_compile) {
    process_write(room, "kernel.lua", kernel_script);
    process_write(room, "broken_cc",
                  "#!/bin/sh\necho 'kernel.c:7: error: out of cheese' >&2\nexit 1\n");
    process_shell(room, 0, "chmod +x broken_cc");
    process_result r =
        process_run(room, 1, "CC=./broken_cc MLUA_CACHE=\"$PWD/cache\"", "kernel.lua --device cpu");
    process_expect(&r, "kernel.lua:2: ");
    process_expect(&r, "does not compile");
    process_expect(&r, "out of cheese");
    const char *path = strstr(r.output, "source in ");
    REQUIRE(path != NULL);
    path = ml_arena_copy(room->arena, path + 10, strcspn(path + 10, "\n:"));
    process_result kept = process_shell(room, 0, "cat '%s'", path);
    process_expect(&kept, "ml_exp_f32");
    /* The source is a whole program: this compiles it. */
    process_shell(room, 0, "cc -std=gnu11 -march=native -c -o kept.o '%s'", path);
    process_result good =
        process_run(room, 0, "MLUA_CACHE=\"$PWD/cache\"", "kernel.lua --device cpu");
    CHECK_NEAR(strtod(good.output, NULL), 2.718281828459045 * 0.3125, 1e-6);
}

/* A compiler that dies, writes nothing, or hangs on nothing it can read. */
PROCESS_TEST(compilers_that_misbehave) {
    process_write(room, "kernel.lua", kernel_script);
    process_write(room, "silent_cc", "#!/bin/sh\nexit 0\n");
    process_write(room, "killed_cc", "#!/bin/sh\nkill -SEGV $$\n");
    process_write(room, "stopped_cc", "#!/bin/sh\nkill -INT $$\n");
    process_shell(room, 0, "chmod +x silent_cc killed_cc stopped_cc");
    process_run(room, 1, "CC=./silent_cc MLUA_CACHE=\"$PWD/cache\"", "run --device cpu kernel.lua");
    process_result killed = process_run(room, 1, "CC=./killed_cc MLUA_CACHE=\"$PWD/cache\"",
                                        "run --device cpu kernel.lua");
    process_expect(&killed, "./killed_cc was killed by signal 11: source in ");
    /* Ctrl-C reaches the compiler as well: that is no failure of it. */
    process_run(room, 130, "CC=./stopped_cc MLUA_CACHE=\"$PWD/cache\"",
                "run --device cpu kernel.lua");
    process_run(room, 1, "CC=/no/such/cc MLUA_CACHE=\"$PWD/cache\"", "run --device cpu kernel.lua");
}

/* Entries of the cache that are cut off or hold other bytes are compiled again. */
PROCESS_TEST(damaged_cache) {
    process_write(room, "kernel.lua", kernel_script);
    const char *cache = "MLUA_CACHE=\"$PWD/cache\"";
    process_result first = process_run(room, 0, cache, "run --device cpu kernel.lua");
    process_shell(room, 0, "test $(stat -c %%a cache) = 700");
    process_shell(room, 0, "for f in $(find cache -type f); do truncate -s 100 $f; done");
    process_result second = process_run(room, 0, cache, "run --device cpu kernel.lua");
    CHECK_TEXT(second.output, first.output);
    process_shell(room, 0, "for f in $(find cache -type f); do echo garbage > $f; done");
    process_result third = process_run(room, 0, cache, "run --device cpu kernel.lua");
    CHECK_TEXT(third.output, first.output);
    /* A cache that cannot be made costs a warning alone. */
    process_write(room, "file", "");
    process_result fourth =
        process_run(room, 0, "MLUA_CACHE=\"$PWD/file/cache\"", "run --device cpu kernel.lua");
    process_expect(&fourth, "compiled kernels are not saved");
    process_expect(&fourth, first.output);
}

PROCESS_TEST(two_runs_share_a_cache) {
    process_write(room, "small.lua", small_script);
    process_result r = process_shell(
        room, 0,
        "export MLUA_CACHE=\"$PWD/cache\"; for i in 1 2; do \"$MLUA\" run --device cpu --json "
        "small.lua > out$i & done; wait; cut -d, -f1-3 out1 | tee first; for i in 2; do "
        "cut -d, -f1-3 out$i | cmp first - || exit 1; done; find cache -name 'tmp-*' | grep . && "
        "exit 1; true");
    process_expect(&r, "{\"step\":2,\"loss\":");
}

PROCESS_TEST(no_gpu) { /* reported before the script does anything */
    process_write(room, "kernel.lua", kernel_script);
    process_result r =
        process_run(room, 1, "CUDA_VISIBLE_DEVICES=", "run --device cuda kernel.lua");
    process_expect(&r, "--device cpu");
    process_write(room, "prints.lua", "print 'the script runs'");
    r = process_run(room, 1, "CUDA_VISIBLE_DEVICES=", "run --device cuda prints.lua");
    CHECK(strncmp(r.output, "mlua: ", 6) == 0 && !strstr(r.output, "the script runs"));
    r = process_run(room, 1, "CUDA_VISIBLE_DEVICES=", "run --device cuda -n 2 prints.lua");
    CHECK(!strstr(r.output, "the script runs"));
    process_run(room, 1, "CUDA_VISIBLE_DEVICES=", "repl --device cuda prints.lua");
    r = process_run(room, 0, "CUDA_VISIBLE_DEVICES=", "check --device cuda prints.lua");
    process_expect(&r, "the script runs");
    r = process_run(room, 2, "", "run --device tpu kernel.lua");
    process_expect(&r, "tpu");
}

PROCESS_TEST(too_large_for_this_machine) {
    process_write(room, "small.lua", small_script);
    process_result r =
        process_run(room, 1, "", "run --device cpu small.lua seq=100000 batch=10000");
    process_expect(&r, "the program needs ");
    process_expect(&r, "largest tensors at the peak:");
    process_expect(&r, "[batch=10000, seq=100000, embed=8] from small.lua:1");
    CHECK(r.cpu_seconds < 10);
}

/* ---- Interrupts ------------------------------------------------------------------------------ */

PROCESS_TEST(interrupt_in_training) {
    process_write(
        room, "interrupt.lua",
        "local m = require 'mlua'\n"
        "local train = m.train\n"
        "function m.train(o)\n"
        "  function o.on_step(step) if step == 3 then io.popen('kill -INT $PPID'):close() end end\n"
        "  return train(o)\n"
        "end\n"
        "dofile(os.getenv 'ROOT' .. '/models/gpt.lua')\n"
        "print 'the end'\n");
    process_result r = process_run(room, 130, "",
                                   "run --device cpu --json interrupt.lua layers=1 embed=32 heads=2"
                                   " seq=32 batch=2 steps=100000 sample=20");
    process_expect(&r, "{\"step\":3,");
    process_expect(&r, "mlua: interrupted\n");
    process_expect(&r, "the end\n");
    CHECK(!strstr(r.output, "{\"step\":5,") && !strstr(r.output, "local function"));
}

/* The second signal comes while a rank that the first one ended sees whether others failed first.
 */
PROCESS_TEST(interrupted_twice) {
    process_write(room, "twice.lua",
                  "if require('mlua.core').options().rank == 1 then\n"
                  "  os.execute 'p=$PPID; (sleep 0.2; kill -INT $p; sleep 0.2; kill -INT $p) &'\n"
                  "  while true do end\n"
                  "end\n");
    process_result r = process_run(room, 130, "", "run --device cpu -n 2 twice.lua");
    process_expect(&r, "[rank 1] mlua: interrupted\n");
    CHECK(!strstr(r.output, "please report it"));
}

PROCESS_TEST(interrupt_while_compiling) {
    process_result r =
        process_shell(room, 130,
                      "env MLUA_CACHE=\"$PWD/cache\" timeout --preserve-status -s INT 0.4 "
                      "\"$MLUA\" run --device cpu "
                      "\"$ROOT/models/gpt.lua\" layers=2 embed=96 heads=3 batch=4 steps=100000");
    process_expect(&r, "mlua: interrupted\n");
    process_shell(room, 1, "find cache -name 'tmp-*' | grep .");
}

#if !defined(__SANITIZE_ADDRESS__) /* which reports crashes itself */
/* A fault of mlua's own ends by its signal, with the calls that led to it. */
PROCESS_TEST(crash) {
    process_write(room, "crash.lua", "os.execute 'kill -SEGV $PPID'");
    process_result r = process_run(room, 128 + 11, "", "run --device cpu crash.lua");
    process_expect(&r, "please report it with these calls, innermost first:\n");
    process_expect(&r, "main+0x");
}
#endif
