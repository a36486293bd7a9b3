/* Recurrences whose step has products of the states, forward and backward: loops over positions, on
 * GPUs one kernel where sizes and dtypes allow it. Slices of 256 bytes are read and written in
 * place, odd ones from copies. */
#include <stdio.h>

#include "runtime/ops/recurrence/recurrence.h"
#include "tests/ops/support.h"

typedef struct {
    const char *x, *w, *state; /* [s b g h], [e g h] with e as large as h, [b h] */
    ml_dtype dtype;            /* of the product's operands */
    bool reverse, gru;
    int segment; /* positions; 0: none */
} shape;
static shape current;

static ml_ref times(ml_graph *g, ml_ref a, ml_ref b) {
    return ml_map2(g, ML_OP_MUL, a, b);
}

static ml_ref plus(ml_graph *g, ml_ref a, ml_ref b) {
    return ml_map2(g, ML_OP_ADD, a, b);
}

/* Gate i of z[b, g, h] after a function. */
static ml_ref gate(ops_case *c, ml_ref z, int i, ml_op op) {
    ml_axis g = ops_axis(c, "g");
    ml_ref one = ml_reduce(c->g, ML_OP_SUM, ml_slice(c->g, z, g, i, i + 1), &g, 1);
    return ml_map1(c->g, op, one);
}

/* h . W for all gates, in f32. */
static ml_ref product(ops_case *c, ml_ref h, ml_ref w) {
    ml_axis e = ops_axis(c, "e");
    ml_ref operand = ml_rename(c->g, ml_cast(c->g, h, current.dtype), ops_axis(c, "h"), e);
    return ml_dot(c->g, operand, ml_cast(c->g, w, current.dtype), &e, 1, ML_F32);
}

/* An LSTM's step, or one whose second product is of what the first one gave. */
static void cell(ops_case *c, ml_ref x, ml_ref w, const ml_ref *state, ml_ref *next) {
    ml_graph *g = c->g;
    ml_ref z = plus(g, x, product(c, state[0], w));
    ml_ref i = gate(c, z, 0, ML_OP_SIGMOID), f = gate(c, z, 1, ML_OP_SIGMOID);
    if (current.gru) {
        ml_ref again = product(c, times(g, state[0], f), w);
        ml_ref made = gate(c, plus(g, x, again), 2, ML_OP_TANH);
        ml_ref keep = ml_map2(g, ML_OP_SUB, ml_const(g, ML_F32, 1), i);
        next[0] = plus(g, times(g, state[0], i), times(g, made, keep));
        next[1] = plus(g, times(g, state[1], f), next[0]);
        return;
    }
    next[1] = plus(g, times(g, state[1], f), times(g, i, gate(c, z, 2, ML_OP_TANH)));
    next[0] = times(g, gate(c, z, 3, ML_OP_SIGMOID), ml_map1(g, ML_OP_TANH, next[1]));
}

static ml_ref total(ml_graph *g, const ml_ref *outputs, ml_axis s) {
    ml_ref sum = ml_reduce(g, ML_OP_SUM, outputs[0], &s, 1);
    return plus(g, sum, times(g, outputs[1], outputs[2]));
}

/* To the bit as without segments. */
static void check_segments(ops_case *c, const ml_recurrence_step *step, const ml_ref *outputs) {
    ml_ref plain[4];
    ml_recurrence_apply(c->g, step, plain);
    for (int i = 0; i < 3; i++)
        ops_output(c, ml_map2(c->g, ML_OP_SUB, outputs[i], plain[i]), 0, "difference of %d", i);
}

static void build(ops_case *c) {
    ml_graph *g = c->g;
    ml_type type = ops_type(c, ML_F32, current.x), states = ops_type(c, ML_F32, current.state);
    ml_axis s = ops_axis(c, "s");
    int64_t length = type.size[0];
    ml_ref x = ops_input(c, ML_F32, current.x, -2, 2);
    ml_ref w = ops_input(c, ML_F32, current.w, -0.5, 0.5);
    ml_recurrence_pair state[2], input = {.value = x};
    ml_ref inside[2], next[2], outputs[4], wrt[4] = {x, w};
    for (int i = 0; i < 2; i++) {
        wrt[2 + i] = ops_input(c, ML_F32, current.state, -1, 1);
        inside[i] = ml_recurrence_parameter(g, &states);
        state[i] = (ml_recurrence_pair){inside[i], wrt[2 + i]};
    }
    ml_recurrence_slice(g, x, s, length, &type);
    input.parameter = ml_recurrence_parameter(g, &type);
    cell(c, input.parameter, w, inside, next);
    ml_ref stacked = times(g, next[1], inside[0]);
    ml_recurrence_step step = {.axis = s,
                               .reverse = current.reverse,
                               .length = length,
                               .inputs = &input,
                               .input_count = 1,
                               .states = state,
                               .state_count = 2,
                               .next = next,
                               .stacked = &stacked,
                               .stacked_count = 1};
    if (current.segment)
        ml_recurrence_segments(g, &step, current.segment, outputs);
    else
        ml_recurrence_apply(g, &step, outputs);
    double tolerance = current.dtype == ML_F32 ? 1e-5 : 3e-2;
    for (int i = 0; i < 3; i++) ops_output(c, outputs[i], tolerance, "output %d", i);
    ml_ref all = total(g, outputs, s);
    ops_gradients(c, all, wrt, 4, 2 * tolerance, current.x);
    if (current.segment && !ops_is_gpu(c)) check_segments(c, &step, outputs);
}

static void run(shape of) {
    current = of;
    ops_run(build, 90, OPS_UNFUSED);
}

OPS_TEST(loops) {
    run((shape){"s3 b4 g4 h16", "e16 g4 h16", "b4 h16", ML_F32, false, false, 0});
    run((shape){"s4 b3 g4 h5", "e5 g4 h5", "b3 h5", ML_F32, true, false, 0});
    run((shape){"s2 b8 g4 h16", "e16 g4 h16", "b8 h16", ML_BF16, true, false, 0});
    run((shape){"s2 b36 g4 h32", "e32 g4 h32", "b36 h32", ML_BF16, false, false, 0});
    run((shape){"s3 b4 g3 h16", "e16 g3 h16", "b4 h16", ML_BF16, false, true, 0});
    run((shape){"s3 b4 g3 h16", "e16 g3 h16", "b4 h16", ML_F32, false, true, 0});
}

OPS_TEST(loop_segments) {
    run((shape){"s4 b3 g4 h16", "e16 g4 h16", "b3 h16", ML_F32, false, false, 2});
    run((shape){"s5 b3 g4 h16", "e16 g4 h16", "b3 h16", ML_BF16, true, false, 2});
}

/* The gradient's product is deep enough to be shared by two blocks. */
GPU_TEST(loops, shared) {
    run((shape){"s2 b3 g4 h272", "e272 g4 h272", "b3 h272", ML_BF16, false, false, 0});
}
