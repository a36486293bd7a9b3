/* Whole models under many layouts: what their ranks learn is what one rank learns. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/clock.h"
#include "tests/process/dist_layouts.h"
#include "tests/process/support.h"

enum {
    STEPS = 5,
    MOST_ACCUM = 4,
    TOGETHER = 24, /* runs in the same processes at most */
    FAILURES = 3,  /* launches that end early until no more are made */
};
#define SCRIPT "\"$ROOT/tests/lua/lib/dist.lua\""

/* A model under a layout; on one rank where there is none. */
typedef struct {
    const layout_case *layout;
    model_kind model;
    int accum, layers;
} run;

typedef struct {
    char *weights, *gradients; /* the lines; gradients are empty in the first run */
    double loss[STEPS], norm[STEPS];
    bool again; /* a step without places for all rows was done again */
} learned;

/* What runs are compared with, and how far those of a launch are. */
typedef struct {
    process_room *room;
    learned one[MODELS][MOST_ACCUM + 1][MOST_LAYERS + 1];
    const run *runs;
    int count, done, compared, failures;
    double since; /* the end of the run before */
} comparison;

/* DIST_DEVICE=cuda DIST_DTYPE=bf16 DIST_BOUND=2e-2: on GPUs (tests/gpu_dist.sh), and how far off
 * results may be. */
static const char *asked(const char *variable, const char *otherwise) {
    const char *value = getenv(variable);
    return value ? value : otherwise;
}

/* DIST_STEPS=3: fewer, where ranks that share GPUs are slow. */
static int steps_asked(void) {
    int steps = atoi(asked("DIST_STEPS", "5"));
    REQUIRE(steps > 1 && steps <= STEPS);
    return steps;
}

static double bound(void) {
    return strtod(asked("DIST_BOUND", "1e-5"), NULL);
}

/* In bf16 rounding sends tokens to other experts: 5e-2 of what these learn. */
static const char *dtype_of(model_kind model) {
    const char *dtype = asked("DIST_DTYPE", "f32");
    return model == GPT_MOE && strcmp(dtype, "bf16") == 0 ? "f32" : dtype;
}

/* At a rate of 3e-3 rounding to bf16 alone moves one rank's norms by 3e-2 within three steps, as
 * Adam's first ones magnify what it leaves of small gradients. At a third of it steps are a third
 * as long, and losses and norms are held to a third. */
enum { SMALLER = 3 };
static bool rounds(model_kind model) {
    return strcmp(dtype_of(model), "bf16") == 0;
}
static const char *rate_of(model_kind model) {
    return rounds(model) ? "1e-3" : "3e-3";
}
static double step_bound(model_kind model) {
    return bound() / (rounds(model) ? SMALLER : 1);
}

/* ---- What runs print ----------------------------------------------------------------------------
 */

/* The lines about gradients. */
static char *gradient_lines(process_room *room, const char *output) {
    const char *first = strstr(output, "gradient "), *end = first;
    while (end && strncmp(end, "gradient ", 9) == 0) end = strchr(end, '\n') + 1;
    return first ? ml_arena_copy(room->arena, first, (size_t)(end - first)) : "";
}

/* Where the run's output begins; NULL where it has not. */
static const char *run_start(process_room *room, const char *output, int turn) {
    return strstr(output, ml_arena_format(room->arena, "run %d\n", turn));
}

/* Out of all that a process has printed, from the line "run N" to the next. */
static learned read_run(process_room *room, const char *output, int turn) {
    learned out = {.weights = "none"};
    const char *from = run_start(room, output, turn);
    if (!from) ml_raise(ML_INTERNAL, "no run %d in\n%s", turn, output);
    const char *next = run_start(room, from, turn + 1);
    size_t length = next ? (size_t)(next - from) : strlen(from);
    const char *text = ml_arena_copy(room->arena, from, length);
    const char *line = strstr(text, "weights ");
    if (line) out.weights = ml_arena_copy(room->arena, line, strcspn(line, "\n"));
    out.gradients = gradient_lines(room, text);
    out.again = strstr(text, "are done again with gathered weights") != NULL;
    for (int i = 0; i < steps_asked(); i++) {
        line = strstr(text, ml_arena_format(room->arena, "{\"step\":%d,", i + 1));
        if (!line) ml_raise(ML_INTERNAL, "run %d: no step %d in\n%s", turn, i + 1, text);
        out.loss[i] = process_number(line, "\"loss\":");
        out.norm[i] = process_number(line, "\"grad_norm\":");
    }
    return out;
}

/* ---- Comparing ----------------------------------------------------------------------------------
 */

static double deviation(double a, double b) {
    return fabs(a - b) / fabs(b);
}

/* Of which some steps must be done again. */
static bool without_place(const layout_case *c) {
    return strstr(c->name, "without a place") != NULL;
}

static double worst, worst_gradient;       /* of all layouts of this process */
static double furthest, furthest_gradient; /* of the run that is compared */

static double largest_norm(const char *lines) {
    double largest = 0, norm;
    for (; *lines; lines = strchr(lines, '\n') + 1)
        if (sscanf(lines, "gradient %*s %*f %lf", &norm) == 1) largest = fmax(largest, norm);
    return largest;
}

static char *run_name(process_room *room, const run *r) {
    return ml_arena_format(room->arena, "%s, %s, accumulation %d", model_names[r->model],
                           r->layout ? r->layout->name : "one rank", r->accum);
}

/* The Frobenius norm of the difference, relative to that of the gradient. Some gradients are
 * nothing but rounding: a bias of all keys changes no attention. */
static void check_gradients(const char *what, const char *lines) {
    double least = 1e-3 * largest_norm(lines), difference, norm;
    CHECK(lines[0] != 0);
    for (; *lines; lines = strchr(lines, '\n') + 1) {
        char name[128];
        REQUIRE(sscanf(lines, "gradient %127s %lf %lf", name, &difference, &norm) == 3);
        double off = difference / fmax(norm, least);
        furthest_gradient = fmax(furthest_gradient, off);
        EXPECT(off <= bound(), "%s: the gradient of %s is off by %.3g of its norm", what, name,
               off);
    }
}

static void compare(const char *what, const learned *one, const run *r, const learned *many) {
    EXPECT(strcmp(many->weights, one->weights) == 0, "%s: initial %s, not %s", what, many->weights,
           one->weights);
    furthest = furthest_gradient = 0;
    check_gradients(what, many->gradients);
    CHECK_EQ_INT(many->again, without_place(r->layout));
    for (int i = 0; i < steps_asked(); i++) {
        double loss = deviation(many->loss[i], one->loss[i]);
        double norm = deviation(many->norm[i], one->norm[i]);
        furthest = fmax(furthest, fmax(loss, norm));
        EXPECT(loss <= step_bound(r->model) && norm <= step_bound(r->model),
               "%s: step %d has loss %.9g and norm %.9g, not %.9g and %.9g", what, i + 1,
               many->loss[i], many->norm[i], one->loss[i], one->norm[i]);
    }
}

static learned *one_of(comparison *c, const run *r) {
    return &c->one[r->model][r->accum][r->layers];
}

/* The next run of the launch has ended: one rank's is kept, others are compared with it. What a
 * process that is stopped has compared is shown, too. */
static void take_run(comparison *c, const char *output) {
    const run *r = &c->runs[c->done++];
    learned many = read_run(c->room, output, c->done);
    const char *what = run_name(c->room, r);
    double seconds = ml_clock_now() - c->since;
    c->since += seconds;
    if (!r->layout) {
        if (steps_asked() == STEPS) CHECK(many.loss[STEPS - 1] < many.loss[0]);
        *one_of(c, r) = many;
        return;
    }
    compare(what, one_of(c, r), r, &many);
    c->compared++;
    worst = fmax(worst, furthest);
    worst_gradient = fmax(worst_gradient, furthest_gradient);
    if (!test_all()) return;
    printf("%s: off by %.2g, gradients %.2g; %.1f s on %d ranks\n", what, furthest,
           furthest_gradient, seconds, r->layout->ranks);
    fflush(stdout);
}

/* The output of a launch so far. */
static void hear(void *context, const char *output) {
    comparison *c = context;
    while (c->done + 1 < c->count && run_start(c->room, output, c->done + 2)) take_run(c, output);
}

/* ---- Launches -----------------------------------------------------------------------------------
 */

/* Of the models, at a size that all layouts divide. */
static const char *settings_of(model_kind model) {
    static const char *const settings[MODELS] = {"", "kv_heads = 4, ffn = 64",
                                                 "kv_heads = 2, ffn = 32, experts = 8"};
    return settings[model];
}

/* A line of the file that dist.lua reads. Microbatches have 8 samples: all layouts divide them. One
 * rank keeps the gradients in a file, with which others compare theirs. */
static void write_runs(process_room *room, const run *runs, int count) {
    ml_text lines = {.arena = room->arena};
    for (int i = 0; i < count; i++) {
        const run *r = &runs[i];
        const char *model = model_names[r->model];
        ml_text_add(&lines,
                    "{ model = '%s', layout = %s, gradients = '%s.%d.%d', settings = "
                    "{ layers = %d, accum = %d, batch = %d, %s } }\n",
                    model, r->layout ? r->layout->layout : "nil", model, r->accum, r->layers,
                    r->layers, r->accum, 8 * r->accum, settings_of(r->model));
    }
    process_write(room, "runs.txt", lines.text);
}

/* Of a run beside those of its line. */
#define RUN                                                                                        \
    "run --device %s --dtype %s --json -n %d " SCRIPT                                              \
    " embed=32 heads=4 seq=16 vocab=256 data=text sample=0 warmup=1 lr=%s steps=%d"

/* All in the same processes, one after the other, each compared as it ends; false where they end
 * before the last one has. */
static bool launch(comparison *c, const run *runs, int count) {
    process_room *room = c->room;
    c->runs = runs;
    c->count = count;
    c->done = 0;
    c->since = ml_clock_now();
    write_runs(room, runs, count);
    process_write_text(room);
    process_result r = process_follow(
        room, hear, c,
        ml_arena_format(room->arena, "MLUA_VERIFY=1 RUNS=runs.txt MLUA_RUNS=%d", count), RUN,
        asked("DIST_DEVICE", "cpu"), dtype_of(runs->model), runs->layout ? runs->layout->ranks : 1,
        rate_of(runs->model), steps_asked());
    if (r.code == 0) take_run(c, r.output);
    if (r.code == 0) return true;
    const char *from = run_start(room, r.output, c->done + 1);
    if (!runs->layout) ml_raise(ML_INTERNAL, "one rank: exit code %d\n%s", r.code, r.output);
    test_fail("%s: exit code %d after %.1f s\n%s", run_name(room, &runs[c->done]), r.code,
              r.seconds, from ? from : r.output);
    c->failures++;
    return false;
}

/* What fails is left out, and those after it go on. */
static void launch_all(comparison *c, const run *runs, int count) {
    for (int at = 0; at < count && c->failures < FAILURES;) {
        int some = count - at < TOGETHER ? count - at : TOGETHER;
        at += launch(c, runs + at, some) ? some : c->done + 1;
    }
}

static bool staged(const layout_case *c) {
    return strncmp(c->name, "pp", 2) == 0 || strstr(c->name, " pp") != NULL;
}

/* Whether the processes that train one can train the other. NCCL reads once in a process whether it
 * keeps the order of calls, which it must not under pipeline stages. */
static bool alike(const run *a, const run *b) {
    const layout_case *x = a->layout, *y = b->layout;
    if ((a->model == GPT_MOE) != (b->model == GPT_MOE) || !x != !y) return false;
    return !x || (x->ranks == y->ranks && staged(x) == staged(y) && !without_place(x) &&
                  !without_place(y));
}

/* Those that one process can train together with the first, which are taken out of the list. */
static int take_alike(run *list, int *count, run *taken) {
    int left = 0, found = 0;
    run first = list[0];
    for (int i = 0; i < *count; i++)
        if (i == 0 || alike(&first, &list[i]))
            taken[found++] = list[i];
        else
            list[left++] = list[i];
    *count = left;
    return found;
}

/* One rank's share of the comparison that is not made yet. */
static void launch_missing(comparison *c, const run *runs, int count) {
    run *missing = ML_NEW_ARRAY(c->room->arena, run, count);
    int found = 0;
    for (int i = 0; i < count; i++) {
        run r = runs[i];
        r.layout = NULL;
        bool known = one_of(c, &r)->weights != NULL;
        for (int k = 0; k < found && !known; k++) known = one_of(c, &missing[k]) == one_of(c, &r);
        if (!known) missing[found++] = r;
    }
    launch_all(c, missing, found);
}

static comparison *new_comparison(process_room *room) {
    comparison *c = ML_NEW(room->arena, comparison);
    c->room = room;
    return c;
}

/* Against one rank. */
static void compare_all(comparison *c, run *list, int count) {
    run *taken = ML_NEW_ARRAY(c->room->arena, run, count);
    while (count && c->failures < FAILURES) {
        int found = take_alike(list, &count, taken);
        launch_missing(c, taken, found);
        launch_all(c, taken, found);
    }
}

static run run_of(const layout_case *c, model_kind model, int accum) {
    return (run){c, model, accum, c->layers ? c->layers : LAYERS};
}

static const layout_case *find(const char *name) {
    for (int i = 0; i < CASES; i++)
        if (strcmp(cases[i].name, name) == 0) return &cases[i];
    ml_raise(ML_INVALID, "there is no layout \"%s\"", name);
}

static void compare_named(process_room *room, model_kind model, int accum, const char *const *names,
                          int count) {
    run *list = ML_NEW_ARRAY(room->arena, run, count);
    for (int i = 0; i < count; i++) list[i] = run_of(find(names[i]), model, accum);
    compare_all(new_comparison(room), list, count);
}

DIST_TEST(gpt) {
    static const char *const names[] = {"dp2", "fsdp2", "fsdp2 kept", "tp2 sp", "dp2 tp2 sp zero1"};
    compare_named(room, GPT, 1, names, 5);
}

DIST_TEST(llama) {
    static const char *const names[] = {"zero1 dp2", "cp2 gathered", "dp2 cp2 tp2 sp"};
    compare_named(room, LLAMA, 1, names, 3);
}

DIST_TEST(experts) {
    static const char *const names[] = {"ep2", "dp2 ep2 fsdp", "ep2 rows sent",
                                        "ep2 rows without a place"};
    compare_named(room, GPT_MOE, 1, names, 4);
}

/* A vocabulary that no ranks divide, in parts that are filled up; fewer key heads than ranks. */
DIST_TEST(filled_up_axes) {
    static const char *const runs[][2] = {{"gpt", "-n 2 --mesh tp=2"},
                                          {"llama", "-n 4 --mesh tp=4"}};
    for (size_t i = 0; i < sizeof runs / sizeof *runs; i++) {
        char *one = ml_arena_format(
            room->arena,
            "\"$ROOT/models/%s.lua\" --dtype f32 layers=1 embed=32 heads=4 vocab=257 seq=16 "
            "batch=8 sample=0 warmup=1 lr=3e-3%s",
            runs[i][0], i ? " ffn=66 kv_heads=2" : "");
        char *all = ml_arena_format(room->arena, "%s %s", one, runs[i][1]);
        process_compare(process_train(room, 3, "MLUA_VERIFY=1", all),
                        process_train(room, 3, "MLUA_VERIFY=1", one), 3, 1e-5, runs[i][1]);
    }
}

/* The same of pipelines: whole steps. */
DIST_TEST(stages_without_room) {
    static const char *const names[] = {"pp2 ep2 rows without a place",
                                        "pp2 ep2 at once, rows without a place",
                                        "pp2 ep2 interleaved, rows without a place",
                                        "pp2 ep2 zero-bubble zero1, rows without a place"};
    compare_named(room, GPT_MOE, 1, names, 4);
}

DIST_TEST(stages) {
    static const char *const two[] = {"pp2", "pp2 dp2 zero-bubble zero1", "cp2 ring pp2 tp2 sp"};
    static const char *const seven[] = {"pp4 of 7 layers", "pp2 three chunks"};
    compare_named(room, GPT, 1, two, 3);
    compare_named(room, LLAMA, 1, seven, 2);
}

/* What a pipeline cannot be says so, on every rank alike. */
DIST_TEST(impossible_stages) {
    process_result r = process_run(room, 1, "",
                                   "run --device cpu -n 4 --mesh pp=4 \"$ROOT/models/gpt.lua\" "
                                   "layers=3");
    process_expect(&r, "cannot cut \"blocks\", 3 layers, into 4 pipeline stages");
    r = process_run(room, 1, "", "check --mesh pp=4 \"$ROOT/models/gpt.lua\" layers=8 batch=10");
    process_expect(&r, "batch=10 cannot be cut into 8 microbatches");
    r = process_run(room, 1, "",
                    "check --mesh pp=4 \"$ROOT/models/gpt.lua\" layers=8 batch=18 "
                    "schedule=interleaved accum=6");
    process_expect(&r, "interleaved stages take them in groups of 4");
}

/* Ranks over which nothing is split do the same work, and a remark says so. */
DIST_TEST(idle_ranks) {
    static const char settings[] =
        "layers=2 embed=32 heads=4 seq=16 batch=8 vocab=256 sample=0 steps=2";
    static const char idle[] = "all do the same work";
    static const char *const layouts[] = {
        "mesh = { {'x', 2} }, acts = { x = {'sequence', 'samples'} }, state = { x = 'flat' }",
        "mesh = { {'pp', 2}, {'x', 2} }, stages = { pp = 'layers', microbatches = 2 }",
        "mesh = { {'pp', 2}, {'x', 2} }, stages = { pp = 'layers', microbatches = 2 }, "
        "acts = { x = {'batch'} }",
        "mesh = { {'x', 2} }, params = { x = {'ffn'} }, acts = { x = {'ffn'} }"};
    for (int i = 0; i < 4; i++) {
        const char *line = ml_arena_format(
            room->arena, "{ model = 'gpt', layout = m.layout { %s } }\n", layouts[i]);
        process_write(room, "runs.txt", line);
        process_result r = process_run(room, 0, "RUNS=runs.txt", "check " SCRIPT " %s", settings);
        CHECK_EQ_INT(strstr(r.output, idle) != NULL, i < 2);
        if (i == 1) continue;
        r = process_run(room, 0, "RUNS=runs.txt", "run --device cpu -n %d " SCRIPT " %s",
                        i == 2 ? 4 : 2, settings);
        CHECK_EQ_INT(strstr(r.output, idle) != NULL, i < 2);
    }
}

DIST_TEST(accumulation) {
    static const char *const names[] = {"fsdp2 tp2", "dp2 tp2 sp zero1"};
    compare_named(room, LLAMA, 4, names, 2);
}

/* Each microbatch that finds no room is done again, not the last one alone. */
DIST_TEST(accumulation_without_room) {
    static const char *const names[] = {"ep2 rows without a place"};
    compare_named(room, GPT_MOE, 4, names, 1);
}

/* A mesh axis' list of some axes in some order. */
static void draw_list(ml_text *out, uint64_t *state, const char *const *names, int count) {
    const char *order[16];
    for (int i = 0; i < count; i++) order[i] = names[i];
    for (int i = count - 1; i > 0; i--) {
        int j = (int)test_range(state, 0, i);
        const char *kept = order[i];
        order[i] = order[j];
        order[j] = kept;
    }
    int taken = (int)test_range(state, 0, count);
    for (int i = 0; i < taken; i++) ml_text_add(out, "'%s', ", order[i]);
}

/* A layout of 2, 4 or 8 ranks on one to three mesh axes, of which one may be a pipeline. */
static layout_case draw_layout(process_room *room, uint64_t seed) {
    static const char *const params[] = {"embed", "heads", "kv_heads", "ffn", "vocab", "head_dim"};
    static const char *const acts[] = {"batch", "seq",   "heads", "kv_heads",
                                       "ffn",   "vocab", "embed", "kv_seq"};
    uint64_t state = seed * 7919 + 1;
    int doublings = (int)test_range(&state, 1, 3), axes = (int)test_range(&state, 1, doublings);
    ml_text mesh = {.arena = room->arena}, p = mesh, a = mesh, flat = mesh, stages = mesh;
    int pipeline = (int)test_range(&state, 0, 2 * axes); /* most often none */
    ml_text_add(&flat, "%s", "");
    ml_text_add(&stages, "%s", "");
    for (int i = 0; i < axes; i++) {
        int size = i + 1 < axes ? 2 : 2 << (doublings - axes);
        ml_text_add(&mesh, "{'m%d', %d}, ", i, size);
        if (i == pipeline && size == LAYERS) {
            static const char *const kinds[] = {"1f1b", "zero-bubble"};
            ml_text_add(&stages, "m%d = 'layers', microbatches = %d, schedule = '%s'", i,
                        1 << test_range(&state, 0, 2), kinds[test_range(&state, 0, 1)]);
            continue;
        }
        ml_text_add(&p, "m%d = {", i);
        draw_list(&p, &state, params, 6);
        ml_text_add(&p, "}, ");
        ml_text_add(&a, "m%d = {", i);
        draw_list(&a, &state, acts, 8);
        ml_text_add(&a, "}, ");
        if (test_range(&state, 0, 3) == 0) ml_text_add(&flat, "m%d = 'flat', ", i);
    }
    return (layout_case){ml_arena_format(room->arena, "draw %llu", (unsigned long long)seed), DENSE,
                         1 << doublings,
                         ml_arena_format(room->arena,
                                         "m.layout { mesh = { %s}, params = { %s}, acts = { %s}, "
                                         "state = { %s}, stages = { %s } }",
                                         mesh.text, p.text ? p.text : "", a.text ? a.text : "",
                                         flat.text, stages.text)};
}

/* Whether it divides the model; where it does not, that is what is said. */
static bool divides(process_room *room, const run *r) {
    write_runs(room, r, 1);
    process_result checked = process_run(room, PROCESS_ANY_CODE, "RUNS=runs.txt",
                                         "check --device cpu " SCRIPT " embed=32 heads=4 seq=16 "
                                         "vocab=256");
    EXPECT(!(checked.code != 0 && !strstr(checked.output, "cannot split \"")), "%s: %s\n%s",
           r->layout->name, r->layout->layout, checked.output);
    return checked.code == 0;
}

/* One hundred layouts at random; DIST_SEED is the first and DIST_DRAWS how many. */
DIST_TEST(drawn_layouts) {
    if (!test_all()) test_skip("100 layouts take minutes: make test-dist");
    comparison *c = new_comparison(room);
    uint64_t first = getenv("DIST_SEED") ? strtoull(getenv("DIST_SEED"), NULL, 10) : 1;
    int fitting = 0, wanted = getenv("DIST_DRAWS") ? atoi(getenv("DIST_DRAWS")) : 100;
    for (uint64_t seed = first; fitting < wanted && seed < first + 400; seed++) {
        layout_case drawn = draw_layout(room, seed);
        run r = run_of(&drawn, LLAMA, 1);
        if (!divides(room, &r)) continue;
        fitting++;
        compare_all(c, &r, 1);
    }
    CHECK_EQ_INT(fitting, wanted);
}

/* 3 divides no axis of a parameter: the parts of optimizer states are filled up. */
DIST_TEST(zero1_over_three) {
    static const char *const runs[][2] = {{"gpt", "-n 3 --mesh dp=3"},
                                          {"gpt", "-n 6 --mesh dp=3,pp=2 accum=4"},
                                          {"llama", "-n 6 --mesh dp=3,tp=2 accum=2"},
                                          {"gpt_moe", "-n 6 --mesh dp=3,ep=2"}};
    for (size_t i = 0; i < sizeof runs / sizeof *runs; i++) {
        char *one = ml_arena_format(room->arena,
                                    "\"$ROOT/models/%s.lua\" --dtype f32 layers=2 embed=32 "
                                    "heads=4 seq=16 batch=12 sample=0 warmup=1 lr=3e-3",
                                    runs[i][0]);
        char *all = ml_arena_format(room->arena, "%s %s", one, runs[i][1]);
        process_compare(process_train(room, 5, "MLUA_VERIFY=1", all),
                        process_train(room, 5, "MLUA_VERIFY=1", one), 5, 1e-5, runs[i][1]);
    }
}

/* DIST_NAMES="dp2;tp2 sp": these alone; DIST_SKIP=llama: a model that is left out. */
static bool named(const layout_case *c) {
    const char *names = getenv("DIST_NAMES");
    size_t length = strlen(c->name);
    for (const char *at = names; at && *at;) {
        size_t part = strcspn(at, ";");
        if (part == length && memcmp(at, c->name, part) == 0) return true;
        at += part + (at[part] == ';');
    }
    return names == NULL;
}

static void check_names(process_room *room) {
    for (const char *at = asked("DIST_NAMES", ""); *at;) {
        size_t part = strcspn(at, ";");
        find(ml_arena_copy(room->arena, at, part));
        at += part + (at[part] == ';');
    }
}

/* DIST_RANKS=4 or DIST_RANKS=1-4: layouts of so many ranks alone. */
static bool of_the_size(const layout_case *c) {
    int least = 1, most = 1 << 20;
    int read = sscanf(asked("DIST_RANKS", ""), "%d-%d", &least, &most);
    if (read == 1) most = least;
    return c->ranks >= least && c->ranks <= most;
}

/* The runs of this process in a turn. In the first one every layout has its turn with one of its
 * models and accumulations, which change from layout to layout; in the others, with what is left.
 */
static int list_turn(int turn, int *taken, run *list) {
    int part = 1, parts = 1, only = atoi(asked("DIST_ACCUM", "0")), count = 0;
    (void)sscanf(asked("DIST_PART", ""), "%d/%d", &part, &parts);
    for (int i = 0; i < CASES; i++) {
        run ways[MODELS * 2];
        int found = 0;
        if (!of_the_size(&cases[i]) || !named(&cases[i])) continue;
        for (int k = 0; k < MODELS * 2; k++) {
            run r = run_of(&cases[i], (model_kind)(k / 2), k % 2 ? MOST_ACCUM : 1);
            bool skipped = strcmp(asked("DIST_SKIP", ""), model_names[r.model]) == 0;
            if (cases[i].models >> r.model & 1 && !skipped && (!only || r.accum == only))
                ways[found++] = r;
        }
        if (turn < found && (*taken)++ % parts == part - 1)
            list[count++] = ways[(i + turn) % found];
    }
    return count;
}

/* All of them; `make test-dist`. DIST_PART=2/5: every fifth run, the second one of five first, so
 * that five processes do all; DIST_ACCUM=1: that accumulation alone; DIST_TURNS=1: each layout
 * once. What is compared early is of all kinds: a process that is stopped has seen them. */
DIST_TEST(every_layout) {
    if (!test_all()) test_skip("%d layouts take minutes: make test-dist", CASES);
    int turns = atoi(asked("DIST_TURNS", "0")), taken = 0;
    comparison *c = new_comparison(room);
    check_names(room);
    worst = worst_gradient = 0;
    for (int turn = 0; turn < (turns ? turns : MODELS * 2); turn++) {
        run *list = ML_NEW_ARRAY(room->arena, run, CASES);
        compare_all(c, list, list_turn(turn, &taken, list));
    }
    printf("%d runs of %d layouts; worst deviation of loss or gradient norm: %.2g, of a gradient: "
           "%.2g\n",
           c->compared, CASES, worst, worst_gradient);
}
