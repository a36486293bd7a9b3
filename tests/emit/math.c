/* Elementwise functions of C kernels against their definitions in float64, over all of f32. */
#include <math.h>
#include <stdio.h>

#include "runtime/graph/reference.h"
#include "tests/emit/ir.h"
#include "tests/test.h"

enum { SAMPLES = 40000, SPECIAL = 24 };

typedef struct {
    ml_op op;
    double units;     /* of the last place, largest error of a finite result */
    double low, high; /* of |x| */
    bool small;       /* subnormal results and the sign of 0 count */
} math_case;

/* What differs from 4 units over all numbers. */
static const math_case known[] = {
    {ML_OP_EXP, 2, 1e-9, 110},     {ML_OP_EXPM1, 2, 1e-45, 110, true},
    {ML_OP_LOG, 2, 1e-37, 1e38},   {ML_OP_LOG1P, 1, 1e-45, 1e38, true},
    {ML_OP_SQRT, 1, 1e-37, 1e38},  {ML_OP_RSQRT, 2, 1e-37, 1e38},
    {ML_OP_SIN, 2, 1e-9, 1e9},     {ML_OP_COS, 2, 1e-9, 1e9},
    {ML_OP_TANH, 3, 1e-30, 100},   {ML_OP_ERF, 4, 1e-30, 100},
    {ML_OP_SIGMOID, 4, 1e-30, 80}, {ML_OP_ABS, 0, 1e-37, 1e38},
    {ML_OP_SIGN, 0, 1e-37, 1e38},  {ML_OP_FLOOR, 0, 1e-9, 1e12},
    {ML_OP_CEIL, 0, 1e-9, 1e12},   {ML_OP_ROUND, 0, 1e-9, 1e12},
};

/* A case for each elementwise op of one number; how many. */
static int all_cases(math_case *cases) {
    int count = 0;
    for (int op = 0; op < ML_OP_COUNT; op++) {
        bool number = ml_ops[op].rule == ML_RULE_FLOAT || ml_ops[op].rule == ML_RULE_ARITH;
        if (!ml_op_is_map(op) || ml_ops[op].sources != 1 || !number) continue;
        cases[count] = (math_case){(ml_op)op, 4, 0x1p-149, 0x1.fffffep127, true};
        for (size_t i = 0; i < sizeof known / sizeof *known; i++)
            if (known[i].op == (ml_op)op) cases[count] = known[i];
        count++;
    }
    return count;
}

static void build(ir_kernel *k, ml_op op) {
    ir_init(k, 1, 1, (int64_t[]){SAMPLES});
    int x = ir_operand(k, ML_F32, NULL, false), y = ir_operand(k, ML_F32, NULL, true);
    ir_store(k, y, ir_map(k, op, ML_F32, ir_load(k, x, ML_F32), ML_NO_INST, ML_NO_INST));
}

/* Both signs, magnitudes spread evenly in the exponent; then the special values. */
static void fill(ir_kernel *k, const math_case *c) {
    static const float special[SPECIAL] = {
        0.0f,     -0.0f,       INFINITY,     -INFINITY,      NAN,         1.0f,
        -1.0f,    88.9f,       -104.0f,      0.5f,           0x1p-149f,   -0x1p-149f,
        0x1p126f, -0x1.8p-127, 0x1.fffffep1, -0x1.fffffep-1, 88.7228394f, 0x1.fffffep127f,
        1e-8f,    -1e-8f,      -17.4f,       -0.9f,          -0x1p126f,   -0x1.fffffep127f};
    ir_fill(k, 1);
    for (int i = 0; i < SAMPLES; i++) {
        double t = (double)(i / 2) / (SAMPLES / 2);
        double x = c->low * pow(c->high / c->low, t);
        ir_set(k, 0, i, i % 2 == 0 ? x : -x);
    }
    for (int i = 0; i < SPECIAL; i++) ir_set(k, 0, i, special[i]);
}

/* Up to here the reduction of sines' arguments keeps its digits; beyond it the bounds hold. */
static const double sines_to = 1e15;

static double error_in_units(const math_case *c, double x, double got) {
    double exact = reference_map(c->op, ML_F32, ML_F32, &(reference_cell){.number = x}).number;
    bool sine = c->op == ML_OP_SIN || c->op == ML_OP_COS;
    if (sine && isfinite(x) && fabs(x) > sines_to) return fabs(got) <= 1 ? 0 : INFINITY;
    if (isnan(exact)) return isnan(got) ? 0 : INFINITY;
    if (c->small && signbit(got) != signbit(exact)) return INFINITY;
    if ((float)exact == (float)got) return 0;
    if (!c->small && fabs(exact) < 1.2e-38) return fabs(got) < 1.2e-38 ? 0 : INFINITY;
    int exponent = ilogb(exact) < -126 ? -126 : ilogb(exact);
    return fabs(got - exact) / ldexp(1, exponent - 23);
}

static void check_case(const math_case *c, const ml_kernel *kernel, ml_c_function *function) {
    ir_kernel k;
    build(&k, c->op);
    fill(&k, c);
    char *pointers[] = {k.memory[0], k.memory[1]};
    long long scalars[] = {kernel->scalar[0], kernel->scalar[1]};
    function(pointers, scalars, 0, kernel->units);
    double worst = 0, where = 0;
    for (int i = 0; i < SAMPLES; i++) {
        double x = ir_get(&k, 0, i), e = error_in_units(c, x, ir_get(&k, 1, i));
        if (e > worst) worst = e, where = x;
    }
    if (worst > c->units)
        fprintf(stderr, "%s: %.2f units off at %.9g\n", ml_ops[c->op].name, worst, where);
    CHECK(worst <= c->units);
    ir_free(&k);
}

TEST(emit, math_functions) {
    ml_arena *arena = ml_arena_new();
    ml_target target = {.kind = ML_TARGET_C, .threads = 2, .vector_bytes = 32};
    math_case cases[ML_OP_COUNT];
    int count = all_cases(cases);
    ml_kernel *kernels[ML_OP_COUNT];
    ml_c_function *functions[ML_OP_COUNT];
    for (int i = 0; i < count; i++) {
        ir_kernel k;
        build(&k, cases[i].op);
        kernels[i] = ML_NEW(arena, ml_kernel);
        ml_emit(&k.ir, &target, arena, kernels[i]);
    }
    ml_jit_c *jit;
    ml_status status = ml_jit_c_load(kernels, count, NULL, &jit, functions);
    CHECK_TEXT(status == ML_OK ? "" : ml_error_last()->text, "");
    for (int i = 0; i < count && status == ML_OK; i++)
        check_case(&cases[i], kernels[i], functions[i]);
    ml_jit_c_free(jit);
    ml_arena_free(arena);
}
