/* Linear scans on the GPU: their results and gradients against the reference's loop, and their
 * times beside what their bytes take at 4.2 TB/s (each operand read, each result written once).
 * BENCH=1 build/test --gpu -v -j 0 gpu_linear_scan fails where forward and backward of the first
 * shape are below LEAST of it; BENCH=tiny: to try the test alone. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/device/profile.h"
#include "runtime/ops/linear_scan/linear_scan.h"
#include "tests/gpu/bench.h"
#include "tests/ops/support.h"

/* ---- Results */

typedef struct {
    const char *q, *v, *a, *state;
    bool after, reverse;
    ml_dtype dtype;
    double low;
} shape;
static const shape shapes[] = {
    {"b2 s300 h3 k128", "b2 s300 h3 v128", "b2 s300 h3", "b2 h3 k128 v128", true, false, ML_BF16,
     0.75},
    {"s200 k64", "s200 h5 v64", "s200 h5", "h5 k64 v64", true, true, ML_F32, -1},
    {"h2 s129 k128", "h2 s129 v256", "h2 s129", "h2 k128 v256", false, false, ML_BF16, 0},
    {"s70 h2 k16", "s70 h2 v40", "h2 s70", "h2 v40 k16", false, true, ML_F32, 0.5},
};

static void scan_of(const ops_case *c, const shape *s, ml_linear_scan *out) {
    ops_case *any = (ops_case *)c;
    *out = (ml_linear_scan){.axis = ops_axis(any, "s"),
                            .keys = ops_axis(any, "k"),
                            .values = ops_axis(any, "v"),
                            .reverse = s->reverse,
                            .after = s->after,
                            .dtype = s->dtype};
}

static void check_shape(ops_case *c, const shape *s) {
    enum { SOURCES = 5 };
    const double tolerance = 2e-2;
    ml_ref sources[SOURCES] = {
        ops_input(c, ML_BF16, s->q, -1, 1), ops_input(c, ML_BF16, s->q, -1, 1),
        ops_input(c, ML_BF16, s->v, -1, 1), ops_input(c, ML_F32, s->a, s->low, 1),
        ops_input(c, ML_F32, s->state, -1, 1)};
    ml_linear_scan scan;
    scan_of(c, s, &scan);
    ml_ref y = ml_linear_scan_new(c->g, sources, &scan), last = ml_out(c->g, y, 1);
    ops_output(c, y, tolerance, "y");
    ops_output(c, last, tolerance, "the last state");
    ml_ref loss = ml_map2(c->g, ML_OP_ADD, ops_loss(c, y), ops_loss(c, last));
    ml_ref gradients[SOURCES];
    ml_autodiff(c->g, loss, sources, SOURCES, gradients);
    for (int i = 0; i < SOURCES; i++) ops_output(c, gradients[i], tolerance, "gradient %d", i);
}

#define SHAPE_TEST(name, number)                                                                   \
    static void body_##name(ops_case *c) {                                                         \
        check_shape(c, &shapes[number]);                                                           \
    }                                                                                              \
    GPU_TEST(linear_scan, name) {                                                                  \
        ops_run(body_##name, number + 1, 0);                                                       \
    }
SHAPE_TEST(heads, 0)
SHAPE_TEST(shared, 1)
SHAPE_TEST(tiles, 2)
SHAPE_TEST(narrow, 3)

/* ---- Times */

typedef struct {
    const char *name;
    int64_t batch, heads, length, keys, values;
    bool per_key;
} size;
static const size sizes[] = {{"scalar", 4, 32, 8192, 128, 128, false},
                             {"mamba-2", 4, 64, 8192, 128, 64, false},
                             {"64 x 64", 4, 64, 8192, 64, 64, false},
                             {"by key", 4, 32, 8192, 128, 128, true}};
static const size tiny = {"tiny", 1, 2, 130, 64, 64, false};
static const double BANDWIDTH = 4.2e12, LEAST = 0.4;

typedef struct {
    gpu_bench base;
    const size *size;
    double seconds[2], all[2]; /* forward, backward: of the scan's steps; of all */
    int part;
    uint32_t seen;
} bench;

static ml_type type_of(bench *b, ml_dtype dtype, const char *axes) {
    const size *s = b->size;
    ml_type type = {.dtype = (uint8_t)dtype};
    for (; *axes; axes++) {
        char name[2] = {*axes, 0};
        type.axis[type.rank] = ml_axis_named(b->base.g, name);
        type.size[type.rank++] = *axes == 'b'   ? s->batch
                                 : *axes == 'h' ? s->heads
                                 : *axes == 's' ? s->length
                                 : *axes == 'k' ? s->keys
                                                : s->values;
    }
    return type;
}

static ml_ref operand(bench *b, ml_dtype dtype, const char *axes) {
    ml_type type = type_of(b, dtype, axes);
    return gpu_bench_operand(&b->base, &type, 0);
}

/* From 0.95 to 1. */
static ml_ref decays(bench *b, const char *axes) {
    ml_graph *g = b->base.g;
    ml_type type = type_of(b, ML_F32, axes);
    ml_ref key = ml_const_int(g, ML_I64, 77);
    ml_ref drawn = ml_graph_add(g, ML_OP_RANDOM, &key, 1, NULL, 0, &type);
    drawn = ml_map2(g, ML_OP_MUL, drawn, ml_const(g, ML_F32, 0.05));
    drawn = ml_map2(g, ML_OP_ADD, drawn, ml_const(g, ML_F32, 0.95));
    return gpu_bench_operand(&b->base, &type, drawn);
}

static void see_times(void *context, const ml_profile *profile) {
    bench *b = context;
    for (uint32_t i = b->seen; i < profile->events.count; i++) {
        const ml_profile_event *first = &profile->events.at[i];
        if (first->at >= ML_EVENT_HOST) continue;
        const char *name = first->program->steps[first->at].name;
        double best = first->end - first->begin;
        bool again = strncmp(name, "random", 6) == 0;
        for (uint32_t j = b->seen; j < profile->events.count; j++) {
            const ml_profile_event *e = &profile->events.at[j];
            if (e->at != first->at || e->program != first->program) continue;
            again |= j < i;
            if (e->end - e->begin < best) best = e->end - e->begin;
        }
        if (again) continue;
        b->all[b->part] += best;
        if (strncmp(name, "linear_scan", 11) == 0) b->seconds[b->part] += best;
    }
    b->seen = profile->events.count;
}

static void run_part(bench *b, ml_ref first, int outputs) {
    ml_update updates[5];
    for (int i = 0; i < outputs; i++) {
        ml_ref value = i ? ml_out(b->base.g, first, i) : first;
        const ml_type *type = ml_graph_type(b->base.g, value);
        updates[i] = (ml_update){gpu_bench_state(&b->base, type, 0), value};
    }
    gpu_bench_run(&b->base, updates, outputs, see_times, b);
}

static void time_body(void *context) {
    bench *b = context;
    ml_ref sources[7] = {operand(b, ML_BF16, "bshk"), operand(b, ML_BF16, "bshk"),
                         operand(b, ML_BF16, "bshv"), decays(b, b->size->per_key ? "bshk" : "bsh"),
                         operand(b, ML_F32, "bhkv"),  operand(b, ML_BF16, "bshv"),
                         operand(b, ML_F32, "bhkv")};
    ml_linear_scan scan = {.axis = ml_axis_named(b->base.g, "s"),
                           .keys = ml_axis_named(b->base.g, "k"),
                           .values = ml_axis_named(b->base.g, "v"),
                           .after = true,
                           .dtype = ML_BF16};
    run_part(b, ml_linear_scan_new(b->base.g, sources, &scan), 2);
    b->part = 1;
    run_part(b, ml_linear_scan_grad(b->base.g, sources, &scan), 5);
}

static double share_of(const bench *b, double seconds) {
    const size *s = b->size;
    double rows = (double)(s->batch * s->heads * s->length), decays = s->per_key ? 4 * s->keys : 4;
    double forward = 2 * (2 * s->keys + 2 * s->values) + decays;
    double backward = 2 * (4 * s->keys + 3 * s->values) + 2 * decays;
    return rows * (forward + backward) / BANDWIDTH / seconds;
}

GPU_TEST(linear_scan, times) {
    const char *wanted = getenv("BENCH");
    bool only = wanted && strcmp(wanted, "tiny") == 0;
    for (int i = 0; wanted && i < (only ? 1 : (int)(sizeof sizes / sizeof *sizes)); i++) {
        bench b = {.size = only ? &tiny : &sizes[i]};
        ml_status status = gpu_bench_time(&b.base, time_body, &b);
        EXPECT(status == ML_OK, "%s: %s", b.size->name, ml_error_last()->text);
        double both = b.seconds[0] + b.seconds[1], share = both > 0 ? share_of(&b, both) : 0;
        printf("linear_scan %-8s forward %6.3f ms (with others %6.3f)   backward %6.3f (%6.3f)   "
               "both %6.3f ms: %4.1f %% of the limit\n",
               b.size->name, b.seconds[0] * 1e3, b.all[0] * 1e3, b.seconds[1] * 1e3, b.all[1] * 1e3,
               both * 1e3, 100 * share);
        fflush(stdout);
        EXPECT(only || i > 0 || share >= LEAST, "%s: %.1f %% of the limit", b.size->name,
               100 * share);
    }
}
