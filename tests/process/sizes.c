/* Settings far beyond what runs: `check` answers at once, with the script's line where it refuses
 * them. Searches over the numbers below a size, and loops over a sequence, would take minutes. */
#include <string.h>

#include "tests/process/support.h"

enum { SECONDS = 60 }; /* of processor time; each takes less than one, sanitizers 20 times that */

typedef struct {
    const char *arguments, *expected;
} sizes_case;

static void check_sizes(process_room *room, const sizes_case *cases, size_t count) {
    for (size_t i = 0; i < count; i++) {
        process_result r = process_shell(room, PROCESS_ANY_CODE, "timeout -k 1 %d $MLUA check %s",
                                         2 * SECONDS, cases[i].arguments);
        EXPECT(!(r.code == 124 || r.code > 128 || r.cpu_seconds > SECONDS),
               "check %s: exit %d after %.1f s", cases[i].arguments, r.code, r.cpu_seconds);
        process_expect(&r, cases[i].expected);
    }
}

PROCESS_TEST(sizes_of_models) {
    static const sizes_case cases[] = {
        /* suggestions of what would divide */
        {"\"$ROOT/models/gpt.lua\" embed=2147483647", "heads=1 or heads=2147483647 would"},
        {"\"$ROOT/models/gpt.lua\" embed=9223372036854775783", "does not divide"},
        {"\"$ROOT/models/gpt.lua\" embed=9223372036854775807", "heads=1 or heads=7 would"},
        {"\"$ROOT/models/gpt.lua\" heads=9223372036854775807", "heads=384 would"},
        /* chunks of logits */
        {"\"$ROOT/models/gpt.lua\" ffn=2147483647 layers=1", "parameters"},
        {"\"$ROOT/models/gpt.lua\" seq=2147483647 layers=1", "parameters"},
        {"\"$ROOT/models/gpt.lua\" batch=1000003 layers=1", "parameters"},
        {"\"$ROOT/models/gpt.lua\" seq=1000003 batch=1 layers=1 --device h200", "parameters"},
        {"\"$ROOT/models/gpt.lua\" seq=2147483646 batch=1 layers=1 --device h200", "parameters"},
        {"\"$ROOT/models/gpt_moe.lua\" experts=2147483647 layers=1", "parameters"},
        /* logits of which each of the most chunks is large too */
        {"\"$ROOT/models/gpt.lua\" embed=65536 heads=65536 ffn=65536 vocab=65536 seq=65536 "
         "batch=1024 layers=1 --mesh tp=65536 --device h200",
         "parameters"},
        {"\"$ROOT/models/gpt_moe.lua\" experts=4 exchange=1e308 layers=1 --mesh ep=2",
         "parameters"},
        /* pipelines */
        {"\"$ROOT/models/gpt.lua\" batch=4194304 accum=1048576 --mesh pp=1073741823",
         ": cannot cut \"blocks\", 6 layers, into 1073741823 pipeline stages"},
        {"\"$ROOT/models/gpt.lua\" batch=67108864 accum=67108864 --mesh pp=2",
         "is too long to plan"},
        /* integers that are no sizes */
        {"\"$ROOT/models/gpt.lua\" layers=9223372036854775807",
         ": m.stack makes 100000 modules at most, not 9223372036854775807"},
        {"\"$ROOT/models/gpt.lua\" batch=4611686018427387904 accum=4611686018427387904",
         "m.train's accum must be an integer from 1 to 2^30"},
        {"\"$ROOT/models/gpt_moe.lua\" shared=9223372036854775807", "beyond 2^63"}};
    check_sizes(room, cases, sizeof cases / sizeof *cases);
}

/* Products and sums of sizes beyond 64 bits. */
PROCESS_TEST(sizes_that_overflow) {
    static const sizes_case cases[] = {
        {"\"$ROOT/models/gpt.lua\" embed=1048576 heads=1048576 ffn=1099511627776",
         ": a parameter would have more than 2^57 elements"},
        {"\"$ROOT/models/gpt.lua\" embed=1048576 heads=1048576 ffn=68719476736 batch=1 seq=1",
         ": all parameters and other states would have more than 2^57 elements"},
        {"\"$ROOT/models/gpt.lua\" embed=65536 heads=65536 ffn=8388608 batch=65536 seq=65536",
         ": the tensors of program \"step\" have more than 2^60 bytes"},
        {"\"$ROOT/models/gpt.lua\" batch=1152921504606846976 accum=1073741824 seq=1073741824",
         ": a step of batch=1152921504606846976 times seq=1073741824 tokens"},
        {"input.lua", "input.lua:2: an input would have more than 2^57 elements"},
        {"concat.lua", "concat.lua:6: concat would give a tensor with more than 2^57 elements"},
        {"microbatches.lua",
         "microbatches.lua:2: a program's microbatches must be 1 to 1073741824"}};
    process_write(room, "input.lua",
                  "local m = require 'mlua'\n"
                  "m.input('x', { m.axis('a', 1 << 40), m.axis('b', 1 << 40) })\n");
    process_write(room, "concat.lua",
                  "local m = require 'mlua'\n"
                  "local x = m.zeros { m.axis('a', 1 << 56) }\n"
                  "local list = {}\n"
                  "for i = 1, 64 do list[i] = x end\n"
                  "\n"
                  "m.concat(list, 'a')\n");
    process_write(room, "microbatches.lua",
                  "local m = require 'mlua'\n"
                  "m.compile(function() return {} end, {}, { microbatches = 1 << 40 })\n");
    check_sizes(room, cases, sizeof cases / sizeof *cases);
}

/* FLOPs and the balance of ranks count the pairs that a mask leaves: not one query after another.
 */
PROCESS_TEST(sizes_of_windows) {
    static const char script[] =
        "local m = require 'mlua'\n"
        "local cfg = m.config { seq = 1 << 40, windows = 1 }\n"
        "local A = m.axes { batch = 2, seq = cfg.seq, heads = 2, head_dim = 8 }\n"
        "local layout = m.layout { mesh = { { 'cp', 1 } }, acts = { cp = { 'seq' } } }\n"
        "local axes = { A.batch, A.seq, A.heads, A.head_dim }\n"
        "m.compile(function(i)\n"
        "  local sum = 0\n"
        "  for w = 1, cfg.windows do\n"
        "    sum = sum + m.attention(i.x, i.x, i.x, { causal = true, window = 1000 + w }):sum()\n"
        "  end\n"
        "  return sum\n"
        "end, { x = axes }, { layout = layout })\n";
    process_write(room, "window.lua", script);
    static const sizes_case cases[] = {
        {"window.lua", "peak memory"},
        {"window.lua seq=2147483646 windows=64 --mesh cp=2", "peak memory"},
        {"window.lua seq=2147483646 --device h200", "peak memory"}};
    check_sizes(room, cases, sizeof cases / sizeof *cases);
}

/* What is said to divide a batch does. */
PROCESS_TEST(sizes_of_microbatches) {
    static const struct {
        const char *arguments, *help, *would[4];
    } cases[] = {{"--mesh pp=2,dp=2",
                  "batch=8, or batch=16, or accum=3, or accum=6 would do",
                  {"batch=8", "batch=16", "batch=12 accum=3", "batch=12 accum=6"}},
                 {"--mesh dp=4 accum=2",
                  "batch=8, or batch=16, or accum=1, or accum=3 would do",
                  {"batch=8", "batch=16", NULL}}};
    static const char model[] = "\"$ROOT/models/gpt.lua\" layers=2 embed=16 heads=2 seq=8";
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        process_result r =
            process_run(room, 1, "", "check %s batch=12 %s", model, cases[i].arguments);
        process_expect(&r, cases[i].help);
        for (int k = 0; k < 4 && cases[i].would[k]; k++)
            process_run(room, 0, "", "check %s %s %s", model, cases[i].arguments,
                        cases[i].would[k]);
    }
    process_run(room, 0, "", "check %s batch=12 --mesh dp=4 accum=1", model);
    process_run(room, 0, "", "check %s batch=12 --mesh dp=4 accum=3", model);
}
