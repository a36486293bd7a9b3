/* Whole models under many layouts, on CPU ranks: what they learn is what one rank learns. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/process_support.h"

enum { STEPS = 5, LAYERS = 2, MOST_LAYERS = 8 };
#define SCRIPT "\"$ROOT/tests/lua/lib/dist.lua\""

typedef enum { GPT = 1, LLAMA = 2, GPT_MOE = 4, DENSE = GPT | LLAMA } models;
enum { MODELS = 3 };
static const char *const model_names[MODELS] = {"gpt", "llama", "gpt_moe"};

/* A line for each layout. */
typedef struct {
    const char *name;
    models models;
    int ranks;
    const char *layout; /* a Lua expression */
    int layers;         /* 0: as few as will do */
} layout_case;

#define TP "'heads', 'kv_heads', 'ffn', 'vocab'"
static const layout_case cases[] = {
    {"dp2", DENSE | GPT_MOE, 2, "m.layout.ddp { dp = 2 }"},
    {"dp4", DENSE, 4, "m.layout.ddp { dp = 4 }"},
    {"dp8", DENSE, 8, "m.layout.ddp { dp = 8 }"},
    {"zero1 dp2", DENSE, 2, "m.layout.ddp { dp = 2, zero = true }"},
    {"zero1 dp2 of the optimizer alone", DENSE, 2,
     "m.layout { mesh = { {'dp', 2} }, acts = { dp = {'batch'} }, state = { dp = 'flat' } }"},
    {"dp2 tp2 sp zero1 kept", DENSE, 4,
     "m.layout.megatron { dp = 2, tp = 2, sp = true, zero = true, reshard = false }"},
    {"zero1 dp4", DENSE | GPT_MOE, 4, "m.layout.ddp { dp = 4, zero = true }"},
    {"zero1 dp8", DENSE, 8, "m.layout.ddp { dp = 8, zero = true }"},
    {"fsdp2", DENSE, 2, "m.layout.fsdp { dp = 2 }"},
    {"fsdp4", DENSE | GPT_MOE, 4, "m.layout.fsdp { dp = 4 }"},
    {"fsdp8", DENSE, 8, "m.layout.fsdp { dp = 8 }"},
    {"fsdp2 kept", DENSE, 2, "m.layout.fsdp { dp = 2, reshard = false }"},
    {"fsdp4 kept", DENSE | GPT_MOE, 4, "m.layout.fsdp { dp = 4, reshard = false }"},
    {"fsdp2 tp2 sp kept", DENSE, 4, "m.layout.fsdp { dp = 2, tp = 2, sp = true, reshard = false }"},
    {"tp2", DENSE, 2, "m.layout.megatron { tp = 2 }"},
    {"tp4", DENSE, 4, "m.layout.megatron { tp = 4 }"},
    {"tp2 sp", DENSE | GPT_MOE, 2, "m.layout.megatron { tp = 2, sp = true }"},
    {"tp4 sp", DENSE, 4, "m.layout.megatron { tp = 4, sp = true }"},
    {"tp2 sp kept", DENSE | GPT_MOE, 2, "m.layout.megatron { tp = 2, sp = true, reshard = false }"},
    {"cp2 kept", DENSE, 2, "m.layout.megatron { cp = 2, reshard = false }"},
    {"dp4 tp2 sp zero1", DENSE, 8, "m.layout.megatron { dp = 4, tp = 2, sp = true, zero = true }"},
    {"dp2 tp2", DENSE, 4, "m.layout.megatron { dp = 2, tp = 2 }"},
    {"dp4 tp2", DENSE, 8, "m.layout.megatron { dp = 4, tp = 2 }"},
    {"dp2 tp4 sp", DENSE, 8, "m.layout.megatron { dp = 2, tp = 4, sp = true }"},
    {"dp2 tp2 sp zero1", DENSE, 4, "m.layout.megatron { dp = 2, tp = 2, sp = true, zero = true }"},
    {"dp4 tp2 zero1", DENSE, 8, "m.layout.megatron { dp = 4, tp = 2, zero = true }"},
    {"fsdp2 tp2", DENSE, 4, "m.layout.fsdp { dp = 2, tp = 2 }"},
    {"fsdp4 tp2 sp", DENSE, 8, "m.layout.fsdp { dp = 4, tp = 2, sp = true }"},
    {"cp2 gathered", DENSE | GPT_MOE, 2, "m.layout.megatron { cp = 2 }"},
    {"cp4 gathered", DENSE, 4, "m.layout.megatron { cp = 4 }"},
    {"cp2 exchanged", DENSE, 2, "m.layout.megatron { cp = 2, context = 'exchanged' }"},
    {"cp4 exchanged", DENSE, 4, "m.layout.megatron { cp = 4, context = 'exchanged' }"},
    {"cp2 ring", DENSE, 2, "m.layout.megatron { cp = 2, context = 'ring' }"},
    {"cp4 ring", DENSE, 4, "m.layout.megatron { cp = 4, context = 'ring' }"},
    {"dp2 cp2", DENSE, 4, "m.layout.megatron { dp = 2, cp = 2 }"},
    {"dp2 cp2 exchanged tp2", DENSE, 8,
     "m.layout.megatron { dp = 2, cp = 2, tp = 2, context = 'exchanged' }"},
    {"dp2 cp2 ring zero1", DENSE, 4,
     "m.layout.megatron { dp = 2, cp = 2, context = 'ring', zero = true }"},
    {"dp2 cp2 ring tp2", DENSE, 8,
     "m.layout.megatron { dp = 2, cp = 2, tp = 2, context = 'ring' }"},
    {"dp2 cp2 tp2 sp", DENSE, 8, "m.layout.megatron { dp = 2, cp = 2, tp = 2, sp = true }"},
    {"fsdp2 cp2 tp2", DENSE, 8, "m.layout.fsdp { dp = 2, cp = 2, tp = 2 }"},
    {"dp2 over two mesh axes", DENSE, 4,
     "m.layout { mesh = { {'a', 2}, {'b', 2} }, acts = { a = {'batch'}, b = {'batch'} } }"},
    {"hybrid: fsdp2 in dp2", DENSE, 4,
     "m.layout { mesh = { {'dp', 2}, {'fsdp', 2} }, params = { fsdp = {'embed'} }, "
     "acts = { dp = {'batch'}, fsdp = {'batch'} } }"},
    {"hybrid with zero1", DENSE, 4,
     "m.layout { mesh = { {'dp', 2}, {'fsdp', 2} }, params = { fsdp = {'embed'} }, "
     "acts = { dp = {'batch'}, fsdp = {'batch'} }, state = { dp = 'flat' } }"},
    {"tp2 outside of dp2", DENSE, 4,
     "m.layout { mesh = { {'tp', 2}, {'dp', 2} }, params = { tp = {" TP "} }, "
     "acts = { tp = {" TP "}, dp = {'batch'} } }"},
    {"tp2 outside of zero1 dp2", DENSE, 4,
     "m.layout { mesh = { {'tp', 2}, {'dp', 2} }, params = { tp = {" TP "} }, "
     "acts = { tp = {" TP "}, dp = {'batch'} }, state = { dp = 'flat' } }"},
    {"flat over dp and cp", DENSE, 4,
     "m.layout { mesh = { {'dp', 2}, {'cp', 2} }, acts = { dp = {'batch'}, cp = {'seq'} }, "
     "state = { dp = 'flat', cp = 'flat' } }"},
    {"vocab alone", DENSE, 4,
     "m.layout { mesh = { {'tp', 4} }, params = { tp = {'vocab'} }, acts = { tp = {'vocab'} } }"},
    {"ffn alone", DENSE, 4,
     "m.layout { mesh = { {'tp', 4} }, params = { tp = {'ffn'} }, acts = { tp = {'ffn'} } }"},
    {"embed split too", DENSE, 2,
     "m.layout { mesh = { {'x', 2} }, params = { x = {'embed'} }, acts = { x = {'embed'} } }"},
    {"embed over two mesh axes", DENSE, 4,
     "m.layout { mesh = { {'dp', 2}, {'x', 2} }, params = { dp = {'embed'}, x = {'embed'} }, "
     "acts = { dp = {'batch'}, x = {'batch'} } }"},
    {"seq of data parallel ranks", DENSE, 2,
     "m.layout { mesh = { {'dp', 2} }, acts = { dp = {'seq', 'batch'} } }"},
    {"parameters split, activations not", DENSE, 2,
     "m.layout { mesh = { {'x', 2} }, params = { x = {" TP "} } }"},
    {"all ranks alike", DENSE | GPT_MOE, 2, "m.layout { mesh = { {'x', 2} } }"},
    {"ep2", GPT_MOE, 2, "m.layout.megatron { ep = 2 }"},
    {"ep4 zero1", GPT_MOE, 4, "m.layout.megatron { ep = 4, zero = true }"},
    {"dp2 ep2 fsdp", GPT_MOE, 4, "m.layout.fsdp { dp = 2, ep = 2 }"},
    {"dp2 ep2 zero1", GPT_MOE, 4, "m.layout.megatron { dp = 2, ep = 2, zero = true }"},
    {"ep2 tp2", GPT_MOE, 4, "m.layout.megatron { ep = 2, tp = 2 }"},
    {"ep4 tp2 sp", GPT_MOE, 8, "m.layout.megatron { ep = 4, tp = 2, sp = true }"},
    {"ep2 cp2", GPT_MOE, 4, "m.layout.megatron { ep = 2, cp = 2 }"},
    {"ep2 rows sent", GPT_MOE, 2, "m.layout.megatron { ep = 2, exchange = 2 }"},
    {"ep2 rows without a place", GPT_MOE, 2, "m.layout.megatron { ep = 2, exchange = 0.75 }"},
    {"ep4 tp2 sp rows sent", GPT_MOE, 8,
     "m.layout.megatron { ep = 4, tp = 2, sp = true, exchange = 4 }"},
    {"dp2 ep2 fsdp rows sent", GPT_MOE, 4, "m.layout.fsdp { dp = 2, ep = 2, exchange = 2 }"},
    {"pp2 ep2 rows sent", GPT_MOE, 4,
     "m.layout.megatron { pp = 2, ep = 2, exchange = 2, microbatches = 2 }"},
    {"experts over dp", GPT_MOE, 2,
     "m.layout { mesh = { {'dp', 2} }, params = { dp = {'experts'} }, "
     "acts = { dp = {'batch', 'experts'} } }"},
    {"experts over tp", GPT_MOE, 2,
     "m.layout { mesh = { {'tp', 2} }, params = { tp = {'experts', 'heads', 'vocab'} }, "
     "acts = { tp = {'experts', 'heads', 'vocab'} } }"},
    {"pp2", DENSE | GPT_MOE, 2, "m.layout.megatron { pp = 2, microbatches = 2 }"},
    {"pp2 at once", DENSE, 2, "m.layout.megatron { pp = 2, microbatches = 1 }"},
    {"pp4", DENSE, 4, "m.layout.megatron { pp = 4, microbatches = 4 }", 4},
    {"pp4 of 7 layers", DENSE, 4, "m.layout.megatron { pp = 4, microbatches = 8 }", 7},
    {"pp2 of 7 layers", DENSE, 2, "m.layout.megatron { pp = 2, microbatches = 4 }", 7},
    {"pp8", DENSE, 8, "m.layout.megatron { pp = 8, microbatches = 8 }", 8},
    {"pp2 interleaved", DENSE | GPT_MOE, 2,
     "m.layout.megatron { pp = 2, schedule = 'interleaved', microbatches = 4 }", 4},
    {"pp4 interleaved dp2", DENSE, 8,
     "m.layout.megatron { pp = 4, dp = 2, schedule = 'interleaved', microbatches = 4 }", 8},
    {"pp2 three chunks", DENSE, 2,
     "m.layout.megatron { pp = 2, schedule = 'interleaved', chunks = 3, microbatches = 4 }", 7},
    {"pp4 zero-bubble", DENSE, 4,
     "m.layout.megatron { pp = 4, schedule = 'zero-bubble', microbatches = 8 }", 4},
    {"pp2 dp2 zero-bubble zero1", DENSE | GPT_MOE, 4,
     "m.layout.megatron { pp = 2, dp = 2, zero = true, schedule = 'zero-bubble', "
     "microbatches = 4 }"},
    {"dp2 tp2 pp2", DENSE, 8, "m.layout.megatron { dp = 2, tp = 2, pp = 2, microbatches = 4 }"},
    {"dp2 tp2 pp2 sp zero1", DENSE, 8,
     "m.layout.megatron { dp = 2, tp = 2, pp = 2, sp = true, zero = true, microbatches = 2 }"},
    {"cp2 pp2 tp2", DENSE, 8, "m.layout.megatron { cp = 2, pp = 2, tp = 2, microbatches = 2 }"},
    {"cp2 ring pp2 tp2 sp", DENSE, 8,
     "m.layout.megatron { cp = 2, context = 'ring', pp = 2, tp = 2, sp = true, "
     "microbatches = 4 }"},
    {"fsdp2 pp2", DENSE | GPT_MOE, 4, "m.layout.fsdp { dp = 2, pp = 2, microbatches = 2 }"},
    {"pp2 inside of dp2", DENSE, 4,
     "m.layout { mesh = { {'dp', 2}, {'pp', 2} }, acts = { dp = {'batch'} }, "
     "stages = { pp = 'blocks', microbatches = 4 } }"},
    {"ep2 pp2 tp2", GPT_MOE, 8, "m.layout.megatron { ep = 2, pp = 2, tp = 2, microbatches = 2 }"},
};
enum { CASES = sizeof cases / sizeof *cases };

/* Of the models, at a size that all layouts divide. */
static const char *settings_of(const char *model) {
    if (strcmp(model, "llama") == 0) return "kv_heads=4 ffn=64";
    if (strcmp(model, "gpt_moe") == 0) return "kv_heads=2 ffn=32 experts=8";
    return "";
}

typedef struct {
    char *weights, *gradients; /* the lines; gradients are empty in the first run */
    double loss[STEPS], norm[STEPS];
    bool again; /* a step without places for all rows was done again */
    double seconds;
} learned;

static double number(const char *line, const char *key) {
    const char *at = strstr(line, key);
    REQUIRE(at != NULL);
    return strtod(at + strlen(key), NULL);
}

static bool all_asked(void) {
    return getenv("DIST_ALL") != NULL;
}

/* DIST_DEVICE=cuda DIST_DTYPE=bf16 DIST_BOUND=2e-2: on GPUs (tests/gpu_dist.sh), and how far off
 * results may be. */
static const char *asked(const char *variable, const char *otherwise) {
    const char *value = getenv(variable);
    return value ? value : otherwise;
}

static double bound(void) {
    return strtod(asked("DIST_BOUND", "1e-5"), NULL);
}

/* The lines about gradients. */
static char *gradient_lines(process_room *room, const char *output) {
    const char *first = strstr(output, "gradient "), *end = first;
    while (end && strncmp(end, "gradient ", 9) == 0) end = strchr(end, '\n') + 1;
    return first ? ml_arena_copy(room->arena, first, (size_t)(end - first)) : "";
}

/* What one run has printed: out of all that a process has, from the line "run N" to the next. */
static learned read_run(process_room *room, const char *output, int run) {
    learned out = {.weights = "none"};
    const char *from = strstr(output, ml_arena_format(room->arena, "run %d\n", run));
    if (!from) ml_raise(ML_INTERNAL, "no run %d in\n%s", run, output);
    const char *next = strstr(from, ml_arena_format(room->arena, "\nrun %d\n", run + 1));
    size_t length = next ? (size_t)(next + 1 - from) : strlen(from);
    const char *text = ml_arena_copy(room->arena, from, length);
    const char *line = strstr(text, "weights ");
    if (line) out.weights = ml_arena_copy(room->arena, line, strcspn(line, "\n"));
    out.gradients = gradient_lines(room, text);
    for (int i = 0; i < STEPS; i++) {
        line = strstr(text, ml_arena_format(room->arena, "{\"step\":%d,", i + 1));
        if (!line) ml_raise(ML_INTERNAL, "run %d: no step %d in\n%s", run, i + 1, output);
        out.loss[i] = number(line, "\"loss\":");
        out.norm[i] = number(line, "\"grad_norm\":");
    }
    return out;
}

/* Under several layouts of as many ranks and layers, one after the other in the same processes; or
 * on one rank, where there are none. Microbatches have 8 samples: all layouts divide them. One rank
 * keeps the gradients in a file, with which others compare theirs. */
static void train(process_room *room, const char *model, int accum, int layers,
                  const layout_case *const *c, int count, learned *out) {
    char *environment = ml_arena_format(room->arena, "MLUA_VERIFY=1 GRADIENTS=%s.%d.%d MODEL=%s",
                                        model, accum, layers, model);
    if (count) {
        ml_text lines = {.arena = room->arena};
        for (int i = 0; i < count; i++) ml_text_add(&lines, "%s\n", c[i]->layout);
        process_write(room, "layouts.txt", lines.text);
        environment =
            ml_arena_format(room->arena, "%s LAYOUTS=layouts.txt MLUA_RUNS=%d", environment, count);
    }
    /* In f64 no rounding sends a token to another expert. */
    const char *dtype = strcmp(model, "gpt_moe") == 0 ? "f64" : asked("DIST_DTYPE", "f32");
    process_result r = process_run(room, 0, environment,
                                   "run --device %s --dtype %s --json -n %d " SCRIPT
                                   " layers=%d embed=32 heads=4 %s seq=16 "
                                   "batch=%d vocab=256 sample=0 warmup=1 lr=3e-3 accum=%d steps=%d",
                                   asked("DIST_DEVICE", "cpu"), dtype, count ? c[0]->ranks : 1,
                                   layers, settings_of(model), 8 * accum, accum, STEPS);
    for (int i = 0; i < (count ? count : 1); i++) {
        out[i] = read_run(room, r.output, i + 1);
        out[i].again = strstr(r.output, "are done again with gathered weights") != NULL;
        out[i].seconds = r.seconds / (count ? count : 1);
    }
}

static learned train_one(process_room *room, const char *model, int accum, int layers) {
    learned one;
    train(room, model, accum, layers ? layers : LAYERS, NULL, 0, &one);
    return one;
}

static double deviation(double a, double b) {
    return fabs(a - b) / fabs(b);
}

/* Of which some steps must be done again. */
static bool without_place(const layout_case *c) {
    return strstr(c->name, "without a place") != NULL;
}

static double worst, worst_gradient; /* of all layouts of this run */

static double largest_norm(const char *lines) {
    double largest = 0, norm;
    for (; *lines; lines = strchr(lines, '\n') + 1)
        if (sscanf(lines, "gradient %*s %*f %lf", &norm) == 1) largest = fmax(largest, norm);
    return largest;
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
        worst_gradient = fmax(worst_gradient, off);
        if (!(off <= bound()))
            test_fail("%s: the gradient of %s is off by %.3g of its norm", what, name, off);
    }
}

static void compare(const char *model, int accum, const learned *one, const layout_case *c,
                    const learned *many) {
    if (strcmp(many->weights, one->weights) != 0)
        test_fail("%s, %s: initial %s, not %s", model, c->name, many->weights, one->weights);
    check_gradients(c->name, many->gradients);
    CHECK_EQ_INT(many->again, without_place(c));
    for (int i = 0; i < STEPS; i++) {
        double loss = deviation(many->loss[i], one->loss[i]);
        double norm = deviation(many->norm[i], one->norm[i]);
        worst = fmax(worst, fmax(loss, norm));
        if (!(loss <= bound()) || !(norm <= bound()))
            test_fail("%s, %s, accum %d: step %d has loss %.9g and norm %.9g, not %.9g and %.9g",
                      model, c->name, accum, i + 1, many->loss[i], many->norm[i], one->loss[i],
                      one->norm[i]);
    }
    if (!all_asked()) return;
    printf("%s, %s, accumulation %d: %.1f s\n", model, c->name, accum, many->seconds);
    fflush(stdout); /* shown by a process that is stopped, too */
}

static bool staged(const layout_case *c) {
    return strncmp(c->name, "pp", 2) == 0 || strstr(c->name, " pp") != NULL;
}

/* Those that can be trained by the processes that train the first one, which are taken out of the
 * list. NCCL reads once in a process whether it keeps the order of calls, which it must not under
 * pipeline stages. */
static int alike(const layout_case **list, int *count, const layout_case **taken) {
    const layout_case *first = list[0];
    int left = 0, found = 0;
    for (int i = 0; i < *count; i++) {
        const layout_case *c = list[i];
        bool together = c == first ||
                        (c->ranks == first->ranks && c->layers == first->layers &&
                         staged(c) == staged(first) && !without_place(c) && !without_place(first));
        if (together)
            taken[found++] = c;
        else
            list[left++] = c;
    }
    *count = left;
    return found;
}

/* Against one rank, of which there are results by the number of layers. */
static void compare_all(process_room *room, const char *model, int accum, const layout_case **list,
                        int count) {
    learned one[MOST_LAYERS + 1] = {0},
                              *many = ml_arena_alloc(room->arena, sizeof(learned) * CASES);
    const layout_case **taken = ml_arena_alloc(room->arena, sizeof *taken * CASES);
    while (count) {
        int found = alike(list, &count, taken);
        int layers = taken[0]->layers ? taken[0]->layers : LAYERS;
        if (!one[layers].weights) {
            one[layers] = train_one(room, model, accum, layers);
            CHECK(one[layers].loss[STEPS - 1] < one[layers].loss[0]);
        }
        train(room, model, accum, layers, taken, found, many);
        for (int i = 0; i < found; i++) compare(model, accum, &one[layers], taken[i], &many[i]);
    }
}

static const layout_case *find(const char *name) {
    for (int i = 0; i < CASES; i++)
        if (strcmp(cases[i].name, name) == 0) return &cases[i];
    test_stop(name, __FILE__, __LINE__);
}

static void compare_named(process_room *room, const char *model, int accum,
                          const char *const *names, int count) {
    const layout_case *list[CASES];
    for (int i = 0; i < count; i++) list[i] = find(names[i]);
    compare_all(room, model, accum, list, count);
}

#define DIST_TEST(name)                                                                            \
    static void dist_##name(process_room *room);                                                   \
    TEST(dist, name) {                                                                             \
        process_in_room(dist_##name);                                                              \
    }                                                                                              \
    static void dist_##name(process_room *room)

DIST_TEST(gpt) {
    static const char *const names[] = {"dp2", "fsdp2", "fsdp2 kept", "tp2 sp", "dp2 tp2 sp zero1"};
    compare_named(room, "gpt", 1, names, 5);
}

DIST_TEST(llama) {
    static const char *const names[] = {"zero1 dp2", "cp2 gathered", "dp2 cp2 tp2 sp"};
    compare_named(room, "llama", 1, names, 3);
}

DIST_TEST(experts) {
    static const char *const names[] = {"ep2", "dp2 ep2 fsdp", "ep2 rows sent",
                                        "ep2 rows without a place"};
    compare_named(room, "gpt_moe", 1, names, 4);
}

/* Fewer key heads than ranks are refused while they are to be split, and right when they are not.
 */
DIST_TEST(few_key_heads) {
    static const char few[] = "layers=1 embed=32 heads=4 kv_heads=2 ffn=64 seq=16 batch=8 vocab=256"
                              " sample=0 steps=2 warmup=1";
    static const char layout[] =
        "LAYOUT=\"m.layout { mesh = { {'tp', 4} }, params = { tp = {'heads', 'ffn', 'vocab'} }, "
        "acts = { tp = {'heads', 'ffn', 'vocab'} } }\"";
    process_result r = process_run(
        room, 1, "", "run --device cpu -n 4 --mesh tp=4 \"$ROOT/models/llama.lua\" %s", few);
    process_expect(&r, "cannot split \"kv_heads\"");
    process_expect(&r, "leave \"kv_heads\" out of what tp splits");
    process_result one =
        process_run(room, 0, "MODEL=llama", "run --device cpu --json " SCRIPT " %s", few);
    process_result four =
        process_run(room, 0, ml_arena_format(room->arena, "MODEL=llama %s", layout),
                    "run --device cpu --json -n 4 " SCRIPT " %s", few);
    double expected = number(strstr(one.output, "{\"step\":2"), "\"loss\":");
    double actual = number(strstr(four.output, "{\"step\":2"), "\"loss\":");
    CHECK(deviation(actual, expected) <= 1e-5);
}

DIST_TEST(stages) {
    static const char *const two[] = {"pp2", "pp2 dp2 zero-bubble zero1", "cp2 ring pp2 tp2 sp"};
    static const char *const seven[] = {"pp4 of 7 layers", "pp2 three chunks"};
    compare_named(room, "gpt", 1, two, 3);
    compare_named(room, "llama", 1, seven, 2);
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

DIST_TEST(accumulation) {
    static const char *const names[] = {"fsdp2 tp2", "dp2 tp2 sp zero1"};
    compare_named(room, "llama", 4, names, 2);
}

/* Each microbatch that finds no room is done again, not the last one alone. */
DIST_TEST(accumulation_without_room) {
    static const char *const names[] = {"ep2 rows without a place"};
    compare_named(room, "gpt_moe", 4, names, 1);
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
    return (layout_case){ml_arena_format(room->arena, "draw %llu", (unsigned long long)seed), LLAMA,
                         1 << doublings,
                         ml_arena_format(room->arena,
                                         "m.layout { mesh = { %s}, params = { %s}, acts = { %s}, "
                                         "state = { %s}, stages = { %s } }",
                                         mesh.text, p.text ? p.text : "", a.text ? a.text : "",
                                         flat.text, stages.text)};
}

/* One hundred layouts that nobody chose; DIST_SEED is the first and DIST_DRAWS how many. Those that
 * do not divide must say so. */
DIST_TEST(drawn_layouts) {
    if (!all_asked()) return;
    learned one = train_one(room, "llama", 1, LAYERS), many;
    uint64_t first = getenv("DIST_SEED") ? strtoull(getenv("DIST_SEED"), NULL, 10) : 1;
    int fitting = 0, wanted = getenv("DIST_DRAWS") ? atoi(getenv("DIST_DRAWS")) : 100;
    for (uint64_t seed = first; fitting < wanted && seed < first + 400; seed++) {
        layout_case c = draw_layout(room, seed);
        process_result r =
            process_run(room, PROCESS_ANY_CODE,
                        ml_arena_format(room->arena, "MODEL=llama LAYOUT=\"%s\"", c.layout),
                        "check --device cpu " SCRIPT " layers=2 embed=32 heads=4 kv_heads=4 ffn=64 "
                        "seq=16 batch=8 "
                        "vocab=256");
        if (r.code == 0) {
            const layout_case *drawn = &c;
            fitting++;
            train(room, "llama", 1, LAYERS, &drawn, 1, &many);
            compare("llama", 1, &one, &c, &many);
        } else if (!strstr(r.output, "cannot split \"")) {
            test_fail("%s: %s\n%s", c.name, c.layout, r.output);
        }
    }
    CHECK_EQ_INT(fitting, wanted);
}

DIST_TEST(check_of_a_mesh) {
    process_result r = process_run(room, 0, "",
                                   "check \"$ROOT/models/gpt.lua\" layers=2 --device h200 "
                                   "--mesh dp=4,tp=2 --types");
    process_expect(&r, "ranks           8: pp=1 dp=4 cp=1 tp=2;");
    process_expect(&r, "collectives     of one rank, in one step");
    process_expect(&r, "largest redistributions");
    process_expect(&r, "i32[batch=16@dp, seq=256@tp]");
    process_expect(&r, "bf16[batch=16@dp, seq=256, embed=384] partial(tp)");
    /* Parameters that lie in parts are gathered once a step, not for each microbatch. */
    r = process_run(room, 0, "",
                    "check \"$ROOT/models/gpt.lua\" layers=2 --device h200 --mesh dp=4 accum=2");
    process_expect(&r, "x 2    all_gather over dp to bf16[embed=384, ffn=1536]");
    r = process_run(room, 0, "", "check --json \"$ROOT/models/gpt.lua\" layers=2 --mesh dp=4,tp=2");
    process_expect(&r, "\"mesh\":{\"pp\":1,\"dp\":4,\"cp\":1,\"tp\":2}");
    process_expect(&r, "\"redistributions\":[{\"kind\":");
    process_expect(&r, "\"whole_optimizer_bytes\":0");
    /* What the optimizer keeps counts as its own, though another program than the largest has it.
     */
    r = process_run(room, 0, "", "check --json \"$ROOT/models/gpt.lua\" layers=2 --mesh pp=2");
    double sum = 0;
    static const char *const kinds[] = {"parameters", "gradients", "optimizer", "activations",
                                        "workspace"};
    for (int i = 0; i < 5; i++)
        sum += number(strstr(r.output, "\"memory_bytes\":"),
                      ml_arena_format(room->arena, "\"%s\":", kinds[i]));
    CHECK(number(strstr(r.output, "\"memory_bytes\":"), "\"optimizer\":") > 0);
    CHECK(sum == number(r.output, "\"peak_bytes\":"));
    /* ZeRO-1 over 8 of tensors of which some have 12 and 251 elements an axis. */
    r = process_run(room, 0, "",
                    "check \"$ROOT/models/gpt.lua\" layers=1 embed=12 heads=3 seq=31 vocab=251 "
                    "batch=8 --mesh dp=8");
    process_expect(&r, "of the optimizer's are whole over an axis that is \"flat\"");
}

/* On a quiet machine 0.5 s; the bound leaves room for busy ones and for sanitizers. */
DIST_TEST(check_of_175_billion) {
    process_result r = process_run(room, 0, "",
                                   "check --json \"$ROOT/models/gpt.lua\" layout=fsdp layers=96 "
                                   "embed=12288 heads=96 seq=2048 batch=1536 vocab=51200 "
                                   "--device h200 --mesh dp=128,tp=8");
    process_expect(&r, "\"ranks\":1024");
    CHECK(r.seconds < 60);
}

/* 10^12 parameters on 3,072 ranks. On a quiet machine 1 s. What is whole of its gradients is one
 * layer's at a time: the peak is what activations and gathered weights need. */
DIST_TEST(check_of_a_trillion) {
    process_result r = process_run(room, 0, "",
                                   "check --json \"$ROOT/models/gpt.lua\" layout=fsdp layers=140 "
                                   "embed=24576 heads=192 seq=2048 batch=3072 vocab=51200 accum=8 "
                                   "--device h200 --mesh dp=384,tp=8");
    process_expect(&r, "\"ranks\":3072");
    CHECK(number(r.output, "\"parameters\":") > 1e12);
    CHECK(number(r.output, "\"gradients\":") < 8.0 * (1 << 30));
    CHECK(number(r.output, "\"peak_bytes\":") < 64.0 * (1 << 30));
    CHECK(r.cpu_seconds < 30);
}

/* Where links are far slower than computation, parameters are still put together only a little
 * ahead of their users: not those of all layers at once. */
DIST_TEST(gathers_of_slow_links) {
    static const char *const overlap[] = {"MLUA_OVERLAP=0", "MLUA_OVERLAP=1"};
    double peak[2];
    for (int i = 0; i < 2; i++) {
        process_result r =
            process_run(room, 0, overlap[i],
                        "check --json \"$ROOT/models/gpt.lua\" layout=fsdp layers=12 "
                        "embed=24576 heads=192 seq=2048 batch=3072 vocab=51200 "
                        "accum=8 --device h200 --mesh dp=384,tp=8");
        peak[i] = number(r.output, "\"peak_bytes\":");
    }
    CHECK(peak[0] > 0 && peak[1] < peak[0] + 2.0 * (1 << 30)); /* a layer's are 1.7 GiB */
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

/* DIST_RANKS=4 or DIST_RANKS=1-4: layouts of so many ranks alone. */
static bool of_the_size(const layout_case *c) {
    int least = 1, most = 1 << 20;
    int read = sscanf(asked("DIST_RANKS", ""), "%d-%d", &least, &most);
    if (read == 1) most = least;
    return c->ranks >= least && c->ranks <= most;
}

/* All of them; `make test-dist`. DIST_PART=2/5: every fifth, the second one of five first, so that
 * five processes do all; DIST_ACCUM=1: that accumulation alone. */
DIST_TEST(every_layout) {
    if (!all_asked()) return;
    int part = 1, parts = 1, count = 0, turn = 0;
    (void)sscanf(asked("DIST_PART", ""), "%d/%d", &part, &parts);
    int only = atoi(asked("DIST_ACCUM", "0"));
    worst = worst_gradient = 0;
    for (int model = 0; model < MODELS; model++)
        for (int accum = 1; accum <= 4; accum += 3) {
            const layout_case *list[CASES];
            int wanted = 0;
            if (only && accum != only) continue;
            for (int i = 0; i < CASES; i++) {
                if (!(cases[i].models >> model & 1) || !of_the_size(&cases[i])) continue;
                if (!named(&cases[i]) || strcmp(asked("DIST_SKIP", ""), model_names[model]) == 0)
                    continue;
                if (turn++ % parts == part - 1) list[wanted++] = &cases[i];
            }
            compare_all(room, model_names[model], accum, list, wanted);
            count += wanted;
        }
    printf("%d runs of %d layouts; worst deviation of loss or gradient norm: %.2g, of a gradient: "
           "%.2g\n",
           count, CASES, worst, worst_gradient);
}
