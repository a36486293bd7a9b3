/* Pipelines whose ranks exchange the rows of experts with too few places: steps that leave rows
 * without one are done again, and ranks learn what one rank learns. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/process/support.h"

/* How many runs of programs were done again, by the messages in `errors`. */
static int runs_again(process_room *room) {
    return atoi(process_shell(room, 0, "grep -c 'runs done again' errors || true").output);
}

/* Train on one rank, and on several with the settings `more`. */
static void compare_training(process_room *room, int steps, const char *settings, const char *ranks,
                             const char *more, int *again) {
    char one[512], several[640];
    snprintf(one, sizeof one, "\"$ROOT/models/gpt_moe.lua\" %s warmup=2 sample=0", settings);
    snprintf(several, sizeof several, "%s %s %s 2>errors", ranks, one, more);
    process_step *expected = process_train(room, steps, "", one);
    process_step *actual = process_train(room, steps, "MLUA_DEBUG=1", several);
    process_compare(actual, expected, steps, 1e-5, several);
    *again = runs_again(room);
}

PROCESS_TEST(exchanges_of_pipelines_are_exact) {
    int again;
    compare_training(room, 4,
                     "layers=4 embed=64 heads=8 kv_heads=4 ffn=32 experts=8 seq=48 batch=32 "
                     "accum=2",
                     "-n 8 --mesh pp=2,ep=4", "exchange=1.5", &again);
    CHECK(again >= 1);
}

static void compare_drawn(process_room *room, uint64_t seed) {
    static const char *const meshes[] = {"-n 4 --mesh pp=2,ep=2", "-n 8 --mesh pp=2,ep=4",
                                         "-n 8 --mesh pp=2,dp=2,ep=2"};
    static const char *const schedules[] = {"1f1b", "interleaved", "zero-bubble"};
    static const char *const factors[] = {"1", "1.05", "1.5"};
    uint64_t state = seed * 7919 + 1;
    char settings[256], more[64];
    int accum = 2 << test_range(&state, 0, 1), factor = (int)test_range(&state, 0, 2), again;
    const char *balance = test_range(&state, 0, 1) ? "0.01" : "0";
    const char *router = test_range(&state, 0, 1) ? "sigmoid" : "softmax";
    snprintf(settings, sizeof settings,
             "layers=4 embed=32 heads=4 kv_heads=4 ffn=32 experts=8 seq=16 batch=%d accum=%d "
             "balance=%s router=%s",
             8 * accum, accum, balance, router);
    snprintf(more, sizeof more, "schedule=%s exchange=%s", schedules[test_range(&state, 0, 2)],
             factors[factor]);
    compare_training(room, 5, settings, meshes[test_range(&state, 0, 2)], more, &again);
    EXPECT(!(factor < 2 && again == 0), "%s %s: no step was done again", settings, more);
}

PROCESS_TEST(exchanges_of_drawn_pipelines_are_exact) {
    int count = test_all() ? 24 : 2;
    for (int i = 0; i < count; i++) compare_drawn(room, (uint64_t)i);
}

/* Own loops: states that layers assign, in order; sums that no step begins anew, or every other
 * one; the optimizer in a program of one microbatch, which assigns nothing before it is known that
 * the step stands. late: another program reads the sums before the first one is finished. */
PROCESS_TEST(exchanges_of_own_loops_are_exact) {
#define OWN_LOOP "\"$ROOT/tests/lua/lib/exchange.lua\" --dtype f64 --quiet"
    static const struct {
        const char *way, *schedule;
        int again;
    } cases[] = {{"sums", " late=true", 3},
                 {"first", " schedule=zero-bubble", 3},
                 {"single", "", 3},
                 {"sums", "", 3},
                 {"sums", " schedule=interleaved chunks=2", 3},
                 {"first", "", 3},
                 {"single", " schedule=interleaved chunks=2", 3}};
    int count = test_all() ? 7 : 3;
    for (int i = 0; i < count; i++) {
        char settings[128];
        snprintf(settings, sizeof settings, "way=%s steps=7%s", cases[i].way, cases[i].schedule);
        char *one =
            process_run(room, 0, "", "run --device cpu " OWN_LOOP " way=%s steps=7", cases[i].way)
                .output;
        process_result four = process_run(
            room, 0, "MLUA_DEBUG=1 MLUA_VERIFY=1",
            "run --device cpu -n 4 --mesh pp=2,ep=2 " OWN_LOOP " %s 2>errors", settings);
        process_compare_lines(four.output, one, settings);
        CHECK_EQ_INT(runs_again(room), cases[i].again);
    }
}

/* What a check reports of the memory of a step that may be done again is what the run takes:
 * gathered weights take more than rows that are sent. */
PROCESS_TEST(exchanges_take_what_a_check_reports) {
    static const char settings[] =
        "--device cpu --json --mesh pp=2,ep=2 \"$ROOT/models/gpt_moe.lua\" layers=2 embed=32 "
        "heads=4 kv_heads=4 ffn=512 experts=8 seq=16 batch=16 vocab=256 steps=1 warmup=1 sample=0 "
        "exchange=1";
    process_result check = process_run(room, 0, "", "check %s", settings);
    process_result run = process_run(room, 0, "", "run -n 4 %s 2>errors", settings);
    double reported = process_number(check.output, "\"peak_bytes\":");
    double taken = process_number(run.output, "\"memory_gib\":") * (1 << 30);
    EXPECT(fabs(taken - reported) <= 0.03 * reported, "%.0f bytes planned, %.0f taken", reported,
           taken);
}

/* Memory for steps that are done again is set aside where the program that sets the parameters
 * leaves it: less memory than both take is enough, and more fits as well. */
PROCESS_TEST(exchanges_fit_where_less_fits) {
    static const char check[] =
        "check --device cpu --json --mesh dp=2,ep=2 \"$ROOT/models/gpt_moe.lua\" layers=2 embed=32 "
        "heads=4 kv_heads=4 ffn=512 experts=8 seq=16 batch=64 accum=4 vocab=256 sample=0 "
        "exchange=1";
    double whole = process_number(process_run(room, 0, "", check).output, "\"peak_bytes\":");
    process_result r = process_run(room, 1, "", "%s --memory 1MiB", check);
    double least = process_number(r.output, "\"peak_bytes\":");
    CHECK(least < 0.97 * whole);
    for (int i = 1; i <= 4; i++) {
        double budget = least + 0.01 * (4 - i) * least / 4 + (whole - least) * i / 4;
        r = process_run(room, 0, "", "%s --memory %.4fMiB", check, budget / (1 << 20));
        CHECK(process_number(r.output, "\"peak_bytes\":") <= budget);
    }
}

static const char OVERFLOWING[] =
    "--device cpu --json --mesh pp=2,ep=2 \"$ROOT/models/gpt_moe.lua\" layers=4 embed=32 heads=4 "
    "kv_heads=4 ffn=256 experts=8 seq=16 batch=64 accum=4 vocab=256 sample=0 exchange=1 steps=3 "
    "warmup=2";

static bool repeats_in(process_room *room, double mib) {
    process_result check = process_run(room, 0, "", "check %s --memory %.4fMiB", OVERFLOWING, mib);
    return strstr(check.output, "\"repeats_steps\":true") != NULL;
}

/* Once a budget has room for steps that are done again, every larger one has. A run does them again
 * in the least of those that a check names, and ends with an error in one that it names not. */
PROCESS_TEST(exchanges_repeat_steps_where_a_check_says_so) {
    static const double mib[] = {5.2, 5.8, 6.9, 7.64, 8.1863, 8.3701, 8.4068, 8.9};
    double first = 0, last = 0;
    for (size_t i = 0; i < sizeof mib / sizeof *mib; i++) {
        const bool repeats = repeats_in(room, mib[i]);
        if (repeats && first == 0) first = mib[i];
        if (!repeats) last = mib[i];
        EXPECT(repeats || first == 0, "no step is done again in %g MiB, but in %g", mib[i], first);
    }
    CHECK(last > 0 && first > 0);
    process_run(room, 0, "", "run -n 4 %s --memory %.4fMiB 2>errors", OVERFLOWING, first);
    CHECK(strstr(process_shell(room, 0, "cat errors").output, "such steps are done again"));
    process_run(room, 1, "", "run -n 4 %s --memory %.4fMiB 2>errors", OVERFLOWING, last);
    CHECK(strstr(process_shell(room, 0, "cat errors").output, "no memory is left for steps"));
}

/* FLOPs of the microbatch on `rank` that are planned without regard to other ranks, and that of the
 * program that all ranks make. */
static void read_flops(process_room *room, int rank, double *alone, double *made) {
    const char *line = process_shell(room, 0, "grep '^rank %d plans' plans || true", rank).output;
    *alone = process_number(line, "plans ");
    *made = process_number(line, "makes ");
}

/* In a budget where the ranks of one stage have room for steps that are done again and those of the
 * other have not, no rank leaves such room: each computes as little again as its memory allows. */
PROCESS_TEST(exchanges_leave_no_room_where_a_rank_has_none) {
    process_write(
        room, "plans.lua",
        "local core = require 'mlua.core'\n"
        "local program = core.program\n"
        "core.program = function(o)\n"
        "  if o.name ~= 'microbatch' then return program(o) end\n"
        "  o.plan_only = true\n"
        "  local alone = program(o):plan().flops\n"
        "  o.plan_only = nil\n"
        "  local made = program(o)\n"
        "  local file = io.open('plans', 'a')\n"
        "  file:write(('rank %d plans %.0f makes %.0f\\n'):format(core.options().rank, alone,"
        " made:plan().flops))\n"
        "  file:close()\n"
        "  return made\n"
        "end\n"
        "dofile(os.getenv 'ROOT' .. '/models/gpt_moe.lua')\n");
    process_run(room, 1, "",
                "run -n 4 --device cpu --mesh pp=2,ep=2 plans.lua layers=4 embed=32 heads=4 "
                "kv_heads=4 ffn=256 experts=8 seq=16 batch=512 accum=8 vocab=256 exchange=1 "
                "schedule=interleaved sample=0 steps=1 warmup=1 --memory 9.8MiB 2>errors");
    CHECK(strstr(process_shell(room, 0, "cat errors").output, "no memory is left for steps"));
    for (int rank = 0; rank < 4; rank++) {
        double alone, made;
        read_flops(room, rank, &alone, &made);
        const bool has_room = rank >= 2;
        EXPECT(made > 0 && (has_room ? made < alone : made == alone), "rank %d: %.0f, alone %.0f",
               rank, made, alone);
    }
}
