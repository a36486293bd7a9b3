/* Kernels for CUDA: instructions that need less text than their own. */
#include "codegen/emit_cuda.h"

/* In a pack that no comparison of columns hits: what is simpler then. */
static bool print_missed(const cuda_shape *s, int i) {
    emitter *e = s->e;
    const ml_inst *inst = &e->ir->inst[i];
    const char *value = NULL;
    if (inst->kind == ML_INST_REDUCE) return inst->op == ML_OP_SUM && s->zero[inst->src[0]];
    if (inst->kind != ML_INST_MAP) return false;
    if (s->hit[i] >= 0) value = "0";
    if (inst->op == ML_OP_WHERE && s->hit[inst->src[0]] >= 0) value = emit_name(e, inst->src[2]);
    if (inst->op == ML_OP_ADD && s->zero[inst->src[0]]) value = emit_name(e, inst->src[1]);
    if (inst->op == ML_OP_ADD && s->zero[inst->src[1]]) value = emit_name(e, inst->src[0]);
    if (value == NULL) return false;
    ml_text_add(&e->text, "const %s v%d = %s;\n", emit_compute_type((ml_dtype)inst->dtype), i,
                value);
    return true;
}

/* exp(x - y) of a row's y: by one instruction less an element. */
static bool print_exp(const cuda_shape *s, int i) {
    emitter *e = s->e;
    const ml_inst *inst = &e->ir->inst[i];
    if (!s->quick || inst->kind != ML_INST_MAP || inst->op != ML_OP_EXP || inst->dtype != ML_F32)
        return false;
    const ml_inst *from = &e->ir->inst[inst->src[0]];
    if (from->kind != ML_INST_MAP || from->op != ML_OP_SUB || s->elementwise ||
        e->place[from->src[1]] >= e->ir->row_loops)
        return false;
    ml_text_add(&e->text, "const float v%d = ml_quick_exp_less(%s, %s);\n", i,
                emit_name(e, from->src[0]), emit_name(e, from->src[1]));
    return true;
}

bool cuda_print_simpler(const cuda_shape *s, int i) {
    return (s->missed && print_missed(s, i)) || print_exp(s, i);
}
