/* Kernels for CUDA, the source: what is done before a row's turn comes. Asynchronous copies bring
 * packs of the next rows to shared memory, loads bring the next row's own values to registers, and
 * values that are the same for all rows are computed once. */
#include "codegen/emit/cuda_print.h"

#include <string.h>

static const char commit_text[] = "asm volatile(\"cp.async.commit_group;\" ::: \"memory\");\n";

void cuda_print_commit(const cuda_schedule *s) {
    ml_text_add(&s->e->text, "%s", commit_text);
}

static const char *memory_type(const cuda_schedule *s, int i) {
    const ml_kernel_ir *ir = s->e->ir;
    return emit_memory_type((ml_dtype)ir->operand[ir->inst[i].operand].dtype);
}

/* The row that a team of a chunk has so many rounds of all teams after `row`. */
static const char *row_after(const cuda_schedule *s, const char *row, int rounds) {
    return ml_arena_format(s->e->arena, "%s + %d%s", row, rounds * s->teams,
                           s->spread ? " * step" : "");
}

/* Open a block in which indices and pointers are those of row `row`, if there is one. */
static void print_if_row(const cuda_schedule *s, const char *row) {
    ml_text_add(&s->e->text, "{\nconst %s ahead = %s;\nif (ahead < %s) {\n", s->integer, row,
                s->chunked ? "high" : "a.s[0]");
    cuda_print_unravel(s, "ahead", 0, s->e->ir->row_loops - 1, s->integer);
    cuda_print_pointers(s);
}

static void declare_held(const cuda_schedule *s) {
    for (int i = 0; i < s->e->ir->inst_count && cuda_holds_rest(s); i++)
        if (s->prefetched[i])
            ml_text_add(&s->e->text, "ml_pack<%s, %d> g%d[%d];\n", memory_type(s, i), s->vec, i,
                        s->packs - s->resident);
}

/* Load a pack that a slot has no room for. */
static void print_held(const cuda_schedule *s, int pack, const char *from) {
    ml_text_add(&s->e->text, "g%d[it - %d] = ml_load_pack<%s, %d>(%s);\n", pack, s->resident,
                memory_type(s, pack), s->vec, from);
}

/* Copy the prefetched packs of row `row`, if there is one, to a slot: one group of copies. */
static void print_copies(const cuda_schedule *s, const char *row, const char *slot) {
    emitter *e = s->e;
    print_if_row(s, row);
    cuda_schedule some = *s;
    some.at.part = CUDA_RESIDENT;
    cuda_print_pack_loop(&some);
    for (int i = 0; i < e->ir->inst_count; i++)
        if (s->prefetched[i])
            ml_text_add(&e->text, "ml_stage_pack<%s, %d>(%s, %s);\n", memory_type(s, i), s->vec,
                        cuda_slot_text(s, i, slot), cuda_access_text(s, &e->ir->inst[i], true));
    ml_text_add(&e->text, "}\n}\n");
    if (cuda_holds_rest(s)) {
        some.at.part = CUDA_REST;
        cuda_print_pack_loop(&some);
        for (int i = 0; i < e->ir->inst_count; i++)
            if (s->prefetched[i]) print_held(s, i, cuda_access_text(s, &e->ir->inst[i], true));
        ml_text_add(&e->text, "}\n}\n");
    }
    ml_text_add(&e->text, "}\n}\n%s", commit_text);
}

static bool loads_next(const cuda_schedule *s) {
    bool any = false;
    for (int i = 0; i < s->e->ir->inst_count; i++) any = any || s->next[i];
    return any;
}

/* Load what row `row` has one of. */
static void print_next(const cuda_schedule *s, const char *row) {
    emitter *e = s->e;
    if (!loads_next(s)) return;
    print_if_row(s, row);
    for (int i = 0; i < e->ir->inst_count; i++) {
        const ml_inst *inst = &e->ir->inst[i];
        if (inst->kind != ML_INST_CONST && cuda_is_of_number(s, i)) emit_value(e, &e->text, i);
        if (!s->next[i]) continue;
        if (inst->guard != ML_NO_INST) ml_text_add(&e->text, "if (%s) ", emit_name(e, inst->guard));
        ml_text_add(&e->text, "n%d = *(%s);\n", i, cuda_access_text(s, inst, false));
    }
    ml_text_add(&e->text, "}\n}\n");
}

/* The address of an operand that all rows share, for the element (or pack) at `base`: there is no
 * row.
 */
static const char *invariant_text(const cuda_schedule *s, int i, bool whole_pack) {
    emitter *e = s->e;
    const ml_inst *inst = &e->ir->inst[i];
    ml_text text = {.arena = e->arena};
    ml_text_add(&text, "o%d + (0", inst->operand);
    emit_offset(e, &text, &e->ir->operand[inst->operand], e->ir->row_loops, e->inner,
                whole_pack ? e->inner : -1);
    if (inst->index != ML_NO_INST) ml_text_add(&text, " + %s", emit_name(e, inst->index));
    ml_text_add(&text, whole_pack ? " + base)" : ")");
    return text.text;
}

static void print_invariant_pack(const cuda_schedule *s, int i) {
    const char *type = memory_type(s, i);
    ml_text_add(&s->e->text, "ml_pack<%s, %d> q%d = ml_load_pack<%s, %d>(%s);\n", type, s->vec, i,
                type, s->vec, invariant_text(s, i, true));
}

/* A value that all rows share, of the elements from `base` on. */
static void print_invariant(const cuda_schedule *s, int i) {
    emitter *e = s->e;
    const ml_inst *inst = &e->ir->inst[i];
    if (inst->kind != ML_INST_LOAD) {
        emit_value(e, &e->text, i);
        return;
    }
    const char *type = emit_compute_type((ml_dtype)inst->dtype);
    ml_dtype memory = (ml_dtype)e->ir->operand[inst->operand].dtype;
    ml_text_add(&e->text, "const %s v%d = ", type, i);
    if (s->pack[i] >= 0 && ml_is_narrow(memory))
        ml_text_add(&e->text, "ml_unpack(q%d, k);\n", s->pack[i]);
    else if (s->pack[i] >= 0)
        ml_text_add(&e->text, "(%s)q%d.e[k];\n", type, s->pack[i]);
    else
        ml_text_add(&e->text, "%s(*(%s));\n",
                    ml_is_narrow(memory) ? ml_dtypes[memory].load
                                         : ml_arena_format(e->arena, "(%s)", type),
                    invariant_text(s, i, false));
}

/* Values that are the same for all rows. */
static void print_hoisted(const cuda_schedule *s) {
    emitter *e = s->e;
    const ml_kernel_ir *ir = e->ir;
    bool any = false;
    for (int i = 0; i < ir->inst_count; i++) {
        if (!s->hoisted[i]) continue;
        any = true;
        ml_text_add(&e->text, "%s h%d[%d];\n", emit_compute_type((ml_dtype)ir->inst[i].dtype), i,
                    s->vec * s->packs);
    }
    if (!any) return;
    cuda_print_pack_loop(s);
    for (int i = 0; i < ir->inst_count; i++)
        if (s->invariant[i] && s->pack[i] == i) print_invariant_pack(s, i);
    ml_text_add(&e->text, "#pragma unroll\nfor (int k = 0; k < %d; k++) {\n", s->vec);
    ml_text_add(&e->text, "const %s i%d = base + k;\n", s->column_integer, e->inner);
    for (int i = 0; i < ir->inst_count; i++) {
        if (!s->invariant[i]) continue;
        print_invariant(s, i);
        if (s->hoisted[i]) ml_text_add(&e->text, "h%d[it * %d + k] = v%d;\n", i, s->vec, i);
    }
    ml_text_add(&e->text, "}\n}\n}\n");
}

void cuda_print_refill_start(const cuda_schedule *s, int phase) {
    emitter *e = s->e;
    for (int i = 0; i < e->ir->inst_count; i++) {
        if (!cuda_refills(s) || !s->prefetched[i] || cuda_last_phase(s, i) != phase) continue;
        const char *type = memory_type(s, i);
        int operand = e->ir->inst[i].operand;
        ml_text_add(&e->text, "%s *f%d = 0;\n", type, i);
        print_if_row(s, row_after(s, "row", 1));
        ml_text_add(&e->text, "f%d = r%d;\n}\n}\n", i, operand);
    }
}

void cuda_print_refill(const cuda_schedule *s, int pack, int phase) {
    emitter *e = s->e;
    const ml_inst *inst = &e->ir->inst[pack];
    if (!cuda_refills(s) || !s->prefetched[pack] || cuda_last_phase(s, pack) != phase) return;
    const char *own = ml_arena_format(e->arena, "r%d", inst->operand);
    const char *rest = cuda_access_text(s, inst, true) + strlen(own);
    ml_text_add(&e->text, "if (f%d", pack);
    if (s->at.part == CUDA_REST) {
        ml_text_add(&e->text, ") ");
        print_held(s, pack, ml_arena_format(e->arena, "f%d%s", pack, rest));
        return;
    }
    if (s->resident < s->packs && s->at.part == CUDA_ALL)
        ml_text_add(&e->text, " && it < %d", s->resident);
    ml_text_add(&e->text, ") ml_stage_pack<%s, %d>(%s, f%d%s);\n", memory_type(s, pack), s->vec,
                cuda_slot_text(s, pack, "slot"), pack, rest);
}

/* The first rows' copies are under way before anything waits for what all rows share. */
void cuda_print_start(const cuda_schedule *s) {
    emitter *e = s->e;
    declare_held(s);
    if (s->slots == 1) print_copies(s, "low + team", "slot");
    for (int i = 1; s->online_sum >= 0 && i < cuda_groups(s); i++) cuda_print_commit(s);
    if (s->slots > 1) {
        ml_text_add(&e->text, "int slot = 0;\nfor (int fill = 0; fill < %d; fill++) {\n",
                    s->slots - 1);
        print_copies(s,
                     ml_arena_format(e->arena, "low + team + fill * %d%s", s->teams,
                                     s->spread ? " * step" : ""),
                     "fill");
        ml_text_add(&e->text, "}\n");
    }
    for (int i = 0; i < e->ir->inst_count; i++)
        if (s->next[i]) ml_text_add(&e->text, "%s n%d = {};\n", memory_type(s, i), i);
    print_next(s, "low + team");
    print_hoisted(s);
}

void cuda_print_step(const cuda_schedule *s) {
    emitter *e = s->e;
    for (int i = 0; i < e->ir->inst_count; i++)
        if (s->next[i]) ml_text_add(&e->text, "const %s w%d = n%d;\n", memory_type(s, i), i, i);
    print_next(s, row_after(s, "row", 1));
    if (s->slots == 0) return;
    if (s->slots > 1) {
        ml_text_add(&e->text, "const int filled = slot == 0 ? %d : slot - 1;\n", s->slots - 1);
        print_copies(s, row_after(s, "row", s->slots - 1), "filled");
    } else if (!s->chunked) {
        declare_held(s);
        print_copies(s, "row", "slot");
    }
    if (s->online_sum >= 0 && cuda_refills(s)) return; /* groups are waited for one by one */
    ml_text_add(&e->text, "asm volatile(\"cp.async.wait_group %d;\" ::: \"memory\");\n",
                s->slots - 1);
}

void cuda_print_row_end(const cuda_schedule *s) {
    if (cuda_refills(s) && s->online_sum < 0) cuda_print_commit(s);
    if (s->slots > 1) ml_text_add(&s->e->text, "slot = slot == %d ? 0 : slot + 1;\n", s->slots - 1);
}
