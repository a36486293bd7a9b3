/* Kernels for CUDA, the source: indices, pointers and addresses. */
#include "codegen/emit/cuda_print.h"

#include <string.h>

const char *cuda_slot_text(const cuda_schedule *s, int pack, const char *slot) {
    ml_arena *arena = s->e->arena;
    const char *at =
        s->slots == 1 ? "" : ml_arena_format(arena, "%s * %lld + ", slot, (long long)s->slot_bytes);
    return ml_arena_format(arena, "(char *)shared + %s%lld + (it * %d + threadIdx.x) * %d", at,
                           (long long)s->shared[pack], cuda_threads(s), cuda_pack_bytes(s, pack));
}

/* The offset of an access over the loops inside `first`; at pack level the innermost index is
 * that of the pack's first element. */
const char *cuda_access_text(const cuda_schedule *s, const ml_inst *inst, bool whole_pack) {
    emitter *e = s->e;
    ml_text text = {.arena = e->arena};
    int first = s->elementwise ? e->inner : e->ir->row_loops;
    ml_text_add(&text, "r%d", inst->operand);
    emit_offset(e, &text, &e->ir->operand[inst->operand], first, e->inner,
                whole_pack ? e->inner : -1);
    if (inst->index != ML_NO_INST) ml_text_add(&text, " + %s", emit_name(e, inst->index));
    if (whole_pack) ml_text_add(&text, " + base");
    return text.text;
}

/* Indices of loops first .. last from `linear`. The innermost loop's is `base`, that of the pack's
 * first element; elementwise kernels count packs, kernels with columns count elements. */
void cuda_print_unravel(const cuda_schedule *s, const char *linear, int first, int last,
                        const char *integer) {
    emitter *e = s->e;
    const char *rest = linear;
    for (int loop = last; loop >= first; loop--) {
        bool base = loop == e->inner, trivial = strcmp(e->index[loop], "0LL") == 0, more = false;
        for (int out = first; out < loop; out++) more = more || strcmp(e->index[out], "0LL") != 0;
        int factor = base && s->elementwise ? s->vec : 1;
        long long size = (long long)e->ir->size[loop] / factor;
        const char *name = base ? "base" : ml_arena_format(e->arena, "i%d", loop);
        const char *type = base ? s->column_integer : integer;
        if (trivial && !base) continue;
        if (trivial)
            ml_text_add(&e->text, "const %s base = 0;\n", type);
        else if (!more)
            ml_text_add(&e->text, "const %s %s = (%s)%s * %d;\n", type, name, type, rest, factor);
        else
            ml_text_add(&e->text, "const %s %s = (%s)(%s %% %lld) * %d;\n", type, name, type, rest,
                        size, factor);
        if (trivial || !more) continue;
        ml_text_add(&e->text, "const %s rest%d = %s / %lld;\n", integer, loop, rest, size);
        rest = ml_arena_format(e->arena, "rest%d", loop);
    }
}

void cuda_print_pointers(const cuda_schedule *s) {
    emitter *e = s->e;
    const ml_kernel_ir *ir = e->ir;
    bool used[ML_MAX_OPERANDS] = {false};
    for (int i = 0; i < ir->inst_count; i++)
        if (ir->inst[i].kind == ML_INST_LOAD || ir->inst[i].kind == ML_INST_STORE)
            used[ir->inst[i].operand] = true;
    for (int k = 0; k < ir->operand_count; k++) {
        if (!used[k]) continue;
        const ml_operand *operand = &ir->operand[k];
        ml_text_add(&e->text, "%s *const r%d = o%d", emit_memory_type((ml_dtype)operand->dtype), k,
                    k);
        emit_offset(e, &e->text, operand, 0, (s->elementwise ? e->inner : ir->row_loops) - 1, -1);
        ml_text_add(&e->text, ";\n");
    }
}
