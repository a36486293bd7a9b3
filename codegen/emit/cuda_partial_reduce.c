/* Kernels for CUDA, the source: what the blocks of chunks leave of reductions over rows, for
 * another kernel to combine. */
#include "codegen/emit/cuda_print.h"

static const char *identity_of(const cuda_schedule *s, const ml_inst *inst) {
    ml_text text = {.arena = s->e->arena};
    emit_identity(&text, (ml_op)inst->op, (ml_dtype)inst->dtype);
    return text.text;
}

static void print_partial_start(const cuda_schedule *s, int i) {
    emitter *e = s->e;
    const ml_inst *inst = &e->ir->inst[i];
    if (inst->op == ML_OP_ARGMAX) ml_raise(ML_INTERNAL, "argmax cannot be a partial reduction");
    if (!cuda_is_column(s, inst)) {
        cuda_print_accumulator(s, i);
        return;
    }
    const char *identity = identity_of(s, inst);
    if (s->in_registers) {
        int count = s->vec * s->packs;
        ml_text_add(&e->text,
                    "%s c%d[%d];\n#pragma unroll\nfor (int k = 0; k < %d; k++) c%d[k] = %s;\n",
                    emit_compute_type((ml_dtype)inst->dtype), i, count, count, i, identity);
        return;
    }
    cuda_print_pack_loop(s);
    ml_text_add(&e->text, "for (int k = 0; k < %d; k++) o%d[chunk * %lldLL + c + k] = %s;\n}\n}\n",
                s->vec, inst->operand, (long long)e->columns, identity);
}

/* A chunk's column results: the teams' registers are combined in order through shared memory,
 * which all of them use in turn, and written side by side. */
static void print_column_end(const cuda_schedule *s, int i) {
    emitter *e = s->e;
    const ml_inst *inst = &e->ir->inst[i];
    const char *type = emit_compute_type((ml_dtype)inst->dtype);
    int threads = cuda_threads(s), width = s->team * s->vec;
    if (!s->in_registers) return;
    const char *to =
        ml_arena_format(e->arena, "o%d[chunk * %lldLL + c", inst->operand, (long long)e->columns);
    cuda_print_pack_loop(s);
    if (s->teams == 1) {
        ml_text_add(
            &e->text,
            "#pragma unroll\nfor (int k = 0; k < %d; k++)\n%s + k] = c%d[it * %d + k];\n}\n}\n",
            s->vec, to, i, s->vec);
        return;
    }
    const char *part =
        ml_arena_format(e->arena, "((%s *)columns)[(team * %d + lane) * %d", type, s->team, s->vec);
    ml_text_add(&e->text,
                "ml_pack<%s, %d> part;\n#pragma unroll\nfor (int k = 0; k < %d; k++) part.e[k] = "
                "c%d[it * %d + k];\nml_store_pack<%s, %d>(&%s], part);\n}\n__syncthreads();\n",
                type, s->vec, s->vec, i, s->vec, type, s->vec, part);
    ml_text_add(&e->text,
                "for (int j = threadIdx.x; j < %d; j += %d) {\nconst %s c = (%s)%s * %d + j;\n"
                "%s sum = ((%s *)columns)[j];\nfor (int other = 1; other < %d; other++) {\n",
                width, threads, s->column_integer, s->column_integer, s->tiled ? "tile" : "it",
                width, type, type, s->teams);
    cuda_print_combine(s, i, "sum",
                       ml_arena_format(e->arena, "((%s *)columns)[other * %d + j]", type, width));
    ml_text_add(&e->text, "}\nif (c < %lld) %s] = sum;\n", (long long)e->columns, to);
    ml_text_add(&e->text, "}\n__syncthreads();\n}\n");
}

void cuda_print_partials(const cuda_schedule *s, bool start) {
    emitter *e = s->e;
    if (!start && cuda_column_bytes(s) > 0)
        ml_text_add(&e->text, "__shared__ uint4 columns[%lld];\n",
                    (long long)(cuda_column_bytes(s) + 15) / 16);
    for (int i = 0; i < e->ir->inst_count; i++) {
        const ml_inst *inst = &e->ir->inst[i];
        if (!ml_inst_reduces_partly(inst)) continue;
        if (start) {
            print_partial_start(s, i);
        } else if (cuda_is_column(s, inst)) {
            print_column_end(s, i);
        } else {
            ml_text_add(&e->text, "{\n");
            cuda_print_total(s, i);
            const char *result = cuda_reduction_text(s, i, cuda_threads(s));
            ml_text_add(&e->text,
                        "const %s all = %s;\nif (threadIdx.x == 0) o%d[chunk] = all;\n}\n",
                        emit_compute_type((ml_dtype)inst->dtype), result, inst->operand);
        }
    }
}
