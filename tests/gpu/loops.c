/* Recurrences with products of their states on the GPU: an LSTM of one layer, forward and backward,
 * its input's product too. BENCH=1 build/test --gpu -v -j 0 gpu_loop prints milliseconds, beside
 * those of tests/peers_torch.py lstm. BENCH=tiny: to try the test alone. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/device/profile.h"
#include "runtime/ops/recurrence/recurrence.h"
#include "runtime/passes/passes.h"
#include "tests/gpu/bench.h"
#include "tests/ops/support.h"

typedef struct {
    int length, batch, width;
} shape;
static const shape shapes[] = {{1024, 64, 1024}, {1024, 128, 1024}, {1024, 16, 512}};
static const shape tiny = {3, 16, 32};

typedef struct {
    gpu_bench base;
    shape shape;
    ml_axis s, b, e, g, h;
    double all, scans; /* seconds */
} bench;

static ml_type type_of(const bench *b, ml_dtype dtype, const char *axes) {
    ml_type type = {.dtype = (uint8_t)dtype};
    for (; *axes; axes++) {
        const shape *of = &b->shape;
        int64_t size = *axes == 's' ? of->length : *axes == 'b' ? of->batch : of->width;
        ml_axis axis = *axes == 's'   ? b->s
                       : *axes == 'b' ? b->b
                       : *axes == 'e' ? b->e
                       : *axes == 'g' ? b->g
                                      : b->h;
        type.axis[type.rank] = axis;
        type.size[type.rank++] = *axes == 'g' ? 4 : size;
    }
    return type;
}

static ml_ref operand(bench *b, const char *axes) {
    ml_type type = type_of(b, ML_BF16, axes);
    return gpu_bench_operand(&b->base, &type, 0);
}

static ml_ref map2(const bench *b, ml_op op, ml_ref x, ml_ref y) {
    return ml_map2(b->base.g, op, x, y);
}

static ml_ref gate(const bench *b, ml_ref z, int i, ml_op op) {
    ml_ref one = ml_slice(b->base.g, z, b->g, i, i + 1);
    return ml_map1(b->base.g, op, ml_reduce(b->base.g, ML_OP_SUM, one, &b->g, 1));
}

/* h is bf16, c f32. */
static void cell(const bench *b, ml_ref x, const ml_ref *weights, const ml_ref *state,
                 ml_ref *next) {
    ml_graph *g = b->base.g;
    ml_ref z = ml_dot(g, x, weights[0], &b->e, 1, ML_BF16);
    ml_ref h = ml_dot(g, ml_rename(g, state[0], b->h, b->e), weights[1], &b->e, 1, ML_BF16);
    z = ml_cast(g, map2(b, ML_OP_ADD, z, h), ML_F32);
    ml_ref made = map2(b, ML_OP_MUL, gate(b, z, 0, ML_OP_SIGMOID), gate(b, z, 2, ML_OP_TANH));
    next[1] = map2(b, ML_OP_MUL, state[1], gate(b, z, 1, ML_OP_SIGMOID));
    next[1] = map2(b, ML_OP_ADD, next[1], made);
    next[0] = map2(b, ML_OP_MUL, gate(b, z, 3, ML_OP_SIGMOID), ml_map1(g, ML_OP_TANH, next[1]));
    next[0] = ml_cast(g, next[0], ML_BF16);
}

static void see_times(void *context, const ml_profile *profile) {
    bench *b = context;
    for (uint32_t i = 0; i < profile->events.count; i++) {
        const ml_profile_event *first = &profile->events.at[i];
        if (first->at >= ML_EVENT_HOST) continue;
        const ml_profile_step *step = &first->program->steps[first->at];
        double best = 0;
        bool seen = false;
        for (uint32_t j = 0; j < profile->events.count; j++) {
            const ml_profile_event *e = &profile->events.at[j];
            if (e->at != first->at || e->program != first->program) continue;
            seen |= j < i;
            if (best == 0 || e->end - e->begin < best) best = e->end - e->begin;
        }
        if (seen || strncmp(step->name, "random", 6) == 0) continue; /* that is how states begin */
        printf("  %-32s %8.3f ms\n", step->name, best * 1e3);
        b->all += best;
        if (strstr(step->name, "scan") || strstr(step->name, "loop")) b->scans += best;
    }
}

static void bench_body(void *context) {
    bench *b = context;
    ml_graph *g = b->base.g;
    ml_axis *axes[] = {&b->s, &b->b, &b->e, &b->g, &b->h};
    const char *names[] = {"s", "b", "e", "g", "h"};
    for (int i = 0; i < 5; i++) *axes[i] = ml_axis_named(g, names[i]);
    ml_ref wrt[3] = {operand(b, "sbe"), operand(b, "egh"), operand(b, "egh")};
    ml_type slice = type_of(b, ML_BF16, "be"), h = type_of(b, ML_BF16, "bh");
    ml_type c = type_of(b, ML_F32, "bh");
    ml_recurrence_pair input = {ml_recurrence_parameter(g, &slice), wrt[0]}, state[2];
    state[0] = (ml_recurrence_pair){ml_recurrence_parameter(g, &h),
                                    ml_broadcast(g, ml_const(g, ML_BF16, 0), &h)};
    state[1] = (ml_recurrence_pair){ml_recurrence_parameter(g, &c),
                                    ml_broadcast(g, ml_const(g, ML_F32, 0), &c)};
    ml_ref before[2] = {state[0].parameter, state[1].parameter}, next[2], outputs[3];
    cell(b, input.parameter, wrt + 1, before, next);
    ml_recurrence_step step = {.axis = b->s,
                               .length = b->shape.length,
                               .inputs = &input,
                               .input_count = 1,
                               .states = state,
                               .state_count = 2,
                               .next = next,
                               .stacked = next,
                               .stacked_count = 1};
    ml_recurrence_apply(g, &step, outputs);
    ml_axis all[3] = {b->s, b->b, b->h};
    ml_ref weighted = map2(b, ML_OP_MUL, outputs[0], operand(b, "sbh"));
    ml_ref gradients[3], loss = ml_reduce(g, ML_OP_SUM, ml_cast(g, weighted, ML_F32), all, 3);
    ml_autodiff(g, loss, wrt, 3, gradients);
    ml_update updates[3];
    for (int i = 0; i < 3; i++) {
        ml_type type = *ml_graph_type(g, gradients[i]);
        updates[i] = (ml_update){gpu_bench_state(&b->base, &type, 0), gradients[i]};
    }
    gpu_bench_run(&b->base, updates, 3, see_times, b);
}

GPU_TEST(loop, times) {
    const char *size = getenv("BENCH");
    bool only = size && strcmp(size, "tiny") == 0;
    for (int i = 0; size && i < (only ? 1 : (int)(sizeof shapes / sizeof *shapes)); i++) {
        bench b = {.shape = only ? tiny : shapes[i]};
        ml_status status = gpu_bench_time(&b.base, bench_body, &b);
        EXPECT(status == ML_OK, "LSTM: %s", ml_error_last()->text);
        printf("LSTM %d wide, batch %d, %d positions, forward and backward: %.3f ms, of which the "
               "scans %.3f\n",
               b.shape.width, b.shape.batch, b.shape.length, b.all * 1e3, b.scans * 1e3);
        fflush(stdout);
    }
}
