/* Texts of types and numbers, in C and CUDA alike. */
#include "codegen/emit/emit.h"

#include <math.h>
#include <string.h>

const char *emit_compute_type(ml_dtype dtype) {
    return ml_dtypes[ml_compute_dtype(dtype)].memory;
}

const char *emit_memory_type(ml_dtype dtype) {
    return ml_dtypes[dtype].memory;
}

/* Nine (seventeen) significant digits give back the same float (double). */
void emit_constant(ml_text *out, ml_dtype dtype, double number, int64_t integer) {
    if (ml_dtypes[dtype].kind != ML_KIND_FLOAT) {
        if (dtype != ML_I64)
            ml_text_add(out, integer < 0 ? "(%d)" : "%d", (int)integer);
        else if (integer == INT64_MIN)
            ml_text_add(out, "(-9223372036854775807LL - 1)");
        else
            ml_text_add(out, integer < 0 ? "(%lldLL)" : "%lldLL", (long long)integer);
        return;
    }
    const char *open = signbit(number) ? "(" : "", *close = signbit(number) ? ")" : "";
    if (isnan(number))
        ml_text_add(out, "ML_NAN");
    else if (isinf(number) || (dtype != ML_F64 && isinf((float)number)))
        ml_text_add(out, "%s%sML_INF%s", open, number < 0 ? "-" : "", close);
    else if (dtype == ML_F64)
        ml_text_add(out, "%s%.16e%s", open, number, close);
    else
        ml_text_add(out, "%s%.8ef%s", open, (double)(float)number, close);
}

void emit_identity(ml_text *out, ml_op op, ml_dtype dtype) {
    bool is_float = ml_dtypes[dtype].kind == ML_KIND_FLOAT;
    int64_t least = dtype == ML_I64 ? INT64_MIN : INT32_MIN;
    if (op == ML_OP_SUM)
        emit_constant(out, dtype, 0.0, 0);
    else if (is_float)
        emit_constant(out, dtype, op == ML_OP_MIN ? INFINITY : -INFINITY, 0);
    else if (op == ML_OP_MIN)
        emit_constant(out, dtype, 0, ~least);
    else if (dtype == ML_I64)
        emit_constant(out, dtype, 0, least);
    else
        ml_text_add(out, "(-2147483647 - 1)");
}
