/* Kernels for CUDA, the source: instructions, and the elements of a pack. */
#include "codegen/emit/cuda_print.h"

#include <string.h>

static void print_load(const cuda_schedule *s, int i) {
    emitter *e = s->e;
    const ml_inst *inst = &e->ir->inst[i];
    ml_dtype memory = (ml_dtype)e->ir->operand[inst->operand].dtype;
    const char *type = emit_compute_type((ml_dtype)inst->dtype), *from;
    int pack = s->pack[i];
    if (s->next[i])
        from = ml_arena_format(e->arena, "w%d", i);
    else if (pack >= 0)
        from = ml_arena_format(e->arena, "%s.e[k]", cuda_pack_name(s, pack));
    else
        from = ml_arena_format(e->arena, "*(%s)", cuda_access_text(s, inst, false));
    ml_text_add(&e->text, "const %s v%d = ", type, i);
    bool guarded = inst->guard != ML_NO_INST && pack < 0;
    if (guarded) ml_text_add(&e->text, "!%s ? 0 : ", emit_name(e, inst->guard));
    if (ml_is_narrow(memory) && pack >= 0)
        ml_text_add(&e->text, "ml_unpack(%s, k);\n", cuda_pack_name(s, pack));
    else if (ml_is_narrow(memory))
        ml_text_add(&e->text, "%s(%s);\n", ml_dtypes[memory].load, from);
    else
        ml_text_add(&e->text, "(%s)%s;\n", type, from);
}

static void print_store(const cuda_schedule *s, int i) {
    emitter *e = s->e;
    const ml_inst *inst = &e->ir->inst[i];
    ml_dtype memory = (ml_dtype)e->ir->operand[inst->operand].dtype;
    const char *value = emit_name(e, inst->src[0]);
    bool by_row = !s->elementwise && e->loop[i] < e->ir->row_loops;
    if (by_row)
        ml_text_add(&e->text, "if (lane == 0%s%s) ", s->tiled ? " && tile == 0" : "",
                    cuda_predicates_rows(s) ? " && own" : "");
    if (inst->guard != ML_NO_INST && !cuda_stores_pack(s, i))
        ml_text_add(&e->text, "if (%s) ", emit_name(e, inst->guard));
    if (cuda_stores_pack(s, i))
        ml_text_add(&e->text, ml_is_narrow(memory) ? "u%d[k] = " : "u%d.e[k] = ", i);
    else
        ml_text_add(&e->text, "*(%s) = ", cuda_access_text(s, inst, false));
    if (ml_is_narrow(memory) && !cuda_stores_pack(s, i))
        ml_text_add(&e->text, "%s((%s)%s);\n", ml_dtypes[memory].store, emit_compute_type(memory),
                    value);
    else
        ml_text_add(&e->text, "(%s)%s;\n",
                    ml_is_narrow(memory) ? emit_compute_type(memory) : emit_memory_type(memory),
                    value);
}

static void print_reduce(const cuda_schedule *s, int i) {
    emitter *e = s->e;
    const ml_inst *inst = &e->ir->inst[i];
    const char *to = ml_arena_format(e->arena, "a%d", i);
    if (cuda_is_column(s, inst))
        to = s->in_registers ? ml_arena_format(e->arena, "c%d[it * %d + k]", i, s->vec)
                             : ml_arena_format(e->arena, "o%d[chunk * %lldLL + c + k]",
                                               inst->operand, (long long)e->columns);
    if (cuda_is_row_partial(s, i))
        ml_text_add(&e->text, "if (lane == 0%s) ", cuda_predicates_rows(s) ? " && own" : "");
    else if (ml_inst_reduces_partly(inst) && cuda_predicates_rows(s))
        ml_text_add(&e->text, "if (own) ");
    if (s->compensated[i])
        ml_text_add(&e->text, "ml_add_f32(%s, lost%d, %s);\n", to, i, emit_name(e, inst->src[0]));
    else
        cuda_print_combine(s, i, to, emit_name(e, inst->src[0]));
}

/* h is the value times 2^15. */
static void print_folded(const cuda_schedule *s, int phase) {
    emitter *e = s->e;
    int i = s->in_place;
    const ml_inst *less = &e->ir->inst[e->ir->inst[i].src[0]];
    if (e->phase[i] < phase)
        ml_text_add(&e->text, "const float h%d = ml_unpack_half(%s, k);\n", i,
                    cuda_pack_name(s, s->in_place_pack));
    else
        ml_text_add(&e->text, "const float h%d = z%d[k] = ml_quick_exp_less(%s, %s, ML_UP);\n", i,
                    i, emit_name(e, less->src[0]), emit_name(e, less->src[1]));
    ml_text_add(&e->text, "const float v%d = h%d * down;\n", i, i);
}

static void print_instruction(const cuda_schedule *s, int i, int phase) {
    emitter *e = s->e;
    const ml_inst *inst = &e->ir->inst[i];
    const char *at = ml_arena_format(e->arena, "k%d[it * %d + k]", i, s->vec);
    if (s->hoisted[i]) {
        ml_text_add(&e->text, "const %s v%d = h%d[it * %d + k];\n",
                    emit_compute_type((ml_dtype)inst->dtype), i, i, s->vec);
        return;
    }
    if (i == s->in_place) {
        print_folded(s, phase);
        return;
    }
    if (e->buffered[i] && e->phase[i] < phase) {
        ml_text_add(&e->text, "const %s v%d = %s;\n", emit_compute_type((ml_dtype)inst->dtype), i,
                    at);
        return;
    }
    if (s->largest[i] >= 0) return; /* taken from the pack */
    bool printed = cuda_print_simpler(s, i);
    if (!printed) switch ((ml_inst_kind)inst->kind) {
        case ML_INST_LOAD: print_load(s, i); break;
        case ML_INST_STORE: print_store(s, i); break;
        case ML_INST_REDUCE: print_reduce(s, i); break;
        default: emit_value(e, &e->text, i); break;
        }
    if (e->buffered[i]) ml_text_add(&e->text, "%s = v%d;\n", at, i);
}

void cuda_print_loops(const cuda_schedule *s, int phase, int first, int last) {
    emitter *e = s->e;
    for (int i = 0; i < e->ir->inst_count; i++)
        if (e->need[phase][i] && e->loop[i] >= first && e->loop[i] <= last)
            print_instruction(s, i, phase);
}

static void print_pack_elements(const cuda_schedule *s, int phase) {
    emitter *e = s->e;
    ml_text_add(&e->text, "#pragma unroll\nfor (int k = 0; k < %d; k++) {\n", s->vec);
    ml_text_add(&e->text, "const %s i%d = base + k;\n", s->column_integer, e->inner);
    cuda_print_loops(s, phase, e->inner, e->inner);
    ml_text_add(&e->text, "}\n");
}

/* The body is specialised by one-hot predicates: packs in which one may be true, and all others. */
void cuda_print_elements(const cuda_schedule *s, int phase) {
    emitter *e = s->e;
    cuda_schedule all_false = *s;
    const char *before = "if (";
    all_false.at.all_false = true;
    for (int i = 0; i < e->ir->inst_count; i++) {
        if (s->one_hot[i] < 0 || !e->need[phase][i]) continue;
        const char *type = e->ir->inst[s->one_hot[i]].dtype == ML_I64 ? "ml_u64" : "unsigned";
        ml_text_add(&e->text, "%s(%s)%s - (%s)base < %d", before, type, emit_name(e, s->one_hot[i]),
                    type, s->vec);
        before = " || ";
    }
    if (strcmp(before, "if (") == 0) {
        print_pack_elements(s, phase);
        return;
    }
    ml_text_add(&e->text, ") {\n");
    print_pack_elements(s, phase);
    ml_text_add(&e->text, "} else {\n");
    print_pack_elements(&all_false, phase);
    ml_text_add(&e->text, "}\n");
}

void cuda_print_columns_outside(const cuda_schedule *s, int phase) {
    cuda_print_loops(s, phase, s->elementwise ? -1 : s->e->ir->row_loops, s->e->inner - 1);
}
