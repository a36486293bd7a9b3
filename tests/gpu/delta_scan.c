/* Linear scans of rank 1 (delta rules) on the GPU, also with a decay for each key: kernels against
 * the definition in float64, and how fast they are at batch 4, 32 heads, 8,192 positions, 128 keys
 * and values:
 *   BENCH=1 build/test --gpu -j 0 gpu_delta_scan/times
 * BENCH=tiny: to try that test alone, on an emulated GPU too. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/device/profile.h"
#include "runtime/ops/linear_scan/linear_scan.h"
#include "tests/gpu/bench.h"
#include "tests/ops/support.h"

typedef struct {
    const char *name, *q, *k, *v, *a, *state, *u, *w;
    bool after, reverse;
    ml_dtype dtype;
    double low, high; /* decays */
} shape;

static const shape shapes[] = {
    {"delta", "b2 s300 h2 k128", "b2 s300 h2 k128", "b2 s300 h2 v128", "b2 s300 h2",
     "b2 h2 k128 v128", "b2 s300 h2 k128", "b2 s300 h2 k128", true, false, ML_BF16, 0.75, 1},
    {"delta, heads share keys", "b2 s130 k64", "b2 s130 k64", "b2 h3 s130 v128", "b2 s130 h3",
     "b2 h3 v128 k64", "b2 s130 h3 k64", "b2 s130 k64", true, true, ML_F32, -0.5, 1},
    {"delta, states before", "s200 k128", "k128 s200", "s200 v64", "s200", "k128 v64", "s200 k128",
     "s200 k128", false, false, ML_BF16, 0, 0.25},
    {"delta, decays of keys", "b2 s300 h2 k128", "b2 s300 h2 k128", "b2 s300 h2 v128",
     "b2 s300 h2 k128", "b2 h2 k128 v128", "b2 s300 h2 k128", "b2 s300 h2 k128", true, false,
     ML_BF16, 0.75, 1},
    {"delta, small decays of keys", "s200 k64", "k64 s200", "s200 h2 v64", "h2 s200 k64",
     "h2 k64 v64", "s200 k64", "s200 h2 k64", false, true, ML_F32, -0.1, 0.25},
    {"decays of keys", "b2 s300 h2 k128", "b2 s300 h2 k128", "b2 s300 h2 v128", "b2 s300 h2 k128",
     "b2 h2 k128 v128", NULL, NULL, true, false, ML_BF16, 0, 1},
};
static const shape *current;

static void build_shape(ops_case *c) {
    const shape *s = current;
    const double small = 0.1875; /* u w^T hardly lets the state grow */
    ml_linear_scan scan = {.axis = ops_axis(c, "s"),
                           .keys = ops_axis(c, "k"),
                           .values = ops_axis(c, "v"),
                           .reverse = s->reverse,
                           .after = s->after,
                           .dtype = s->dtype,
                           .rank = s->u != NULL};
    ml_ref sources[7] = {ops_input(c, ML_BF16, s->q, -1, 1), ops_input(c, ML_BF16, s->k, -1, 1),
                         ops_input(c, ML_BF16, s->v, -1, 1),
                         ops_input(c, ML_F32, s->a, s->low, s->high),
                         ops_input(c, ML_F32, s->state, -1, 1)};
    int count = LINEAR_SCAN_FIRST_PAIR;
    if (s->u) sources[count++] = ops_input(c, ML_BF16, s->u, -small, small);
    if (s->u) /* f32: a decay times a key */
        sources[count++] = ops_input(c, s->dtype, s->w, -small, small);
    ml_ref y = ml_linear_scan_new(c->g, sources, &scan);
    ops_output(c, y, ops_tolerance(ML_BF16), "%s", s->name);
    ops_output(c, ml_out(c->g, y, 1), ops_tolerance(ML_BF16), "%s, last state", s->name);
    ops_gradients(c, y, sources, count, ops_tolerance(ML_BF16), s->name);
}

/* A test a shape: a sanitizer of the device takes long for each. */
#define SHAPE_TEST(name, index)                                                                    \
    GPU_TEST(delta_scan, kernels_##name) {                                                         \
        current = &shapes[index];                                                                  \
        ops_run(build_shape, index, 0);                                                            \
    }
SHAPE_TEST(delta, 0)
SHAPE_TEST(shared_keys, 1)
SHAPE_TEST(states_before, 2)
SHAPE_TEST(decays_of_keys, 3)
SHAPE_TEST(small_decays, 4)
SHAPE_TEST(without_pair, 5)

/* ---- Times */

enum { SOURCES = 7 };
typedef struct {
    int64_t batch, heads, length, width;
} size;
static const size whole = {4, 32, 8192, 128}, tiny = {1, 2, 130, 64};
typedef struct {
    gpu_bench base;
    size size;
    bool per_key; /* decays */
    int runs[2];  /* forward, gradient */
    double seconds[2][GPU_BENCH_RUNS];
} bench;

static ml_type type_of(bench *b, ml_dtype dtype, const char *axes) {
    static const char names[] = "bshkv";
    const size *s = &b->size;
    const int64_t sizes[] = {s->batch, s->length, s->heads, s->width, s->width};
    ml_type type = {.dtype = (uint8_t)dtype};
    for (; *axes; axes++) {
        type.axis[type.rank] = ml_axis_named(b->base.g, (char[]){*axes, 0});
        type.size[type.rank++] = sizes[strchr(names, *axes) - names];
    }
    return type;
}

static void take_times(void *context, const ml_profile *profile) {
    bench *b = context;
    for (uint32_t i = 0; i < profile->events.count; i++) {
        const ml_profile_event *e = &profile->events.at[i];
        if (e->at >= ML_EVENT_HOST) continue;
        const char *name = e->program->steps[e->at].name;
        if (!strstr(name, "linear_scan")) continue;
        int which = strstr(name, "grad") != NULL;
        if (b->runs[which] < GPU_BENCH_RUNS)
            b->seconds[which][b->runs[which]++] = e->end - e->begin;
    }
}

/* Random numbers from -most to most. */
static ml_ref small(bench *b, const ml_type *type, double most) {
    ml_graph *g = b->base.g;
    ml_type wide = *type;
    wide.dtype = ML_F32;
    ml_ref key = ml_const_int(g, ML_I64, 1000 + b->base.states);
    ml_ref x = ml_graph_add(g, ML_OP_RANDOM, &key, 1, NULL, 0, &wide);
    x = ml_map2(g, ML_OP_SUB, x, ml_const(g, ML_F32, 0.5));
    x = ml_map2(g, ML_OP_MUL, x, ml_const(g, ML_F32, 2 * most));
    return gpu_bench_operand(&b->base, type, x);
}

static void bench_body(void *context) {
    bench *b = context;
    ml_graph *g = b->base.g;
    ml_type keys = type_of(b, ML_BF16, "bshk"), values = type_of(b, ML_BF16, "bshv"),
            rows = type_of(b, ML_F32, b->per_key ? "bshk" : "bsh"),
            state = type_of(b, ML_F32, "bhkv");
    ml_linear_scan scan = {.axis = keys.axis[1],
                           .keys = keys.axis[3],
                           .values = values.axis[3],
                           .after = true,
                           .dtype = ML_BF16,
                           .rank = 1};
    ml_ref decay = ml_broadcast(g, ml_const(g, ML_F32, 0.96), &rows);
    ml_ref sources[SOURCES] = {small(b, &keys, 0.15),
                               small(b, &keys, 0.15),
                               gpu_bench_operand(&b->base, &values, 0),
                               gpu_bench_operand(&b->base, &rows, decay),
                               gpu_bench_operand(&b->base, &state, 0),
                               small(b, &keys, 0.08),
                               small(b, &keys, 0.15)};
    ml_ref y = ml_linear_scan_new(g, sources, &scan), gradients[SOURCES];
    ml_ref weighed = ml_map2(g, ML_OP_MUL, ml_cast(g, y, ML_F32),
                             ml_cast(g, gpu_bench_operand(&b->base, &values, 0), ML_F32));
    ml_ref loss = ml_reduce(g, ML_OP_SUM, weighed, values.axis, values.rank);
    ml_autodiff(g, loss, sources, SOURCES, gradients);
    ml_update updates[SOURCES + 1];
    for (int i = 0; i < SOURCES; i++) {
        ml_type type = *ml_graph_type(g, sources[i]);
        updates[i] = (ml_update){gpu_bench_state(&b->base, &type, 0),
                                 ml_cast(g, gradients[i], (ml_dtype)type.dtype)};
    }
    /* no gradient reads y: without a use of its own the forward scan would not run */
    updates[SOURCES] = (ml_update){gpu_bench_state(&b->base, ml_graph_type(g, y), 0), y};
    gpu_bench_run(&b->base, updates, SOURCES + 1, take_times, b);
}

static int by_size(const void *left, const void *right) {
    double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

static void time_one(bench *b) {
    const double limit = 1.09e-3; /* of the products of a Gated DeltaNet, both directions */
    const size *s = &b->size;
    double median[2];
    ml_status status = gpu_bench_time(&b->base, bench_body, b);
    EXPECT(status == ML_OK, "%s", ml_error_last()->text);
    for (int i = 0; i < 2 && status == ML_OK; i++)
        EXPECT(b->runs[i] > 0, "%s: no kernel ran", i ? "gradient" : "forward");
    if (!b->runs[0] || !b->runs[1]) return;
    for (int i = 0; i < 2; i++) {
        qsort(b->seconds[i], (size_t)b->runs[i], sizeof(double), by_size);
        median[i] = b->seconds[i][b->runs[i] / 2];
    }
    printf("delta rule%s B%d H%d T%d D%d: forward %.2f ms, with gradient %.2f ms, %.0f %% of "
           "%.2f\n",
           b->per_key ? ", decays of keys," : "", (int)s->batch, (int)s->heads, (int)s->length,
           (int)s->width, median[0] * 1e3, (median[0] + median[1]) * 1e3,
           100 * limit / (median[0] + median[1]), limit * 1e3);
}

GPU_TEST(delta_scan, times) {
    const char *wanted = getenv("BENCH");
    if (!wanted) test_skip("it measures: BENCH=1");
    for (int per_key = 0; per_key < 2; per_key++) {
        bench b = {.size = strcmp(wanted, "tiny") == 0 ? tiny : whole, .per_key = per_key};
        time_one(&b);
    }
}
