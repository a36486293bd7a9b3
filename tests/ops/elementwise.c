/* Every elementwise op of the table on the CPU device, in every dtype that it takes, over several
 * arrangements of operands, with gradients. */
#include <math.h>

#include "tests/ops/support.h"

typedef struct {
    const char *a, *b, *c;
} arrangement;
static const arrangement arrangements[] = {
    {"b5 d37", "b5 d37", "b5 d37"}, {"b3 s4 d16", "d16", "s4"},        {"d8 b6", "b6 d8", "b6 d8"},
    {"s7 d33", "", "s7 d33"},       {"h2 s3 b5 d9", "d9 h2", "b5 s3"},
};
enum { ARRANGEMENTS = sizeof arrangements / sizeof *arrangements };

static const arrangement *current;
static ml_dtype current_dtype;
static uint64_t current_seed;

static bool takes(ml_op op, ml_dtype dtype) {
    if (op == ML_OP_IS_FINITE) return ml_dtypes[dtype].kind == ML_KIND_FLOAT;
    switch (ml_ops[op].rule) {
    case ML_RULE_FLOAT: return ml_dtypes[dtype].kind == ML_KIND_FLOAT;
    case ML_RULE_ARITH:
    case ML_RULE_TEST: return ml_dtypes[dtype].kind != ML_KIND_BOOL;
    case ML_RULE_LOGIC: return ml_dtypes[dtype].kind == ML_KIND_BOOL;
    default: return true;
    }
}

static bool wants_positive(ml_op op, int operand) {
    return ml_op_is(op, operand == 0 ? ML_POSITIVE_A : ML_POSITIVE_B);
}

static ml_ref some_input(ops_case *c, ml_dtype dtype, const char *axes, bool positive) {
    bool whole = ml_dtypes[dtype].kind == ML_KIND_INT;
    if (dtype == ML_BOOL) return ops_input(c, dtype, axes, 0, 2);
    return ops_input(c, dtype, axes, positive ? (whole ? 1 : 0.5) : whole ? -9 : -2, whole ? 9 : 2);
}

static void build_maps(ops_case *c) {
    ml_dtype dtype = current_dtype;
    const char *axes[3] = {current->a, current->b, current->c};
    ml_ref any[3], positive[3], test = some_input(c, ML_BOOL, current->a, false);
    double tolerance = ops_tolerance(dtype);
    for (int i = 0; i < 3; i++) {
        any[i] = some_input(c, dtype, axes[i], false);
        positive[i] = some_input(c, dtype, axes[i], true);
    }
    for (int op = 0; op < ML_OP_COUNT; op++) {
        if (ml_ops[op].op_class != ML_CLASS_MAP || op == ML_OP_CAST || op == ML_OP_RANDOM) continue;
        if (!takes(op, dtype)) continue;
        ml_ref sources[3];
        for (int i = 0; i < ml_ops[op].sources; i++) {
            sources[i] = wants_positive(op, i) ? positive[i] : any[i];
        }
        if (op == ML_OP_WHERE) sources[0] = test;
        ml_ref y = ml_graph_add(c->g, op, sources, ml_ops[op].sources, NULL, 0, NULL);
        ops_output(c, y, tolerance, "%s of %s", ml_ops[op].name, ml_dtypes[dtype].name);
    }
    static const ml_dtype to[] = {ML_BOOL, ML_I32, ML_I64, ML_BF16, ML_F16, ML_F32, ML_F64};
    for (int i = 0; i < 7; i++) {
        double loose = ml_is_narrow(to[i]) ? ops_tolerance(to[i]) : tolerance;
        ops_output(c, ml_cast(c->g, any[0], to[i]), loose, "cast of %s to %s",
                   ml_dtypes[dtype].name, ml_dtypes[to[i]].name);
    }
}

/* Casts to integers of what does not fit, and of what just does. */
static void build_casts_to_integers(ops_case *c) {
    static const double extremes[] = {0.75,   -0.75,     0x1.fep30,    -0x1.fep30,    0x1.fffffep30,
                                      0x1p31, -0x1p31,   2147483647.5, -2147483648.5, 3e9,
                                      -3e9,   0x1.fep62, 0x1p63,       -0x1p63,       1e30,
                                      -1e30,  INFINITY,  -INFINITY,    NAN,           -NAN};
    enum { EXTREMES = sizeof extremes / sizeof *extremes };
    static const ml_dtype from[] = {ML_BF16, ML_F16, ML_F32, ML_F64};
    for (int i = 0; i < 4; i++) {
        ml_ref x = ops_input(c, from[i], "d37", -2, 2);
        double *values = c->inputs[ml_graph_args(c->g, x)[0]];
        for (int e = 0; e < EXTREMES; e++) { /* as the dtype holds them */
            int64_t bits;
            ops_store(from[i], &bits, 0, extremes[e]);
            values[e] = ops_fetch(from[i], &bits, 0);
        }
        for (ml_dtype to = ML_I32; to <= ML_I64; to++)
            ops_output(c, ml_cast(c->g, x, to), 0, "cast of extreme %s to %s",
                       ml_dtypes[from[i]].name, ml_dtypes[to].name);
    }
}

OPS_TEST(casts_to_integers) {
    ops_run(build_casts_to_integers, 60, OPS_UNFUSED);
}

static void run_dtype(ml_dtype dtype, int arrangements_used, int flags) {
    for (int i = 0; i < arrangements_used; i++) {
        current = &arrangements[(dtype + i) % ARRANGEMENTS];
        current_dtype = dtype;
        current_seed = (uint64_t)(dtype * 10 + i);
        ops_run(build_maps, current_seed, i == 0 ? flags : 0);
    }
}

OPS_TEST(map_bool) {
    run_dtype(ML_BOOL, 1, 0);
}
OPS_TEST(map_i32) {
    run_dtype(ML_I32, 1, 0);
}
OPS_TEST(map_i64) {
    run_dtype(ML_I64, 1, 0);
}
OPS_TEST(map_bf16) {
    run_dtype(ML_BF16, 2, 0);
}
OPS_TEST(map_f16) {
    run_dtype(ML_F16, 2, 0);
}
OPS_TEST(map_f32) {
    run_dtype(ML_F32, ARRANGEMENTS, OPS_UNFUSED);
}
OPS_TEST(map_f64) {
    run_dtype(ML_F64, 1, 0);
}

/* Gradients of all differentiable elementwise ops in one program. */
static void build_gradients(ops_case *c) {
    ml_dtype dtype = current_dtype;
    const char *axes[3] = {current->a, current->b, current->c};
    ml_ref any[3], positive[3], test = some_input(c, ML_BOOL, current->a, false), total = 0;
    for (int i = 0; i < 3; i++) {
        any[i] = some_input(c, dtype, axes[i], false);
        positive[i] = some_input(c, dtype, axes[i], true);
    }
    for (int op = 0; op < ML_OP_COUNT; op++) {
        ml_dtype_rule rule = ml_ops[op].rule;
        if (ml_ops[op].op_class != ML_CLASS_MAP || op == ML_OP_CAST || op == ML_OP_RANDOM) continue;
        if (rule == ML_RULE_TEST || rule == ML_RULE_LOGIC) continue;
        ml_ref sources[3];
        for (int i = 0; i < ml_ops[op].sources; i++) {
            sources[i] = wants_positive(op, i) ? positive[i] : any[i];
        }
        if (op == ML_OP_WHERE) sources[0] = test;
        ml_ref y = ml_graph_add(c->g, op, sources, ml_ops[op].sources, NULL, 0, NULL);
        ml_ref loss = ops_loss(c, y);
        total = total ? ml_map2(c->g, ML_OP_ADD, total, loss) : loss;
    }
    ml_ref wrt[6] = {any[0], any[1], any[2], positive[0], positive[1], positive[2]}, gradients[6];
    double tolerance = dtype == ML_BF16 ? 5e-2 : 20 * ops_tolerance(dtype);
    ops_output(c, total, tolerance, "loss");
    ml_autodiff(c->g, total, wrt, 6, gradients);
    for (int i = 0; i < 6; i++) {
        if (gradients[i]) ops_output(c, gradients[i], tolerance, "gradient of operand %d", i);
    }
}

OPS_TEST(map_gradients) {
    static const ml_dtype dtypes[] = {ML_F32, ML_F64, ML_BF16, ML_F16};
    for (int i = 0; i < 4; i++) {
        current = &arrangements[2 * i % ARRANGEMENTS];
        current_dtype = dtypes[i];
        ops_run(build_gradients, 70 + (uint64_t)i, 0);
    }
}

static void build_random(ops_case *c) {
    ml_ref key = ml_const_int(c->g, ML_I64, 1234567890123456789), keys[2] = {key, 0};
    keys[1] = ml_cast(c->g, ops_index(c, "", 1000), ML_I64);
    ml_type type = ops_type(c, ML_F32, "b3 s5 d7"), other = ops_type(c, ML_F32, "d7 b3 s5");
    for (int i = 0; i < 2; i++) {
        ml_ref r = ml_graph_add(c->g, ML_OP_RANDOM, &keys[i], 1, NULL, 0, &type);
        ops_output(c, r, 0, "random %d", i);
        /* the index counts in the node's own order, wherever it is used */
        ml_ref turned = ml_permute(c->g, r, &other);
        ops_output(c, ml_map1(c->g, ML_OP_NEG, turned), 0, "random %d, turned", i);
        ml_ref part = ml_slice(c->g, r, ops_axis(c, "s"), 2, 4);
        ops_output(c, ml_map1(c->g, ML_OP_NEG, part), 0, "random %d, sliced", i);
    }
    ml_ref iota = ml_iota(c->g, ops_axis(c, "n"), 11);
    ops_output(c, ml_map2(c->g, ML_OP_MUL, iota, iota), 0, "iota");
}

OPS_TEST(random_and_iota) {
    ops_run(build_random, 4, OPS_UNFUSED);
}
