/* Recurrences whose steps are elementwise, and their gradients, on a device: rows side by side in
 * memory and not, in both directions, with several states, sums, inputs that rows share, operands
 * in other orders. */
#include <math.h>
#include <string.h>

#include "codegen/lower/lower.h"
#include "runtime/exec/session.h"
#include "runtime/ops/recurrence/recurrence.h"
#include "tests/ops/support.h"

typedef struct {
    ml_dtype dtype, state;        /* of the inputs, of the states and results */
    const char *input, *rows;     /* axes */
    const char *shared;           /* axes of a second gate */
    bool reverse, several, inner; /* inner: results are no states */
    const char *scale;            /* axes of a factor of h at all positions; NULL: none */
    bool made;                    /* inputs are computed before */
} shape;

static ml_ref parameter_of(ops_case *c, ml_ref input) {
    ml_type slice, type = *ml_graph_type(c->g, input);
    ml_axis s = ops_axis(c, "s");
    ml_recurrence_slice(c->g, input, s, type.size[ml_type_find(&type, s)], &slice);
    return ml_recurrence_parameter(c->g, &slice);
}

static ml_ref times(ops_case *c, ml_ref a, ml_ref b) {
    return ml_map2(c->g, ML_OP_MUL, a, b);
}

static ml_ref plus(ops_case *c, ml_ref a, ml_ref b) {
    return ml_map2(c->g, ML_OP_ADD, a, b);
}

/* h' = sigmoid(x0) h + x1 r, k' = r k + h' (or tanh of that); a sum of h x1. */
static void build(ops_case *c, const shape *s) {
    enum { INPUTS = 3 };
    ml_graph *g = c->g;
    const char *axes[INPUTS] = {s->input, s->input, s->shared};
    ml_ref wrt[INPUTS + 3];
    ml_recurrence_pair in[INPUTS], state[2];
    for (int i = 0; i < INPUTS; i++) {
        wrt[i] = ops_input(c, s->dtype, axes[i], -1, 1);
        ml_ref value = wrt[i];
        if (s->made && i < 2) value = ml_map1(g, ML_OP_TANH, wrt[i]);
        if (s->made && i == 1) value = times(c, in[0].value, value);
        in[i] = (ml_recurrence_pair){parameter_of(c, value), value};
    }
    ml_ref x[INPUTS];
    for (int i = 0; i < INPUTS; i++) x[i] = ml_cast(g, in[i].parameter, s->state);
    for (int i = 0; i < 2; i++) {
        wrt[INPUTS + i] = ops_input(c, s->state, s->rows, -1, 1);
        ml_type type = *ml_graph_type(g, wrt[INPUTS + i]);
        state[i] = (ml_recurrence_pair){ml_recurrence_parameter(g, &type), wrt[INPUTS + i]};
    }
    ml_ref h = state[0].parameter, next[2], results[2];
    int wanted = INPUTS + (s->several ? 2 : 1);
    next[0] = times(c, ml_map1(g, ML_OP_SIGMOID, x[0]), h);
    if (s->scale) {
        wrt[wanted] = ops_input(c, s->state, s->scale, -1, 1);
        next[0] = times(c, next[0], wrt[wanted++]);
    }
    next[0] = plus(c, next[0], times(c, x[1], x[2]));
    next[1] = ml_map1(g, ML_OP_TANH, plus(c, times(c, x[2], state[1].parameter), next[0]));
    results[0] = s->inner ? times(c, next[0], x[1]) : next[0];
    results[1] = s->several ? next[1] : next[0];
    ml_ref summed = times(c, h, x[1]);
    const ml_type *type = ml_graph_type(g, wrt[0]);
    ml_recurrence_step step = {.axis = ops_axis(c, "s"),
                               .reverse = s->reverse,
                               .length = type->size[ml_type_find(type, ops_axis(c, "s"))],
                               .inputs = in,
                               .input_count = INPUTS,
                               .states = state,
                               .state_count = s->several ? 2 : 1,
                               .next = next,
                               .stacked = results,
                               .stacked_count = s->several ? 2 : 1,
                               .summed = &summed,
                               .summed_count = s->several};
    ml_ref n = ml_recurrence_new(g, &step);
    double tolerance = 20 * ops_tolerance(s->dtype);
    int count = step.stacked_count + step.summed_count + step.state_count;
    for (int i = 0; i < count; i++) {
        ml_ref y = ml_out(g, n, i);
        ops_output(c, y, tolerance, "output %d", i);
        if (!s->inner || i == 0) /* one gradient alone computes states again */
            ops_gradients(c, y, wrt, wanted, tolerance, "gradient");
    }
}

/* Rows by blocks, with stages that positions fill and do not, operands in other orders. */
static void build_rows(ops_case *c) {
    static const shape shapes[] = {
        {ML_F32, ML_F32, "b2 s40 d64", "b2 d64", "b2 s40 d64", false, false, false, NULL, false},
        {ML_BF16, ML_F32, "s75 b2 d32", "b2 d32", "s75 b2", true, true, false, NULL, false},
        {ML_BF16, ML_BF16, "b2 s33 d32", "b2 d32", "b2 s33 d32", false, false, false, NULL, false},
        {ML_F32, ML_F32, "b3 s35 d32", "d32 b3", "s35 d32", false, true, true, NULL, false},
    };
    for (int i = 0; i < (int)(sizeof shapes / sizeof *shapes); i++) build(c, &shapes[i]);
}

/* Mamba's first form: h' = exp(dt A) h + dt x B over states that an axis n expands, the sum over n
 * of h' C, and one over n of h beside it. */
static void build_expanded_one(ops_case *c, const shape *s) {
    enum { DT, X, B, C, INPUTS, A = INPUTS, H, COUNT };
    ml_graph *g = c->g;
    const char *axes[INPUTS] = {s->input, s->input, s->shared, s->shared};
    ml_ref wrt[COUNT], x[COUNT];
    ml_recurrence_pair in[INPUTS], state;
    wrt[H] = ops_input(c, s->state, s->rows, -1, 1);
    ml_type full = *ml_graph_type(g, wrt[H]);
    for (int i = 0; i < INPUTS; i++) {
        wrt[i] = ops_input(c, s->dtype, axes[i], -1, 1);
        in[i] = (ml_recurrence_pair){parameter_of(c, wrt[i]), wrt[i]};
        x[i] = ml_broadcast(g, ml_cast(g, in[i].parameter, s->state), &full);
    }
    wrt[A] = ops_input(c, s->state, s->several ? "d32 n4" : "d64 n16", -2, 0);
    x[A] = ml_broadcast(g, wrt[A], &full);
    state = (ml_recurrence_pair){ml_recurrence_parameter(g, &full), wrt[H]};
    ml_ref decay = ml_map1(g, ML_OP_EXP, times(c, x[DT], x[A]));
    ml_ref next = plus(c, times(c, decay, state.parameter), times(c, times(c, x[DT], x[X]), x[B]));
    ml_axis n = ops_axis(c, "n");
    ml_ref y = ml_reduce(g, ML_OP_SUM, times(c, next, x[C]), &n, 1);
    if (s->several)
        y = plus(c, ml_map1(g, ML_OP_TANH, y), ml_reduce(g, ML_OP_SUM, state.parameter, &n, 1));
    const ml_type *type = ml_graph_type(g, wrt[0]);
    ml_recurrence_step step = {.axis = ops_axis(c, "s"),
                               .reverse = s->reverse,
                               .length = type->size[ml_type_find(type, ops_axis(c, "s"))],
                               .inputs = in,
                               .input_count = INPUTS,
                               .states = &state,
                               .state_count = 1,
                               .next = &next,
                               .stacked = &y,
                               .stacked_count = 1};
    ml_ref made = ml_recurrence_new(g, &step);
    double tolerance = 20 * ops_tolerance(s->dtype);
    for (int i = 0; i < 2; i++) {
        ml_ref output = ml_out(g, made, i);
        ops_output(c, output, tolerance, "output %d", i);
        if (s->inner || s->several == i) /* one gradient alone computes states again */
            ops_gradients(c, output, wrt, COUNT, tolerance, "gradient");
    }
}

static void build_expanded(ops_case *c) {
    static const shape shapes[] = {
        {ML_F32, ML_F32, "b2 s40 d64", "b2 d64 n16", "b2 s40 n16", false, false, false, NULL,
         false},
        {ML_BF16, ML_F32, "s35 b3 d32", "b3 d32 n4", "s35 n4 b3", true, true, false, NULL, false},
        {ML_F32, ML_F32, "b1 s19 d64", "b1 d64 n16", "b1 s19 n16", true, false, true, NULL, false},
    };
    for (int i = 0; i < (int)(sizeof shapes / sizeof *shapes); i++)
        build_expanded_one(c, &shapes[i]);
}

/* Positions of a stage side by side, by warps. */
static void build_parallel(ops_case *c) {
    static const shape shapes[] = {
        {ML_F32, ML_F32, "b2 s300 d32", "b2 d32", "b2 s300 d32", false, false, false, "d32", false},
        {ML_F32, ML_F32, "b2 s260 d32", "b2 d32", "s260 b2 d32", false, false, false, NULL, true},
        {ML_F32, ML_F32, "s43 d32 b2", "b2 d32", "b2 s43", true, true, false, "d32", true},
        {ML_BF16, ML_F32, "s256 b2 d32", "b2 d32", "s256 b2 d32", true, false, false, NULL, false},
    };
    for (int i = 0; i < (int)(sizeof shapes / sizeof *shapes); i++) build(c, &shapes[i]);
}

/* All threads of a block take positions of one row: few rows, whatever their order. */
static void build_positions(ops_case *c) {
    static const shape shapes[] = {
        {ML_F32, ML_F32, "s300 b2 d3", "b2 d3", "s300 b2", false, false, false, "d3", false},
        {ML_BF16, ML_F32, "b2 d3 s2100", "d3 b2", "b2 d3 s2100", true, false, true, NULL, false},
        {ML_F64, ML_F64, "s257", "", "s257", false, false, false, NULL, true},
    };
    for (int i = 0; i < (int)(sizeof shapes / sizeof *shapes); i++) build(c, &shapes[i]);
}

/* A running maximum, max(f + h, i), in spellings that are the same; begun from minus infinity, and
 * begun anew where a third input is large; beside an affine state. */
typedef struct {
    ml_dtype dtype;
    const char *input, *rows;
    int spelling;
    bool reverse, resets, beside;
} maximum;

static ml_ref maximum_of(ops_case *c, ml_ref h, ml_ref f, ml_ref i, int spelling) {
    ml_graph *g = c->g;
    if (spelling == 1) return ml_map2(g, ML_OP_MAXIMUM, i, plus(c, f, h));
    if (spelling == 2)
        return ml_map2(g, ML_OP_MAXIMUM, ml_map2(g, ML_OP_SUB, h, ml_map1(g, ML_OP_NEG, f)), i);
    return ml_map2(g, ML_OP_MAXIMUM, plus(c, h, f), i);
}

static void build_maximum(ops_case *c, const maximum *s) {
    enum { INPUTS = 3 };
    ml_graph *g = c->g;
    ml_ref wrt[INPUTS + 2], x[INPUTS], next[2];
    ml_recurrence_pair in[INPUTS], state[2];
    for (int i = 0; i < INPUTS; i++) {
        wrt[i] = ops_input(c, s->dtype, s->input, -1, i ? 1 : 0.5);
        in[i] = (ml_recurrence_pair){parameter_of(c, wrt[i]), wrt[i]};
        x[i] = in[i].parameter;
    }
    for (int i = 0; i < 2; i++) {
        wrt[INPUTS + i] = ops_input(c, s->dtype, s->rows, -1, 1);
        ml_type type = *ml_graph_type(g, wrt[INPUTS + i]);
        state[i] = (ml_recurrence_pair){ml_recurrence_parameter(g, &type), wrt[INPUTS + i]};
        if (i == 0 && s->resets)
            state[0].value = ml_broadcast(g, ml_const(g, s->dtype, -INFINITY), &type);
    }
    next[0] = maximum_of(c, state[0].parameter, x[0], x[1], s->spelling);
    if (s->resets)
        next[0] =
            ml_where(g, ml_map2(g, ML_OP_GT, x[2], ml_const(g, s->dtype, 0.95)), x[1], next[0]);
    next[1] = plus(c, times(c, state[1].parameter, ml_map1(g, ML_OP_SIGMOID, x[0])), x[2]);
    const ml_type *type = ml_graph_type(g, wrt[0]);
    ml_recurrence_step step = {.axis = ops_axis(c, "s"),
                               .reverse = s->reverse,
                               .length = type->size[ml_type_find(type, ops_axis(c, "s"))],
                               .inputs = in,
                               .input_count = INPUTS,
                               .states = state,
                               .state_count = s->beside ? 2 : 1,
                               .next = next,
                               .stacked = next,
                               .stacked_count = s->beside ? 2 : 1};
    ml_ref n = ml_recurrence_new(g, &step);
    EXPECT(strcmp(ml_recurrence_algebra(g, n), s->beside ? "affine and max-plus" : "max-plus") == 0,
           "the step is %s", ml_recurrence_algebra(g, n));
    for (int i = 0; i < 2 * step.state_count; i++) {
        ml_ref output = ml_out(g, n, i);
        ops_output(c, output, ops_tolerance(s->dtype), "output %d", i);
        ops_gradients(c, output, wrt, INPUTS + (s->resets ? 0 : step.state_count),
                      20 * ops_tolerance(s->dtype), "gradient");
    }
}

static void build_maxima(ops_case *c) {
    static const maximum shapes[] = {
        {ML_F32, "s300 b2 d4", "b2 d4", 0, false, false, false}, /* by positions */
        {ML_F32, "b2 s2070 d3", "d3 b2", 1, true, true, false},
        {ML_F64, "s260", "", 2, false, true, true},
        {ML_F32, "b2 s300 d32", "b2 d32", 2, false, true, true}, /* by warps */
        {ML_F32, "s270 d64", "d64", 0, true, false, false},
        {ML_F32, "s9 b3 d5", "b3 d5", 1, false, true, false}, /* one after another */
    };
    for (int i = 0; i < (int)(sizeof shapes / sizeof *shapes); i++) build_maximum(c, &shapes[i]);
}

/* States that no result has: the gradient computes them again. */
static void build_again(ops_case *c) {
    static const shape shapes[] = {
        {ML_BF16, ML_F32, "b2 s48 d64", "b2 d64", "b2 s48 d64", false, false, true, NULL, false},
        {ML_F32, ML_F32, "s37 b2 d32", "b2 d32", "s37 b2", true, true, true, NULL, false},
    };
    for (int i = 0; i < (int)(sizeof shapes / sizeof *shapes); i++) build(c, &shapes[i]);
}

/* Several rows a thread, four and two, warps that take positions side by side: narrow operands,
 * rows for a whole GPU, here one multiprocessor. */
static void build_packed(ops_case *c) {
    static const shape shapes[] = {
        {ML_BF16, ML_F32, "b4 s257 d128", "b4 d128", "s257 d128", false, false, true, NULL, false},
        {ML_BF16, ML_F32, "s300 d64", "d64", "s300", true, false, true, "d64", false},
        {ML_BF16, ML_F32, "b2 s256 d128", "b2 d128", "s256 b2 d128", false, false, false, "d128",
         true},
    };
    ml_session_device(c->session)->target.multiprocessors = 1;
    for (int i = 0; i < (int)(sizeof shapes / sizeof *shapes); i++) build(c, &shapes[i]);
}

/* Rows that no block divides. */
static void build_odd(ops_case *c) {
    static const shape shapes[] = {
        {ML_F32, ML_F32, "s19 b3 d5", "b3 d5", "s19 b3 d5", false, true, false, NULL, false},
        {ML_BF16, ML_F32, "b2 d7 s9", "b2 d7", "d7 s9", true, false, true, NULL, false},
        {ML_F32, ML_F32, "s1 d3", "d3", "s1", false, false, false, NULL, false},
        {ML_F64, ML_F64, "s12", "", "s12", true, true, false, NULL, false},
    };
    for (int i = 0; i < (int)(sizeof shapes / sizeof *shapes); i++) build(c, &shapes[i]);
}

OPS_TEST(recurrence_rows) {
    ops_run(build_rows, 311, 0);
}
OPS_TEST(recurrence_parallel) {
    ops_run(build_parallel, 315, 0);
}
OPS_TEST(recurrence_positions) {
    ops_run(build_positions, 316, 0);
}
OPS_TEST(recurrence_maximum) {
    ops_run(build_maxima, 317, 0);
}
OPS_TEST(recurrence_again) {
    ops_run(build_again, 313, 0);
}
GPU_TEST(ops, recurrence_packed) {
    ops_run(build_packed, 318, 0);
}
OPS_TEST(recurrence_expanded) {
    ops_run(build_expanded, 314, 0);
}
OPS_TEST(recurrence_odd) {
    ops_run(build_odd, 312, 0);
}
