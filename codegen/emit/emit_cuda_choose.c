/* Kernels for CUDA: the schedule as a whole, and the launch that follows from it. */
#include "codegen/emit/emit_cuda.h"

/* Whether every float element that the kernel writes is rounded to bf16. */
static bool is_quick(const emitter *e) {
    bool any = false;
    for (int i = 0; i < e->ir->inst_count; i++) {
        const ml_inst *inst = &e->ir->inst[i];
        if (inst->kind != ML_INST_STORE || e->place[i] < e->inner) continue;
        ml_dtype memory = (ml_dtype)e->ir->operand[inst->operand].dtype;
        if (memory == ML_F32 || memory == ML_F64) return false;
        any = any || memory == ML_BF16;
    }
    return any;
}

static int64_t ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

static void set_launch(const cuda_shape *s, ml_kernel *out) {
    const emitter *e = s->e;
    int64_t work = s->elementwise ? e->rows / s->vec : e->rows, blocks;
    if (s->chunked)
        blocks = cuda_tiles(s) * s->chunks;
    else
        blocks = ceil_div(work, s->elementwise ? (int64_t)cuda_threads(s) * s->packs : s->teams);
    if (blocks > INT32_MAX)
        ml_raise(ML_TOO_LARGE, "a kernel needs %lld blocks, more than a GPU can start",
                 (long long)blocks);
    out->grid[0] = (uint32_t)blocks;
    out->grid[1] = out->grid[2] = 1;
    out->block = (uint32_t)cuda_threads(s);
    out->shared_bytes = (uint32_t)(s->slots * s->slot_bytes);
    out->scalar[0] = work;
    out->scalar[1] = s->chunks;
    out->joins = blocks > 0;
}

void emit_cuda_choose(emitter *e, ml_kernel *out) {
    cuda_shape *s = ML_NEW(e->arena, cuda_shape);
    s->e = e;
    s->quick = is_quick(e);
    cuda_choose_shape(s);
    int64_t work = s->elementwise ? e->rows / s->vec : e->rows;
    s->chunk_integer = work < UINT32_MAX / (s->chunks + 1) ? "unsigned" : "long long";
    s->long_sum = ML_NEW_ARRAY(e->arena, bool, e->ir->inst_count + 1);
    cuda_find_long_sums(s);
    set_launch(s, out);
    e->cuda = s;
}

static void print_packs(const cuda_shape *s, ml_text *out) {
    bool some = s->slots > 0;
    emit_print_marked(out, "registers hold the packs of", s->cached, s->e->ir->inst_count);
    if (!some) return;
    ml_text_add(out, "    shared memory: %d slots of %lld bytes", s->slots,
                (long long)s->slot_bytes);
    if (s->resident < s->packs)
        ml_text_add(out, ", for %d packs of a thread; others %s", s->resident,
                    s->held ? "in registers" : "in memory");
    ml_text_add(out, "\n");
    emit_print_marked(out, "prefetched to it", s->staged, s->e->ir->inst_count);
}

static void print_team(const cuda_shape *s, ml_text *out) {
    const emitter *e = s->e;
    ml_text_add(out, "    %s%s", s->elementwise ? "elements" : "rows",
                s->tiled      ? " of column tiles"
                : !s->chunked ? ""
                : s->spread   ? " of chunks, by turns"
                              : " of chunks");
    if (s->chunked && s->chunks != e->ir->chunks)
        ml_text_add(out, " (results for %lld)", (long long)e->ir->chunks);
    ml_text_add(out, ": blocks of %d teams of %d threads", s->teams, s->team);
    if (s->apart > 1) ml_text_add(out, ", %d rows side by side over %d warps", s->apart, s->warps);
    if (s->blocks > 0) ml_text_add(out, ", room for %d blocks", s->blocks);
    ml_text_add(out, "\n    a thread: %d packs of %d elements%s; indices %s, %s", s->packs, s->vec,
                s->unroll ? ", unrolled" : "", s->integer, s->column_integer);
    if (s->chunked) ml_text_add(out, ", %s", s->chunk_integer);
    ml_text_add(out, "\n");
}

void emit_cuda_print_schedule(const emitter *e, ml_text *out) {
    const cuda_shape *s = e->cuda;
    const int count = e->ir->inst_count;
    print_team(s, out);
    print_packs(s, out);
    emit_print_marked(out, "registers hold from pass to pass", e->buffered, count);
    emit_print_marked(out, "the same for all rows", s->invariant, count);
    emit_print_marked(out, "computed once for all rows", s->hoisted, count);
    emit_print_marked(out, "loaded a row ahead", s->next, count);
    emit_print_marked(out, "compensated sums", s->long_sum, count);
    if (s->folded >= 0)
        ml_text_add(out, "    %%%d replaces the packs of %%%d", s->folded, s->folded_pack);
    if (s->online >= 0)
        ml_text_add(out, ", online softmax with sum %%%d by %d packs", s->online, s->group);
    if (s->folded >= 0) ml_text_add(out, "\n");
    if (s->chunked && !s->in_registers) ml_text_add(out, "    sums of columns in memory\n");
}
