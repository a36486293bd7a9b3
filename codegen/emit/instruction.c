/* Texts of instructions, in C and CUDA alike: offsets, names, values. */
#include "codegen/emit/emit_internal.h"

#include <string.h>

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
    bool casts = inst->op == ML_OP_CAST, rounds = emit_rounds(inst) && !casts && !e->exact[i];
    if (casts && e->exact[i]) to = from == ML_F64 ? ML_F32 : from;
    if (rounds) ml_text_add(out, "ml_round_%s(", ml_dtypes[to].name);
    if (inst->quick)
        ml_text_add(out, "ml_quick_%s_f32(%s)", ml_ops[inst->op].name, operands[0]);
    else
        ml_emit_map(out, (ml_op)inst->op, to, from, operands);
    ml_text_add(out, rounds ? ");\n" : ";\n");
}

void emit_print_marked(ml_text *out, const char *name, const bool *marks, int count) {
    bool any = false;
    for (int i = 0; i < count; i++) {
        if (!marks[i]) continue;
        if (!any) ml_text_add(out, "    %s", name);
        ml_text_add(out, " %%%d", i);
        any = true;
    }
    if (any) ml_text_add(out, "\n");
}
