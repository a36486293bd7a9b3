/* Texts of types, numbers, values and offsets, in C and CUDA alike. */
#include "codegen/emit/emit_internal.h"

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

void emit_offset(emitter *e, ml_text *out, const ml_operand *operand, int first, int last,
                 int skip) {
    for (int loop = first; loop <= last; loop++) {
        int64_t stride = operand->stride[loop];
        if (stride == 0 || loop == skip || strcmp(e->index[loop], "0LL") == 0) continue;
        if (stride == 1)
            ml_text_add(out, " + %s", e->index[loop]);
        else
            ml_text_add(out, " + %s * %lld", e->index[loop], (long long)stride);
    }
}

const char *emit_name(emitter *e, int inst) {
    const ml_inst *value = &e->ir->inst[inst];
    if (value->kind != ML_INST_CONST) return ml_arena_format(e->arena, "v%d", inst);
    if (e->scalar[inst] > 0)
        return ml_arena_format(e->arena, "%ss[%d]", e->target.kind == ML_TARGET_CUDA ? "a." : "",
                               e->scalar[inst]);
    ml_text text = {.arena = e->arena};
    emit_constant(&text, (ml_dtype)value->dtype, value->constant.number, value->constant.integer);
    return text.text;
}

void emit_value(emitter *e, ml_text *out, int i) {
    const ml_inst *inst = &e->ir->inst[i];
    if (inst->kind == ML_INST_CONST) return;
    ml_text_add(out, "const %s v%d = ", emit_compute_type((ml_dtype)inst->dtype), i);
    if (inst->kind == ML_INST_INDEX) {
        ml_text_add(out, "%s;\n", e->index[inst->operand]);
        return;
    }
    const char *operands[3] = {"", "", ""};
    FOR_EACH_SOURCE(inst, source) operands[source_at] = emit_name(e, source);
    ml_dtype from = (ml_dtype)e->ir->inst[inst->src[0]].dtype, to = (ml_dtype)inst->dtype;
    if (e->exact[i]) to = from == ML_F64 ? ML_F32 : from;
    ml_emit_map(out, (ml_op)inst->op, to, from, operands);
    ml_text_add(out, ";\n");
}
