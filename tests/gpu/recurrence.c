/* m.scan of elementwise steps on the GPU: how near their kernels are to the bandwidth of a copy,
 * counting the bytes that must move: forward the inputs and the states, backward also what arrives
 * and the gradients. BENCH=1 build/test --gpu -v -j 0 gpu_recurrence fails where one is below
 * LEAST of it. BENCH=NAME: one shape; BENCH=tiny: to try the test alone. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/device/profile.h"
#include "runtime/ops/recurrence/recurrence.h"
#include "runtime/passes/passes.h"
#include "tests/gpu/bench.h"
#include "tests/ops/support.h"
#include "vm/check/bench.h"

#define LEAST 0.85

typedef struct {
    const char *name;
    int64_t batch, length, channels;
    ml_dtype input, output; /* states are f32 */
    bool gates;             /* the decay is a sigmoid of the input */
    int64_t expanded;       /* Mamba's first form: states of so many elements a channel; 0: none */
    double least;           /* of a copy's bandwidth */
} shape;
static const shape shapes[] = {
    {"f32", 8, 16384, 2048, ML_F32, ML_F32, false, 0, LEAST},
    {"bf16 in", 8, 16384, 2048, ML_BF16, ML_F32, false, 0, LEAST},
    {"bf16", 8, 16384, 2048, ML_BF16, ML_BF16, true, 0, LEAST},
    {"batch 2", 2, 16384, 2048, ML_F32, ML_F32, false, 0, 0},
    {"8 heads", 4, 8192, 8, ML_F32, ML_F32, false, 0, 0}, /* 32 rows: by positions */
    {"mamba-1", 8, 4096, 4096, ML_BF16, ML_BF16, false, 16, 0},
};
static const shape tiny = {"tiny", 2, 40, 64, ML_BF16, ML_F32, true, 0, 0};

typedef struct {
    gpu_bench base;
    const shape *shape;
    double copy; /* bytes a second */
    int timed, slow;
} bench;

static ml_ref operand(bench *b, ml_dtype dtype, bool short_rows) {
    ml_graph *g = b->base.g;
    const shape *s = b->shape;
    ml_type type = {.rank = 3,
                    .dtype = (uint8_t)dtype,
                    .axis = {ml_axis_named(g, "b"), ml_axis_named(g, "s"), ml_axis_named(g, "c")},
                    .size = {s->batch, s->length, s->channels}};
    if (short_rows) type.axis[2] = ml_axis_named(g, "n"), type.size[2] = s->expanded;
    ml_type wide = type;
    wide.dtype = ML_F32;
    ml_ref key = ml_const_int(g, ML_I64, b->base.states + 1); /* in [0, 1) */
    ml_ref drawn = ml_graph_add(g, ML_OP_RANDOM, &key, 1, NULL, 0, &wide);
    return gpu_bench_operand(&b->base, &type, drawn);
}

static double bytes_of(const bench *b, ml_dtype dtype) {
    const shape *s = b->shape;
    return (double)(s->batch * s->length * s->channels * ml_dtypes[dtype].bytes);
}

/* The first scan that ran is the forward one. */
static void see_times(void *context, const ml_profile *profile) {
    bench *b = context;
    const double in = bytes_of(b, b->shape->input), out = bytes_of(b, b->shape->output);
    const double must[2] = {2 * in + out, 3 * in + 2 * out};
    uint32_t steps[2] = {UINT32_MAX, UINT32_MAX};
    double best[2] = {0, 0};
    for (uint32_t i = 0; i < profile->events.count; i++) {
        const ml_profile_event *e = &profile->events.at[i];
        if (e->at >= ML_EVENT_HOST || strcmp(e->program->steps[e->at].name, "scan") != 0) continue;
        int which = steps[0] == UINT32_MAX || steps[0] == e->at ? 0 : 1;
        steps[which] = e->at;
        double took = e->end - e->begin;
        if (best[which] == 0 || took < best[which]) best[which] = took;
    }
    for (int i = 0; i < 2 && best[i] > 0; i++) {
        double share = must[i] / best[i] / b->copy;
        printf("scan %-8s %-8s %8.1f us %7.1f GB/s %5.1f %% of a copy\n", b->shape->name,
               i ? "backward" : "forward", best[i] * 1e6, must[i] / best[i] * 1e-9, 100 * share);
        b->timed++;
        b->slow += share < b->shape->least;
    }
    fflush(stdout);
}

enum { MOST_INPUTS = 4 };

/* A step: inputs' and captured tensors' parameters, the state's; its next value and the result. */
typedef struct {
    ml_ref wrt[MOST_INPUTS];
    ml_recurrence_pair in[MOST_INPUTS], state;
    int inputs;
    ml_ref x[MOST_INPUTS], next, stacked;
} body_step;

static ml_ref times(const bench *b, ml_ref x, ml_ref y) {
    return ml_map2(b->base.g, ML_OP_MUL, x, y);
}

/* h' = a h + b */
static void gru_step(bench *b, body_step *s) {
    ml_graph *g = b->base.g;
    ml_ref decay = b->shape->gates ? ml_map1(g, ML_OP_SIGMOID, s->x[0]) : s->x[0];
    s->next = ml_map2(g, ML_OP_ADD, times(b, decay, s->state.parameter), s->x[1]);
    s->stacked = ml_cast(g, s->next, b->shape->output);
}

/* h' = exp(dt A) h + dt x B, y = sum over n of h' C */
static void mamba_step(bench *b, body_step *s, const ml_type *full) {
    ml_graph *g = b->base.g;
    ml_axis n = ml_axis_named(g, "n");
    ml_type type = {.rank = 2,
                    .dtype = ML_F32,
                    .axis = {ml_axis_named(g, "c"), n},
                    .size = {b->shape->channels, b->shape->expanded}};
    ml_ref a = ml_map1(g, ML_OP_NEG, gpu_bench_operand(&b->base, &type, 0)), x[MOST_INPUTS];
    a = ml_broadcast(g, a, full);
    for (int i = 0; i < s->inputs; i++) x[i] = ml_broadcast(g, s->x[i], full);
    ml_ref decay = ml_map1(g, ML_OP_EXP, times(b, x[0], a));
    ml_ref added = times(b, times(b, x[0], x[1]), x[2]);
    s->next = ml_map2(g, ML_OP_ADD, times(b, decay, s->state.parameter), added);
    s->stacked = ml_reduce(g, ML_OP_SUM, times(b, s->next, x[3]), &n, 1);
    s->stacked = ml_cast(g, s->stacked, b->shape->output);
}

static void find_step(bench *b, body_step *s) {
    ml_graph *g = b->base.g;
    s->inputs = b->shape->expanded ? 4 : 2;
    for (int i = 0; i < s->inputs; i++) {
        ml_type slice;
        s->wrt[i] = operand(b, b->shape->input, i >= 2);
        ml_recurrence_slice(g, s->wrt[i], ml_axis_named(g, "s"), b->shape->length, &slice);
        s->in[i] = (ml_recurrence_pair){ml_recurrence_parameter(g, &slice), s->wrt[i]};
        s->x[i] = ml_cast(g, s->in[i].parameter, ML_F32);
    }
    ml_type type = *ml_graph_type(g, s->x[0]);
    if (b->shape->expanded) {
        type.axis[type.rank] = ml_axis_named(g, "n");
        type.size[type.rank++] = b->shape->expanded;
    }
    s->state.value = ml_broadcast(g, ml_const(g, ML_F32, 0), &type);
    s->state.parameter = ml_recurrence_parameter(g, &type);
    if (b->shape->expanded)
        mamba_step(b, s, &type);
    else
        gru_step(b, s);
}

/* The states, and the gradients of the inputs. */
static void body(void *context) {
    bench *b = context;
    ml_graph *g = b->base.g;
    body_step s;
    find_step(b, &s);
    ml_recurrence_step step = {.axis = ml_axis_named(g, "s"),
                               .length = b->shape->length,
                               .inputs = s.in,
                               .input_count = s.inputs,
                               .states = &s.state,
                               .state_count = 1,
                               .next = &s.next,
                               .stacked = &s.stacked,
                               .stacked_count = 1};
    ml_ref values[1 + MOST_INPUTS];
    ml_type order = *ml_graph_type(g, s.wrt[0]);
    order.dtype = (uint8_t)b->shape->output;
    values[0] = ml_permute(g, ml_recurrence_new(g, &step), &order);
    ml_ref weighted = times(b, values[0], operand(b, b->shape->output, false));
    ml_ref loss = ml_reduce(g, ML_OP_SUM, ml_cast(g, weighted, ML_F32), order.axis, 3);
    ml_autodiff(g, loss, s.wrt, s.inputs, values + 1);
    ml_update updates[1 + MOST_INPUTS];
    for (int i = 0; i <= s.inputs; i++)
        updates[i] =
            (ml_update){gpu_bench_state(&b->base, ml_graph_type(g, values[i]), 0), values[i]};
    gpu_bench_run(&b->base, updates, 1 + s.inputs, see_times, b);
}

GPU_TEST(recurrence, times) {
    const char *size = getenv("BENCH");
    bool only = size && strcmp(size, "tiny") == 0;
    ml_ceilings ceilings = {.copy_bytes = 1e30};
    EXPECT(!(size && !only && ml_bench("cuda", 0, false, &ceilings) != ML_OK),
           "the copy's bandwidth: %s", ml_error_last()->text);
    for (int i = 0; size && i < (only ? 1 : (int)(sizeof shapes / sizeof *shapes)); i++) {
        bench b = {.shape = only ? &tiny : &shapes[i], .copy = ceilings.copy_bytes};
        if (!only && strcmp(size, "1") != 0 && strcmp(size, b.shape->name) != 0) continue;
        ml_status status = gpu_bench_time(&b.base, body, &b);
        EXPECT(status == ML_OK, "%s: %s", b.shape->name, ml_error_last()->text);
        EXPECT(!(b.timed < 2 || (!only && b.slow > 0)),
               "%s: %d of %d kernels are below %.0f %% of a copy", b.shape->name, b.slow, b.timed,
               100 * b.shape->least);
    }
}
