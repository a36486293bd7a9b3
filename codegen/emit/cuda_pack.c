/* Kernels for CUDA, the source: the loop over a thread's packs, and accumulators. */
#include "codegen/emit/cuda_print.h"

void cuda_add_pack_type(ml_text *out, const cuda_schedule *s, int operand) {
    ml_text_add(out, "ml_pack<%s, %d>",
                emit_memory_type((ml_dtype)s->e->ir->operand[operand].dtype), s->vec);
}

/* The thread's pack of this round: in registers since an earlier pass, or loaded just now. */
const char *cuda_pack_name(const cuda_schedule *s, int pack) {
    const char *format = s->register_pack[pack] ? "q%d[it]" : s->at.gathers ? "q%d[j]" : "q%d";
    return ml_arena_format(s->e->arena, format, pack);
}

void cuda_print_pack_load(const cuda_schedule *s, int i, const char *to) {
    emitter *e = s->e;
    const ml_inst *inst = &e->ir->inst[i];
    const char *type = emit_memory_type((ml_dtype)e->ir->operand[inst->operand].dtype);
    ml_text_add(&e->text, "%s = ", to);
    if (s->prefetched[i] && s->at.part == CUDA_REST) {
        ml_text_add(&e->text, "g%d[it - %d];\n", i, s->resident);
        return;
    }
    if (s->prefetched[i]) {
        if (s->resident < s->packs && s->at.part == CUDA_ALL)
            ml_text_add(&e->text, "it >= %d ? ml_load_pack<%s, %d>(%s) : ", s->resident, type,
                        s->vec, cuda_access_text(s, inst, true));
        ml_text_add(&e->text, "ml_load_pack<%s, %d>((const %s *)(%s));\n", type, s->vec, type,
                    cuda_slot_text(s, i, "slot"));
        return;
    }
    if (inst->guard != ML_NO_INST)
        ml_text_add(&e->text, "!%s ? ml_zero_pack<%s, %d>() : ", emit_name(e, inst->guard), type,
                    s->vec);
    ml_text_add(&e->text, "ml_load_pack<%s, %d>(%s);\n", type, s->vec,
                cuda_access_text(s, inst, true));
}

/* Open the loop over a thread's packs: c is the first column of the pack. */
void cuda_print_pack_loop(const cuda_schedule *s) {
    emitter *e = s->e;
    const char *type = s->column_integer;
    int first = s->at.part == CUDA_REST ? s->resident : 0;
    int end = s->at.part == CUDA_RESIDENT ? s->resident : s->packs;
    if (s->at.grouped)
        ml_text_add(&e->text,
                    "#pragma unroll\nfor (int j = 0; j < %d; j++) {\n"
                    "const int it = %d + group * %d + j;\nif (it >= %d) continue;\n",
                    s->rescale_packs, first, s->rescale_packs, end);
    else
        ml_text_add(&e->text, "#pragma unroll%s\nfor (int it = %d; it < %d; it++) {\n",
                    s->unroll || s->at.part == CUDA_REST ? ""
                    : s->lane_stride > 1                 ? " 8"
                                                         : " 4",
                    first, end);
    ml_text_add(&e->text, "const %s c = ((%s)%s * %d + lane) * %d;\n", type, type,
                s->tiled ? "tile" : "it", s->team, s->vec);
    cuda_print_unravel(s, "c", e->ir->row_loops, e->inner, type);
    int64_t covered = (int64_t)s->team * s->vec * s->packs;
    bool whole = s->tiled ? e->columns % covered == 0 : covered == e->columns;
    if (whole)
        ml_text_add(&e->text, "{\n");
    else
        ml_text_add(&e->text, "if (c < %lld) {\n", (long long)e->columns);
}

void cuda_print_combine(const cuda_schedule *s, int i, const char *to, const char *value) {
    emitter *e = s->e;
    const ml_inst *inst = &e->ir->inst[i];
    if (inst->op == ML_OP_SUM)
        ml_text_add(&e->text, "%s += %s;\n", to, value);
    else if (inst->op == ML_OP_ARGMAX)
        ml_text_add(&e->text,
                    "if (j%d < 0 || %s > %s || (%s != %s && %s == %s)) { %s = %s; j%d = c + k; }\n",
                    i, value, to, value, value, to, to, to, value, i);
    else
        ml_text_add(&e->text, "%s = ml_%s_%s(%s, %s);\n", to, inst->op == ML_OP_MAX ? "max" : "min",
                    ml_suffix(cuda_accumulator_dtype(s, i)), to, value);
}

void cuda_print_accumulator(const cuda_schedule *s, int i) {
    emitter *e = s->e;
    const ml_inst *inst = &e->ir->inst[i];
    ml_dtype dtype = cuda_accumulator_dtype(s, i);
    ml_text_add(&e->text, "%s a%d = ", emit_compute_type(dtype), i);
    emit_identity(&e->text, inst->op == ML_OP_ARGMAX ? ML_OP_MAX : (ml_op)inst->op, dtype);
    ml_text_add(&e->text, ";\n");
    if (inst->op == ML_OP_ARGMAX) ml_text_add(&e->text, "%s j%d = -1;\n", s->integer, i);
    if (s->compensated[i]) ml_text_add(&e->text, "float lost%d = 0.0f;\n", i);
}

void cuda_print_total(const cuda_schedule *s, int i) {
    if (s->compensated[i]) ml_text_add(&s->e->text, "a%d = ml_total_f32(a%d, lost%d);\n", i, i, i);
}
