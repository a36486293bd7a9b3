/* A kernel of loops as a part of another one: what a block needs of its rows, as statements. */
#include "codegen/emit/emit_internal.h"

#include <string.h>

enum { PACK = 8 }; /* elements that a thread computes at a time */

typedef struct {
    emitter e;
    const char *const *pointers;
    bool elementwise;
} rows_printer;

static bool is_sum(const ml_inst *inst) {
    return ml_inst_reduces_row(inst) && inst->dtype == ML_F32 &&
           (inst->op == ML_OP_SUM || inst->op == ML_OP_MAX || inst->op == ML_OP_MIN);
}

/* Whether its only result is a matrix of bf16, row by row, `step` elements from one to the next. */
static bool stores_rows(const ml_kernel_ir *ir, int64_t rows, int64_t columns, int64_t step) {
    int64_t below = 1, written = 0;
    for (int o = 0; o < ir->operand_count; o++) {
        const ml_operand *operand = &ir->operand[o];
        if (!operand->written) continue;
        if (++written > 1 || operand->dtype != ML_BF16) return false;
        for (int loop = ir->loop_count; loop-- > 0; below *= ir->size[loop]) {
            const bool by_row = ir->row_loops < ir->loop_count && loop < ir->row_loops;
            const int64_t wanted = by_row ? step : below;
            if (ir->size[loop] > 1 && operand->stride[loop] != wanted) return false;
        }
    }
    return written == 1 && below == rows * columns;
}

bool emit_rows_serve(const ml_kernel_ir *ir, int64_t rows, int64_t columns, int64_t step) {
    const bool elementwise = ir->row_loops == ir->loop_count;
    int stores = 0;
    if (ir->chunks > 0 || columns % PACK != 0 || ir->loop_count == 0) return false;
    if (elementwise ? rows > 1 && step != columns
                    : ir->row_loops > 1 || ir->loop_count != ir->row_loops + 1 ||
                          ir->size[ir->loop_count - 1] != columns)
        return false;
    if (elementwise && ir->size[ir->loop_count - 1] % PACK != 0) return false;
    for (int i = 0; i < ir->inst_count; i++) {
        const ml_inst *inst = &ir->inst[i];
        stores += inst->kind == ML_INST_STORE;
        if (inst->kind == ML_INST_REDUCE && !is_sum(inst)) return false;
        if (inst->kind == ML_INST_MAP && inst->op == ML_OP_RANDOM) return false;
        if (inst->kind == ML_INST_STORE && (inst->index & inst->guard) != ML_NO_INST) return false;
    }
    return stores == 1 && stores_rows(ir, rows, columns, step);
}

/* Whether a pack of a load's elements is one in memory. */
static bool loads_pack(const rows_printer *p, const ml_inst *inst) {
    const ml_operand *operand = &p->e.ir->operand[inst->operand];
    if (inst->kind != ML_INST_LOAD || (inst->index & inst->guard) != ML_NO_INST) return false;
    for (int loop = 0; loop < p->e.inner; loop++)
        if (operand->stride[loop] % PACK != 0) return false;
    return operand->stride[p->e.inner] == 1;
}

/* Where a load reads; `inner` is the text of the innermost index. */
static const char *address(rows_printer *p, const ml_inst *inst, const char *inner) {
    emitter *e = &p->e;
    const ml_operand *operand = &e->ir->operand[inst->operand];
    const char *index = e->index[e->inner];
    ml_text at = {.arena = e->arena};
    ml_text_add(&at, "(const %s *)%s", emit_memory_type((ml_dtype)operand->dtype),
                p->pointers[inst->operand]);
    e->index[e->inner] = inner;
    emit_offset(e, &at, operand, 0, e->inner, -1);
    e->index[e->inner] = index;
    if (inst->index != ML_NO_INST) ml_text_add(&at, " + %s", emit_name(e, inst->index));
    return at.text;
}

static void print_load(rows_printer *p, int i) {
    emitter *e = &p->e;
    const ml_inst *inst = &e->ir->inst[i];
    const ml_dtype memory = (ml_dtype)e->ir->operand[inst->operand].dtype;
    const char *type = emit_compute_type((ml_dtype)inst->dtype);
    ml_text_add(&e->text, "const %s v%d = ", type, i);
    if (inst->guard != ML_NO_INST) ml_text_add(&e->text, "!%s ? 0 : ", emit_name(e, inst->guard));
    ml_text_add(&e->text, ml_is_narrow(memory) ? "%s(" : "(%s)(",
                ml_is_narrow(memory) ? ml_dtypes[memory].load : type);
    if (loads_pack(p, inst))
        ml_text_add(&e->text, "q%d.at[e]);\n", i);
    else
        ml_text_add(&e->text, "*(%s));\n", address(p, inst, e->index[e->inner]));
}

static void print_instruction(rows_printer *p, int i) {
    emitter *e = &p->e;
    const ml_inst *inst = &e->ir->inst[i];
    const char *source =
        inst->src[0] == ML_NO_INST || inst->kind == ML_INST_LOAD ? "" : emit_name(e, inst->src[0]);
    switch ((ml_inst_kind)inst->kind) {
    case ML_INST_LOAD: print_load(p, i); break;
    case ML_INST_STORE:
        ml_text_add(&e->text, "result.at[e] = ml_store_bf16((float)%s);\n", source);
        break;
    case ML_INST_REDUCE:
        if (inst->op == ML_OP_SUM)
            ml_text_add(&e->text, "a%d += %s;\n", i, source);
        else
            ml_text_add(&e->text, "a%d = %s %s a%d ? %s : a%d;\n", i, source,
                        inst->op == ML_OP_MAX ? ">" : "<", i, source, i);
        break;
    default: emit_value(e, &e->text, i);
    }
}

/* The loops' indices where the columns of a row from k on are computed. */
static void print_indices(rows_printer *p, int64_t columns) {
    emitter *e = &p->e;
    const ml_kernel_ir *ir = e->ir;
    int64_t below = 1;
    if (!p->elementwise) ml_text_add(&e->text, "const int base = k;\n");
    for (int loop = ir->loop_count; loop-- > 0 && p->elementwise; below *= ir->size[loop]) {
        if (strcmp(e->index[loop], "0LL") == 0) continue;
        ml_text_add(&e->text, "const int %s = (row * %lld + k)",
                    loop == e->inner ? "base" : e->index[loop], (long long)columns);
        if (below > 1) ml_text_add(&e->text, " / %lld", (long long)below);
        if (loop > 0) ml_text_add(&e->text, " %% %lld", (long long)ir->size[loop]);
        ml_text_add(&e->text, ";\n");
    }
}

/* One pass over columns k, k + 1, ...: what is computed of each. */
static void print_pack(rows_printer *p, int phase, int64_t columns) {
    emitter *e = &p->e;
    const ml_kernel_ir *ir = e->ir;
    const int outside = p->elementwise ? -1 : ir->row_loops;
    print_indices(p, columns);
    for (int i = 0; i < ir->inst_count; i++) {
        const ml_inst *inst = &ir->inst[i];
        if (!e->need[phase][i] || e->loop[i] < outside || !loads_pack(p, inst)) continue;
        const char *type = emit_memory_type((ml_dtype)ir->operand[inst->operand].dtype);
        ml_text_add(&e->text, "const row_pack<%s> q%d = *(const row_pack<%s> *)(%s);\n", type, i,
                    type, address(p, inst, "base"));
    }
    ml_text_add(&e->text, "_Pragma(\"unroll\") for (int e = 0; e < %d; e++) {\n", PACK);
    ml_text_add(&e->text, "const int %s = base + e;\n(void)%s;\n", e->index[e->inner],
                e->index[e->inner]);
    for (int i = 0; i < ir->inst_count; i++)
        if (e->need[phase][i] && e->loop[i] >= outside) print_instruction(p, i);
    ml_text_add(&e->text, "}\n");
}

/* A phase of a row: its values of rows, then its sums over all columns, or its result in those from
 * `begin` to `end`. */
static void print_phase(rows_printer *p, int phase, int64_t columns) {
    emitter *e = &p->e;
    const ml_kernel_ir *ir = e->ir;
    bool sums = false;
    for (int i = 0; i < ir->inst_count && !p->elementwise; i++)
        if (e->need[phase][i] && e->loop[i] < ir->row_loops) print_instruction(p, i);
    for (int i = 0; i < ir->inst_count; i++) {
        const ml_inst *inst = &ir->inst[i];
        if (!e->need[phase][i] || inst->kind != ML_INST_REDUCE) continue;
        ml_text_add(&e->text, "float a%d = ", i);
        emit_identity(&e->text, (ml_op)inst->op, ML_F32);
        ml_text_add(&e->text, ";\n");
        sums = true;
    }
    if (!p->elementwise && !e->passes[phase]) return;
    if (sums) {
        ml_text_add(&e->text, "for (int k = lane * %d; k < %lld; k += TEAM * %d) {\n", PACK,
                    (long long)columns, PACK);
        print_pack(p, phase, columns);
    } else {
        ml_text_add(&e->text, "for (int k = begin + lane * %d; k < end; k += TEAM * %d) {\n", PACK,
                    PACK);
        ml_text_add(&e->text, "row_pack<ml_bf16> result = {};\nif (k < %lld) {\n",
                    (long long)columns);
        print_pack(p, phase, columns);
        ml_text_add(&e->text, "}\nPUT(row, k, result);\n");
    }
    ml_text_add(&e->text, "}\n");
    for (int i = 0; i < ir->inst_count; i++) {
        const ml_inst *inst = &ir->inst[i];
        if (!e->need[phase][i] || inst->kind != ML_INST_REDUCE) continue;
        const char *by = inst->op == ML_OP_SUM ? "sum" : inst->op == ML_OP_MAX ? "max" : "min";
        ml_text_add(&e->text, "const float v%d = %s_of_team(a%d);\n", i, by, i);
    }
}

const char *emit_rows(const ml_kernel_ir *ir, const ml_target *target, const char *const *pointers,
                      int64_t columns, ml_arena *arena) {
    rows_printer p = {.e = {.ir = ir, .target = *target, .arena = arena},
                      .pointers = pointers,
                      .elementwise = ir->row_loops == ir->loop_count};
    p.e.text.arena = arena;
    emit_analyse(&p.e);
    emit_needs(&p.e);
    if (!p.elementwise && ir->row_loops > 0) ml_text_add(&p.e.text, "const int i0 = row;\n");
    for (int phase = 0; phase < p.e.phases; phase++) print_phase(&p, phase, columns);
    return p.e.text.text;
}
