/* Kernels for CUDA, the source: instructions that need less text than their own. */
#include "codegen/emit/cuda_print.h"

/* They are gathered in pairs, as they are in packs: t; of a whole pass: a. */
static bool print_largest_start(const cuda_schedule *s, int i) {
    if (s->largest[i] < 0 || s->online_sum >= 0) return false;
    ml_text_add(&s->e->text, "unsigned t%d = 0xff80ff80u;\n", i);
    return true;
}

void cuda_print_largest_end(const cuda_schedule *s, int phase) {
    for (int i = 0; i < s->e->ir->inst_count; i++)
        if (s->largest[i] >= 0 && s->e->phase[i] == phase)
            ml_text_add(&s->e->text, "const %s a%d = ml_pair_max(t%d);\n",
                        emit_compute_type(cuda_accumulator_dtype(s, i)), i, i);
}

/* In a pack in which all one-hot predicates are false: what is simpler then. */
static bool print_all_false(const cuda_schedule *s, int i) {
    emitter *e = s->e;
    const ml_inst *inst = &e->ir->inst[i];
    const char *value = NULL;
    if (inst->kind == ML_INST_REDUCE)
        return inst->op == ML_OP_SUM && s->zero_elsewhere[inst->src[0]];
    if (inst->kind != ML_INST_MAP) return false;
    if (s->one_hot[i] >= 0) value = "0";
    if (inst->op == ML_OP_WHERE && s->one_hot[inst->src[0]] >= 0)
        value = emit_name(e, inst->src[2]);
    if (inst->op == ML_OP_ADD && s->zero_elsewhere[inst->src[0]])
        value = emit_name(e, inst->src[1]);
    if (inst->op == ML_OP_ADD && s->zero_elsewhere[inst->src[1]])
        value = emit_name(e, inst->src[0]);
    if (value == NULL) return false;
    ml_text_add(&e->text, "const %s v%d = %s;\n", emit_compute_type((ml_dtype)inst->dtype), i,
                value);
    return true;
}

/* The product of an in-place value and one of the row: the latter takes the power of two. */
static bool print_in_place_product(const cuda_schedule *s, int i) {
    emitter *e = s->e;
    const ml_inst *inst = &e->ir->inst[i];
    if (s->in_place < 0 || inst->kind != ML_INST_MAP || inst->op != ML_OP_MUL) return false;
    int side = inst->src[1] == s->in_place;
    if (inst->src[side] != s->in_place || e->depth[inst->src[1 - side]] >= e->ir->row_loops)
        return false;
    ml_text_add(&e->text, "const float v%d = %s * down * h%d;\n", i,
                emit_name(e, inst->src[1 - side]), s->in_place);
    return true;
}

bool cuda_print_simpler(const cuda_schedule *s, int i) {
    return (s->at.all_false && print_all_false(s, i)) || print_in_place_product(s, i);
}

void cuda_print_accumulators(const cuda_schedule *s, int phase) {
    for (int i = 0; i < s->e->ir->inst_count; i++)
        if (ml_inst_reduces_row(&s->e->ir->inst[i]) && s->e->phase[i] == phase &&
            !print_largest_start(s, i))
            cuda_print_accumulator(s, i);
}
