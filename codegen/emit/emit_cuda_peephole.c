/* Kernels for CUDA: instructions that need less text than their own. */
#include "codegen/emit/emit_cuda.h"

static bool is_column_number(const cuda_shape *s, int i) {
    const ml_inst *inst = &s->e->ir->inst[i];
    if (inst->kind == ML_INST_MAP && inst->op == ML_OP_CAST &&
        ml_dtypes[inst->dtype].kind == ML_KIND_INT)
        return is_column_number(s, inst->src[0]);
    return inst->kind == ML_INST_INDEX && inst->operand == s->e->inner;
}

/* Maxima of bf16 elements themselves: two are compared by one instruction. */
void cuda_find_largest(cuda_shape *s) {
    const ml_kernel_ir *ir = s->e->ir;
    for (int i = 0; i < ir->inst_count; i++) {
        s->largest[i] = -1;
        if (!ml_inst_reduces_row(&ir->inst[i]) || ir->inst[i].op != ML_OP_MAX || s->vec == 1 ||
            ml_dtypes[ir->inst[i].dtype].kind != ML_KIND_FLOAT || s->e->target.arch < 80)
            continue;
        int from = ir->inst[i].src[0];
        if (ir->inst[from].kind == ML_INST_MAP && ir->inst[from].op == ML_OP_CAST)
            from = ir->inst[from].src[0];
        if (ir->inst[from].kind == ML_INST_LOAD && s->pack[from] >= 0 &&
            ir->operand[ir->inst[from].operand].dtype == ML_BF16)
            s->largest[i] = s->pack[from];
    }
}

/* They are gathered by twos, as they lie in packs: t; of a whole pass: a. */
bool cuda_print_largest_start(const cuda_shape *s, int i) {
    if (s->largest[i] < 0 || s->online >= 0) return false;
    ml_text_add(&s->e->text, "unsigned t%d = 0xff80ff80u;\n", i);
    return true;
}

void cuda_print_largest_end(const cuda_shape *s, int stage) {
    for (int i = 0; i < s->e->ir->inst_count; i++)
        if (s->largest[i] >= 0 && s->e->stage[i] == stage)
            ml_text_add(&s->e->text, "const %s a%d = ml_pair_max(t%d);\n",
                        emit_compute_type(cuda_accumulator_dtype(s, i)), i, i);
}

/* Comparisons of the column's number with what a row has one of. */
void cuda_find_hits(cuda_shape *s) {
    const emitter *e = s->e;
    for (int i = 0; i < e->ir->inst_count; i++) {
        const ml_inst *inst = &e->ir->inst[i];
        s->hit[i] = -1;
        if (inst->kind != ML_INST_MAP || s->vec == 1 || s->elementwise) continue;
        for (int side = 0; side < 2 && inst->op == ML_OP_EQ; side++) {
            int other = inst->src[1 - side];
            if (is_column_number(s, inst->src[side]) && e->place[other] < e->ir->row_loops &&
                ml_dtypes[e->ir->inst[other].dtype].kind == ML_KIND_INT)
                s->hit[i] = other;
        }
        if (inst->op == ML_OP_WHERE && s->hit[inst->src[0]] >= 0) {
            const ml_inst *other = &e->ir->inst[inst->src[2]];
            s->zero[i] = other->kind == ML_INST_CONST && other->constant.integer == 0;
        }
        if (inst->op == ML_OP_CAST) s->zero[i] = s->zero[inst->src[0]];
    }
}

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
        e->depth[from->src[1]] >= e->ir->row_loops)
        return false;
    ml_text_add(&e->text, "const float v%d = ml_quick_exp_less(%s, %s);\n", i,
                emit_name(e, from->src[0]), emit_name(e, from->src[1]));
    return true;
}

/* The product of a folded value and one of the row: the latter takes the power of two. */
static bool print_folded_product(const cuda_shape *s, int i) {
    emitter *e = s->e;
    const ml_inst *inst = &e->ir->inst[i];
    if (s->folded < 0 || inst->kind != ML_INST_MAP || inst->op != ML_OP_MUL) return false;
    int side = inst->src[1] == s->folded;
    if (inst->src[side] != s->folded || e->depth[inst->src[1 - side]] >= e->ir->row_loops)
        return false;
    ml_text_add(&e->text, "const float v%d = %s * down * h%d;\n", i,
                emit_name(e, inst->src[1 - side]), s->folded);
    return true;
}

bool cuda_print_simpler(const cuda_shape *s, int i) {
    return (s->missed && print_missed(s, i)) || print_exp(s, i) || print_folded_product(s, i);
}
