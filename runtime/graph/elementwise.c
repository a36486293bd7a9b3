/* What elementwise ops compute: the columns REAL and WHOLE of ops.def, in float64 and int64, for
 * the interpreter and for folding constants. */
#include <math.h>

#include "runtime/graph/infer.h"
#include "runtime/graph/reference.h"

/* Integers: quotients round towards minus infinity; a zero divisor gives 0. */
static int64_t divide_down_int(int64_t a, int64_t b) {
    if (b == 0) return 0;
    if (b == -1) return (int64_t)(0 - (uint64_t)a);
    return a / b - (a % b != 0 && (a < 0) != (b < 0));
}

static int64_t modulo_int(int64_t a, int64_t b) {
    if (b == 0 || b == -1) return 0;
    int64_t rest = a % b;
    return rest && (rest < 0) != (b < 0) ? rest + b : rest;
}

/* The quotient may have been rounded up to an integer: then the rest has the wrong sign. */
static double divide_down(double a, double b) {
    double q = floor(a / b), rest = q == 0 ? a : fma(-q, b, a);
    return rest != 0 && (rest < 0) != (b < 0) ? q - 1 : q;
}

static double modulo(double a, double b) {
    double rest = fmod(a, b);
    return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}

static double larger(double a, double b) {
    return isnan(a) || a > b ? a : b;
}

static double smaller(double a, double b) {
    return isnan(a) || a < b ? a : b;
}

/* Of the lower 16 bits of an f32, as a fraction, and b: a carry of their sum rounds up. */
static double stochastic_bf16(double a, double b) {
    union {
        float value;
        uint32_t bits;
    } x = {(float)a};
    uint32_t draw = b > 0 ? (b < 1 ? (uint32_t)((float)b * 65536) : 65535) : 0;
    if (!isfinite(x.value)) return x.value;
    x.bits = (x.bits + draw) & 0xffff0000u;
    return x.value;
}

/* A result is a double, or an integer for tests and logic. */
#define RESULT_ARITH(value) (x.number = (value))
#define RESULT_FLOAT(value) (x.number = (value))
#define RESULT_TEST(value) (x.integer = (value))
#define RESULT_LOGIC(value) (x.integer = (value))
#define RESULT_OWN(value) (void)(value)
#define RESULT_SAME(value) (void)(value)
#define NONE (known = false, 0)

static bool map_float(ml_map_op op, double a, double b, reference_cell *result) {
    reference_cell x = {0};
    bool known = true;
    switch (op) {
#define ML_MAP(ident, name, sources, rule, flops, linear, traits, kernel, real, whole, ...)        \
    case ML_OP_##ident:                                                                            \
        RESULT_##rule(real);                                                                       \
        break;
#include "runtime/graph/ops.def"
#undef ML_MAP
    case ML_OP_RANDOM: known = false; break;
    }
    *result = x;
    return known;
}

static bool map_integer(ml_map_op op, int64_t a, int64_t b, reference_cell *result) {
    const uint64_t ua = (uint64_t)a, ub = (uint64_t)b;
    int64_t x = 0;
    bool known = true;
    switch (op) {
#define ML_MAP(ident, name, sources, rule, flops, linear, traits, kernel, real, whole, ...)        \
    case ML_OP_##ident:                                                                            \
        x = whole;                                                                                 \
        break;
#include "runtime/graph/ops.def"
#undef ML_MAP
    case ML_OP_RANDOM: known = false; break;
    }
    result->integer = x;
    return known;
}

/* On operands of dtype `from`; false where the op has no value for them. */
static bool map_value(ml_op op, ml_dtype from, const reference_cell *x, reference_cell *result) {
    bool binary = ml_ops[op].sources > 1;
    if (ml_is_float(from))
        return map_float((ml_map_op)op, x[0].number, binary ? x[1].number : 0, result);
    return map_integer((ml_map_op)op, x[0].integer, binary ? x[1].integer : 0, result);
}

static reference_cell cast(ml_dtype to, ml_dtype from, reference_cell x) {
    reference_cell y = x;
    switch (ml_dtypes[to].kind) {
    case ML_KIND_FLOAT:
        if (!ml_is_float(from)) y.number = (double)x.integer;
        break;
    case ML_KIND_BOOL: y.integer = ml_is_float(from) ? x.number != 0 : x.integer != 0; break;
    case ML_KIND_INT:
        if (ml_is_float(from)) y.integer = fold_truncate(to, x.number);
        break;
    }
    return y;
}

reference_cell reference_map(ml_op op, ml_dtype dtype, ml_dtype from, const reference_cell *x) {
    reference_cell y;
    if (op == ML_OP_WHERE) return x[0].integer ? x[1] : x[2];
    if (op == ML_OP_CAST) return cast(dtype, from, x[0]);
    if (op == ML_OP_STOP_GRADIENT) return x[0];
    if (!map_value(op, from, x, &y))
        ml_raise(ML_INTERNAL, "%s has no value for %s", ml_ops[op].name, ml_dtypes[from].name);
    return y;
}

int64_t fold_truncate(ml_dtype to, double x) {
    double limit = to == ML_I32 ? 0x1p31 : 0x1p63;
    if (isnan(x)) return 0;
    if (x >= limit) return to == ML_I32 ? INT32_MAX : INT64_MAX;
    if (x <= -limit) return to == ML_I32 ? INT32_MIN : INT64_MIN;
    return (int64_t)x;
}

bool fold_map(ml_op op, ml_dtype operands, ml_dtype result, const double *values, double *value) {
    const double exact = 0x1p53; /* integers are folded as doubles */
    ml_dtype_kind kind = ml_dtypes[operands].kind, gives = ml_dtypes[result].kind;
    reference_cell x[2] = {0}, y;
    for (int i = 0; i < ml_ops[op].sources; i++) {
        if (kind == ML_KIND_INT && fabs(values[i]) >= exact) return false;
        if (kind == ML_KIND_FLOAT)
            x[i].number = values[i];
        else
            x[i].integer = (int64_t)values[i];
    }
    if ((op == ML_OP_IDIV || op == ML_OP_MOD) && kind == ML_KIND_INT && x[1].integer == 0)
        return false; /* left to be seen where it runs */
    if (op == ML_OP_CAST)
        y = cast(result, operands, x[0]);
    else if (!map_value(op, operands, x, &y))
        return false;
    double out = gives == ML_KIND_FLOAT ? y.number : (double)y.integer;
    double limit = result == ML_I32 ? 0x1p31 : exact;
    if (gives == ML_KIND_INT && !(out >= -limit && out < limit)) return false;
    *value = gives == ML_KIND_FLOAT && result != ML_F64 ? (double)(float)out : out;
    return true;
}
