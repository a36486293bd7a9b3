/* Elementwise ops on constants. */
#include <math.h>

#include "runtime/graph/infer.h"
#include "runtime/passes/passes.h"

static bool fold_int(ml_op op, const double *v, double *out) {
    int64_t a = (int64_t)v[0], b = (int64_t)v[1];
    switch (op) { /* through uint64: integers wrap around */
    case ML_OP_NEG: *out = (double)(int64_t)(0 - (uint64_t)a); return true;
    case ML_OP_ADD: *out = (double)(int64_t)((uint64_t)a + (uint64_t)b); return true;
    case ML_OP_SUB: *out = (double)(int64_t)((uint64_t)a - (uint64_t)b); return true;
    case ML_OP_MUL: *out = (double)(int64_t)((uint64_t)a * (uint64_t)b); return true;
    case ML_OP_MAXIMUM: *out = (double)(a > b ? a : b); return true;
    case ML_OP_MINIMUM: *out = (double)(a < b ? a : b); return true;
    case ML_OP_IDIV:
        if (b == 0) return false;
        *out = floor(v[0] / v[1]);
        return true;
    case ML_OP_MOD:
        if (b == 0) return false;
        *out = v[0] - v[1] * floor(v[0] / v[1]);
        return true;
    default: return false;
    }
}

static bool fold_float(ml_op op, const double *v, double *out) {
    double a = v[0], b = v[1];
    switch (op) {
    case ML_OP_NEG: *out = -a; return true;
    case ML_OP_ADD: *out = a + b; return true;
    case ML_OP_SUB: *out = a - b; return true;
    case ML_OP_MUL: *out = a * b; return true;
    case ML_OP_DIV: *out = a / b; return true;
    case ML_OP_POW: *out = pow(a, b); return true;
    case ML_OP_MAXIMUM: *out = isnan(a) || a > b ? a : b; return true;
    case ML_OP_MINIMUM: *out = isnan(a) || a < b ? a : b; return true;
    case ML_OP_EXP: *out = exp(a); return true;
    case ML_OP_EXPM1: *out = expm1(a); return true;
    case ML_OP_LOG: *out = log(a); return true;
    case ML_OP_LOG1P: *out = log1p(a); return true;
    case ML_OP_SQRT: *out = sqrt(a); return true;
    case ML_OP_RSQRT: *out = 1 / sqrt(a); return true;
    case ML_OP_ABS: *out = fabs(a); return true;
    case ML_OP_FLOOR: *out = floor(a); return true;
    case ML_OP_CEIL: *out = ceil(a); return true;
    default: return false;
    }
}

static bool fold_test(ml_op op, const double *v, double *out) {
    double a = v[0], b = v[1];
    switch (op) {
    case ML_OP_EQ: *out = a == b; return true;
    case ML_OP_NE: *out = a != b; return true;
    case ML_OP_LT: *out = a < b; return true;
    case ML_OP_LE: *out = a <= b; return true;
    case ML_OP_GT: *out = a > b; return true;
    case ML_OP_GE: *out = a >= b; return true;
    case ML_OP_AND: *out = a && b; return true;
    case ML_OP_OR: *out = a || b; return true;
    case ML_OP_NOT: *out = !a; return true;
    case ML_OP_IS_FINITE: *out = isfinite(a); return true;
    default: return false;
    }
}

int64_t fold_truncate(ml_dtype to, double x) {
    double limit = to == ML_I32 ? 0x1p31 : 0x1p63;
    if (isnan(x)) return 0;
    if (x >= limit) return to == ML_I32 ? INT32_MAX : INT64_MAX;
    if (x <= -limit) return to == ML_I32 ? INT32_MIN : INT64_MIN;
    return (int64_t)x;
}

bool fold_map(ml_op op, ml_dtype operands, ml_dtype result, const double *values, double *value) {
    enum { EXACT_BITS = 53 }; /* integers are folded as doubles */
    ml_dtype_kind kind = ml_dtypes[operands].kind;
    if (kind == ML_KIND_INT)
        for (int i = 0; i < ml_ops[op].sources; i++)
            if (fabs(values[i]) >= ldexp(1, EXACT_BITS)) return false;
    double out = 0;
    if (result == ML_BOOL && op != ML_OP_CAST) {
        if (!fold_test(op, values, &out)) return false;
    } else if (op == ML_OP_CAST)
        out = result == ML_BOOL ? values[0] != 0 : values[0];
    else if (kind == ML_KIND_INT ? !fold_int(op, values, &out) : !fold_float(op, values, &out))
        return false;
    if (ml_dtypes[result].kind == ML_KIND_INT) {
        if (kind == ML_KIND_FLOAT) out = (double)fold_truncate(result, out);
        double limit = result == ML_I32 ? 0x1p31 : ldexp(1, EXACT_BITS);
        if (!(out >= -limit && out < limit)) return false;
    }
    *value = result == ML_F32 || result == ML_BF16 ? (double)(float)out : out;
    return true;
}
