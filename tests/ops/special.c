/* Elementwise ops of special values on a device: both zeros, subnormal numbers, the largest and the
 * smallest, infinities, NaN; for integers those that wrap around. Elements are compared one by one,
 * in units of the last place, zeros with their signs. A GPU takes subnormal numbers for 0. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "tests/ops/support.h"

static const double floats[] = {
    0.0,  -0.0,   INFINITY, -INFINITY, NAN,       1,        -1,      0.5,           -0.5,
    1.5,  -1.5,   2.5,      3,         -3,        7,        -7,      0.1,           0.7,
    -0.7, 10,     -10,      88.7,      -87.3,     100,      -104,    1e8,           1e20,
    1e4,  -1e-20, 0x1p-126, 0x1p-149,  -0x1p-149, 0x1p-130, 0x1p127, 0x1.fffffep127};
enum { FLOATS = sizeof floats / sizeof *floats, SUBNORMALS = 3 };
static const double narrow[] = {-0x1p31, -0x1.fffffffcp30, 0x1.fffffffcp30, 0x1p30};
static const double wide[] = {-0x1p63, -0x1p62, 0x1p62, 0x1.fffffffffffffp52};
static const double small[] = {0, 1, -1, 2, -2, 3, -3, 7, -7, 10, -10, 1000};
enum { EXTREME = 4, SMALL = sizeof small / sizeof *small };

static ml_dtype current;

/* The special values of the dtype; how many. */
static int specials(const ops_case *c, ml_dtype dtype, double *to) {
    bool gpu = ops_is_gpu(c);
    int count = 0;
    if (ml_dtypes[dtype].kind == ML_KIND_INT) {
        for (int i = 0; i < EXTREME; i++) to[count++] = dtype == ML_I32 ? narrow[i] : wide[i];
        for (int i = 0; i < SMALL; i++) to[count++] = small[i];
        return count;
    }
    for (int i = 0; i < FLOATS; i++) {
        double x = floats[i];
        if (gpu && x != 0 && fabs(x) < 0x1p-126) continue;
        int64_t bits;
        ops_store(dtype, &bits, 0, x);
        to[count++] = ops_fetch(dtype, &bits, 0); /* as the dtype holds it */
    }
    return count;
}

/* An input of the special values: along i or along j of [i, j]. */
static ml_ref special_input(ops_case *c, ml_dtype dtype, bool along_j) {
    double values[FLOATS];
    int count = specials(c, dtype, values);
    char axes[32];
    snprintf(axes, sizeof axes, "i%d j%d", count, count);
    ml_ref x = ops_input(c, dtype, axes, 0, 1);
    double *to = c->inputs[ml_graph_args(c->g, x)[0]];
    for (int i = 0; i < count * count; i++) to[i] = values[along_j ? i % count : i / count];
    return x;
}

static bool takes(ml_op op, ml_dtype dtype) {
    bool whole = ml_dtypes[dtype].kind == ML_KIND_INT;
    if (op == ML_OP_CAST || op == ML_OP_RANDOM || op == ML_OP_WHERE) return false;
    if (ml_ops[op].rule == ML_RULE_LOGIC) return false;
    return !whole || (ml_ops[op].rule != ML_RULE_FLOAT && op != ML_OP_IS_FINITE);
}

/* Errors allowed, in units of the last place. */
static double units_of(const ops_case *c, ml_op op) {
    bool gpu = ops_is_gpu(c);
    switch (op) {
    case ML_OP_DIV:
    case ML_OP_SQRT: return gpu ? 2 : 0.5;
    case ML_OP_ADD:
    case ML_OP_SUB:
    case ML_OP_MUL: return 0.5;
    case ML_OP_MOD:
    case ML_OP_IDIV: return 1; /* quotients of more than 24 bits; rest + divisor */
    default: return ml_ops[op].flops > 1 ? gpu ? 8 : 4 : 0;
    }
}

static void build_specials(ops_case *c) {
    ml_ref sources[2] = {special_input(c, current, false), special_input(c, current, true)};
    for (int op = 0; op < ML_OP_COUNT; op++) {
        if (ml_ops[op].op_class != ML_CLASS_MAP || !takes(op, current)) continue;
        ml_ref of[2] = {sources[0], sources[1]};
        if (op == ML_OP_SIN || op == ML_OP_COS) /* above 1e15 only the bounds hold */
            of[0] = ml_map2(c->g, ML_OP_MINIMUM, of[0], ml_const(c->g, current, 0x1p26));
        ml_ref y = ml_graph_add(c->g, op, of, ml_ops[op].sources, NULL, 0, NULL);
        unsigned loose = 0;
        if (op == ML_OP_TANH && ops_is_gpu(c)) loose = OPS_ANY_ZERO;
        if (op == ML_OP_MAXIMUM || op == ML_OP_MINIMUM || op == ML_OP_SIN) loose = OPS_ANY_ZERO;
        if (op == ML_OP_EXP || op == ML_OP_SIGMOID || ops_is_gpu(c)) loose |= OPS_FLUSHED;
        ops_output_units(c, y, units_of(c, op), loose, "%s of special %s", ml_ops[op].name,
                         ml_dtypes[current].name);
    }
    for (ml_dtype to = 0; to < ML_DTYPE_COUNT; to++)
        ops_output_units(c, ml_cast(c->g, sources[0], to), 0.5, ops_is_gpu(c) ? OPS_FLUSHED : 0,
                         "cast of special %s to %s", ml_dtypes[current].name, ml_dtypes[to].name);
}

static void run(ml_dtype dtype) {
    current = dtype;
    ops_run(build_specials, 80 + (uint64_t)dtype, OPS_UNFUSED);
}

OPS_TEST(special_f32) {
    run(ML_F32);
}
OPS_TEST(special_f64) {
    run(ML_F64);
}
OPS_TEST(special_bf16) {
    run(ML_BF16);
}
OPS_TEST(special_i32) {
    run(ML_I32);
}
OPS_TEST(special_i64) {
    run(ML_I64);
}
