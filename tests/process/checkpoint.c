/* Checkpoints of whole models: saved under one layout, loaded under another, saved again: the same
 * files to the bit, and the losses of one rank after it. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/process/dist_layouts.h"
#include "tests/process/support.h"

enum { MOST_STEPS = 14, MOST = 16, TOGETHER = 24 };
#define SCRIPT "\"$ROOT/tests/lua/lib/checkpoint.lua\""
#define ONE "one rank"

/* Training under layout `to` (NULL: one rank) into folder `save`; from the folder `load` of what
 * `from` has saved, if that is not -1. */
typedef struct {
    int to, from;
    const char *load, *save;
    char *loss[MOST_STEPS]; /* as printed */
} run;

typedef struct {
    process_room *room;
    model_kind model;
    const layout_case *layouts[MOST]; /* NULL: one rank */
    int count, at, steps;             /* saved after `at` of the steps */
    run saved[MOST];                  /* by layout */
} pairs;

static const char *name_of(const pairs *p, int layout) {
    return p->layouts[layout] ? p->layouts[layout]->name : ONE;
}

static int ranks_of(const pairs *p, int layout) {
    return p->layouts[layout] ? p->layouts[layout]->ranks : 1;
}

static void write_runs(const pairs *p, run *const *runs, int count) {
    static const char *const settings[MODELS] = {"", "kv_heads = 4, ffn = 64",
                                                 "kv_heads = 2, ffn = 32, experts = 8"};
    ml_text lines = {.arena = p->room->arena};
    for (int i = 0; i < count; i++) {
        const run *r = runs[i];
        const layout_case *to = p->layouts[r->to];
        ml_text_add(&lines, "{ model = '%s', layout = %s, at = %d, ", model_names[p->model],
                    to ? to->layout : "nil", p->at);
        if (r->load) ml_text_add(&lines, "load = '%s', ", r->load);
        ml_text_add(&lines, "save = '%s', settings = { %s } }\n", r->save, settings[p->model]);
    }
    process_write(p->room, "runs.txt", lines.text);
}

static void read_losses(const pairs *p, run *r, const char *output, int turn) {
    ml_arena *arena = p->room->arena;
    const char *from = strstr(output, ml_arena_format(arena, "run %d\n", turn));
    for (int i = 0; i < p->steps; i++) {
        const char *line = from ? strstr(from, ml_arena_format(arena, "{\"step\":%d,", i + 1)) : 0;
        const char *loss = line ? strstr(line, "\"loss\":") : 0;
        if (!loss) ml_raise(ML_INTERNAL, "run %d: no step %d in\n%s", turn, i + 1, output);
        r->loss[i] = ml_arena_copy(arena, loss + 7, strcspn(loss + 7, ",}"));
    }
}

/* Runs of equally many ranks, in the same processes. */
static void launch(const pairs *p, run *const *runs, int count) {
    write_runs(p, runs, count);
    process_write_text(p->room);
    process_result r = process_run(
        p->room, 0, ml_arena_format(p->room->arena, "RUNS=runs.txt MLUA_RUNS=%d", count),
        "run --device cpu --dtype f32 --json -n %d " SCRIPT
        " layers=4 embed=32 heads=4 seq=16 vocab=256 batch=8 data=text sample=0 warmup=1 lr=3e-3 "
        "steps=%d",
        ranks_of(p, runs[0]->to), p->steps);
    for (int i = 0; i < count; i++) read_losses(p, runs[i], r.output, i + 1);
}

static void launch_all(const pairs *p, run **runs, int count) {
    run *some[TOGETHER];
    for (int ranks = 1; ranks <= 8; ranks *= 2) {
        int found = 0;
        for (int i = 0; i < count; i++) {
            if (ranks_of(p, runs[i]->to) != ranks) continue;
            some[found++] = runs[i];
            if (found == TOGETHER) launch(p, some, found);
            if (found == TOGETHER) found = 0;
        }
        if (found > 0) launch(p, some, found);
    }
}

static void compare(const pairs *p, const run *r) {
    const char *from = name_of(p, r->from), *to = name_of(p, r->to);
    const run *origin = &p->saved[r->from], *one = &p->saved[0];
    const double bound = p->model == GPT_MOE ? 1e-4 : 1e-5;
    process_result differ = process_shell(p->room, PROCESS_ANY_CODE, "diff -rq %s %s && rm -r %s",
                                          r->load, r->save, r->save);
    EXPECT(differ.code == 0, "%s, saved by %s and loaded and saved by %s: %s",
           model_names[p->model], from, to, differ.output);
    for (int i = p->at; i < p->steps; i++) {
        const double loss = strtod(r->loss[i], NULL), expected = strtod(one->loss[i], NULL);
        EXPECT(fabs(loss - expected) <= bound * fabs(expected),
               "%s, saved by %s: step %d of %s has the loss %s, and one rank %s",
               model_names[p->model], from, i + 1, to, r->loss[i], one->loss[i]);
        EXPECT(r->to != r->from || strcmp(r->loss[i], origin->loss[i]) == 0,
               "%s, saved and loaded by %s: step %d has the loss %s instead of %s",
               model_names[p->model], from, i + 1, r->loss[i], origin->loss[i]);
    }
}

static pairs *pairs_new(process_room *room, model_kind model, const char *const *names, int count,
                        int at, int steps) {
    pairs *p = ML_NEW(room->arena, pairs);
    p->room = room;
    p->model = model;
    p->count = count, p->at = at, p->steps = steps;
    run *runs[MOST];
    for (int i = 0; i < count; i++) {
        for (int k = 0; k < CASES; k++)
            if (strcmp(cases[k].name, names[i]) == 0) p->layouts[i] = &cases[k];
        REQUIRE(p->layouts[i] != NULL || strcmp(names[i], ONE) == 0);
        p->saved[i] = (run){i, -1, NULL, ml_arena_format(room->arena, "saved%d", i), {0}};
        runs[i] = &p->saved[i];
    }
    launch_all(p, runs, count);
    return p;
}

/* Each layout (`step` 1), or every step-th pair, from a seeded first one. */
static void pairs_all(pairs *p, int first, int step) {
    const int all = p->count * p->count;
    run *list = ML_NEW_ARRAY(p->room->arena, run, all), *runs[MOST * MOST];
    int count = 0;
    for (int i = first; i < all; i += step) {
        list[count] = (run){i % p->count, i / p->count, NULL, NULL, {0}};
        list[count].load = p->saved[i / p->count].save;
        list[count].save = ml_arena_format(p->room->arena, "again%d", i);
        runs[count] = &list[count];
        count++;
    }
    launch_all(p, runs, count);
    for (int i = 0; i < count; i++) compare(p, runs[i]);
}

static const char *const few[] = {ONE, "zero1 dp2", "tp2 sp", "pp2"};
DIST_TEST(checkpoint_pairs) {
    pairs_all(pairs_new(room, GPT, few, 4, 3, 5), 1, 3);
}

/* ---- Saves that are interrupted -----------------------------------------------------------------
 */

#define CPU "--device cpu "
#define CRASH "run %s \"$ROOT/tests/lua/lib/crash.lua\" do=%s value=%d"

/* Save `value` under a mesh ("-n 2 --mesh dp=2"), killed before file operation `fault` of some
 * rank; what is left is a whole checkpoint of this or an earlier value, of which *newest is the
 * latest. Whether the save was made. */
static bool crash(process_room *room, const char *mesh, int value, int fault, int *newest) {
    const char *knob = ml_arena_format(room->arena, fault ? "MLUA_FAULT_IO=%d" : "", fault);
    process_result r = process_run(room, PROCESS_ANY_CODE, knob, CRASH, mesh, "save", value);
    EXPECT(r.code == 0 || fault > 0, "%s", r.output);
    process_result left = process_run(room, 0, "", CRASH, CPU, "check", 0);
    const int found = (int)process_number(left.output, "newest ");
    const int same = (int)process_number(left.output, "same ");
    EXPECT(found == value || (r.code != 0 && found == *newest),
           "%s, killed at %d: after checkpoint %d the newest is %d", mesh, fault, value, found);
    EXPECT(same == value || r.code != 0, "%s, killed at %d: %d in the place of %d", mesh, fault,
           same, value);
    *newest = found;
    return r.code == 0;
}

/* Between a GPU and the CPU, and beside steps. */
static void gpu_checkpoint(process_room *room) {
    process_run(room, 0, "", CRASH, "--device cuda", "save", 1);
    process_run(room, 0, "", CRASH, CPU, "check", 0);
    process_run(room, 0, "", CRASH, CPU "-n 2 --mesh dp=2", "save", 2);
    process_run(room, 0, "", CRASH, "--device cuda", "check", 0);
    process_run(room, 0, "", "run --device cuda \"$ROOT/tests/lua/checkpoint_async.lua\"");
}
TEST(gpu_checkpoint, there_and_back) {
    process_in_room(gpu_checkpoint);
}

DIST_TEST(checkpoint_crashes) {
    int newest = 1, value = 1;
    crash(room, CPU, value, 0, &newest);
    for (int fault = 2; fault < 70; fault += 13) crash(room, CPU, ++value, fault, &newest);
    crash(room, CPU "-n 2 --mesh tp=2", ++value, 15, &newest);
    CHECK(crash(room, CPU "-n 3 --mesh dp=3", ++value, 0, &newest));
}

/* A disk without room, as the largest size of a file makes one: the checkpoints before stay. */
PROCESS_TEST(checkpoint_without_room) {
    int newest = 1;
    crash(room, CPU, 1, 0, &newest);
    process_result r =
        process_shell(room, 1, "trap '' XFSZ; ulimit -f 64; \"$MLUA\" " CRASH, CPU, "save", 2);
    process_expect(&r, "cannot write same.tmp-");
    process_expect(&r, "File too large");
    r = process_run(room, 0, "", CRASH, CPU, "check", 0);
    process_expect(&r, "newest 1 same 1");
    r = process_shell(room, 1, "ls same all | grep -c tmp-");
    CHECK_TEXT(r.output, "0\n");
    process_write(room, "file", "");
    r = process_shell(room, 1, "rm -r same && ln -s file same && \"$MLUA\" " CRASH, CPU, "save", 2);
    process_expect(&r, "same is not a folder");
}

/* Every operation of every mesh, until there is none of that number; so often again. */
static void long_crashes(process_room *room) {
    static const char *const meshes[] = {CPU, CPU "-n 2 --mesh dp=2", CPU "-n 2 --mesh tp=2",
                                         CPU "-n 3 --mesh dp=3", CPU "-n 4 --mesh dp=2,tp=2"};
    enum { MESHES = sizeof meshes / sizeof *meshes, INJECTIONS = 1000 };
    int newest = 1, value = 1, made = 0;
    crash(room, CPU, value, 0, &newest);
    for (int i = 0; made < INJECTIONS; i++) {
        int fault = 1;
        while (!crash(room, meshes[i % MESHES], ++value, fault, &newest)) fault++;
        made += fault - 1;
    }
    printf("%d injections\n", made);
}
TEST(long, checkpoint_crashes) {
    process_in_room(long_crashes);
}

static void long_damage(process_room *room) {
    process_run(room, 0, "MLUA_DAMAGE=1000", "run \"$ROOT/tests/lua/checkpoint_damage.lua\"");
}
TEST(long, checkpoint_damage) {
    process_in_room(long_damage);
}

static const char *const dense[] = {ONE,
                                    "zero1 dp2",
                                    "fsdp2",
                                    "tp2 sp",
                                    "pp2",
                                    "cp2 ring",
                                    "pp2 interleaved",
                                    "dp2 tp2 sp zero1",
                                    "pp2 dp2 zero-bubble zero1",
                                    "fsdp2 tp2",
                                    "dp2 tp2 sp zero1 kept",
                                    "dp2 tp2 pp2 sp zero1"};
static const char *const experts[] = {ONE,
                                      "dp2",
                                      "fsdp4",
                                      "tp2 sp",
                                      "cp2 gathered",
                                      "ep2",
                                      "ep2 tp2",
                                      "ep4 zero1",
                                      "dp2 ep2 fsdp",
                                      "pp2 interleaved",
                                      "pp2 dp2 zero-bubble zero1",
                                      "ep4 tp2 sp"};

static void long_pairs(process_room *room) {
    pairs_all(pairs_new(room, GPT, dense, 12, 7, 14), 0, 1);
    pairs_all(pairs_new(room, LLAMA, dense, 12, 7, 14), 0, 1);
    pairs_all(pairs_new(room, GPT_MOE, experts, 12, 7, 14), 0, 1);
}
TEST(long, checkpoint_pairs) {
    process_in_room(long_pairs);
}
