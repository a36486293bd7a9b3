/* Kernels for CUDA: the choices of a schedule in their order, the schedule as text, and the launch.
 */
#include "codegen/emit/cuda_choose.h"

static bool stores_narrow(const emitter *e) {
    bool any = false;
    for (int i = 0; i < e->ir->inst_count; i++) {
        const ml_inst *inst = &e->ir->inst[i];
        if (inst->kind != ML_INST_STORE || e->loop[i] < e->inner) continue;
        ml_dtype memory = (ml_dtype)e->ir->operand[inst->operand].dtype;
        if (memory == ML_F32 || memory == ML_F64) return false;
        any = any || ml_is_narrow(memory);
    }
    return any;
}

/* Index arithmetic over loops first .. in 32 bits where every offset and count fits. */
static const char *choose_integer(const cuda_schedule *s, int first) {
    const ml_kernel_ir *ir = s->e->ir;
    int64_t limit = (int64_t)1 << 30, count = 1;
    for (int loop = first; loop < ir->loop_count; loop++) {
        if (ir->size[loop] >= limit / count) return "long long";
        count *= ir->size[loop];
    }
    for (int k = 0; k < ir->operand_count; k++) {
        int64_t reach = 0;
        for (int loop = first; loop < ir->loop_count; loop++) {
            int64_t stride = ir->operand[k].stride[loop];
            reach += (ir->size[loop] - 1) * (stride < 0 ? -stride : stride);
        }
        if (reach >= limit) return "long long";
    }
    return "int";
}

static void choose(cuda_schedule *s) {
    emitter *e = s->e;
    const ml_kernel_ir *ir = e->ir;
    size_t count = (size_t)ir->inst_count + 1;
    s->in_place = s->in_place_pack = s->online_sum = -1;
    s->elementwise = ir->row_loops == ir->loop_count;
    s->chunks = ir->chunks;
    s->chunked = ir->chunks > 0;
    s->tiled = s->chunked && !s->elementwise;
    for (int i = 0; i < ir->inst_count; i++)
        if (ir->inst[i].kind == ML_INST_REDUCE && ir->inst[i].scope != ML_SCOPE_COLUMN)
            s->tiled = false;
    s->pack = ML_NEW_ARRAY(e->arena, int, count);
    s->first_phase = ML_NEW_ARRAY(e->arena, int, count);
    s->register_pack = ML_NEW_ARRAY(e->arena, bool, count);
    cuda_choose_vector(s);
    cuda_find_packs(s);
    s->shared = ML_NEW_ARRAY(e->arena, int64_t, count);
    s->prefetched = ML_NEW_ARRAY(e->arena, bool, count);
    s->next = ML_NEW_ARRAY(e->arena, bool, count);
    s->one_hot = ML_NEW_ARRAY(e->arena, int, count);
    s->zero_elsewhere = ML_NEW_ARRAY(e->arena, bool, count);
    s->largest = ML_NEW_ARRAY(e->arena, int, count);
    s->invariant = ML_NEW_ARRAY(e->arena, bool, count);
    s->hoisted = ML_NEW_ARRAY(e->arena, bool, count);
    s->integer = choose_integer(s, 0);
    s->column_integer = choose_integer(s, s->elementwise ? e->inner : ir->row_loops);
    cuda_find_one_hot(s);
    cuda_find_largest(s);
    emit_needs(e);
    if (s->elementwise) {
        cuda_choose_elements(s);
        return;
    }
    s->lane_stride = 1;
    if (!cuda_choose_adjacent_rows(s) && !cuda_choose_persistent(s)) cuda_choose_team(s);
    s->spread = cuda_choose_spread(s);
    cuda_choose_hoisted(s);
    cuda_find_needs(s);
    if (s->unroll && s->in_registers) cuda_prefetch_ahead(s);
    if (s->unroll && !s->chunked) cuda_choose_kept_results(s);
    if (s->unroll) cuda_choose_registers(s);
    if (!cuda_fits_registers(s)) cuda_move_to_shared(s);
    cuda_find_needs(s);
    cuda_choose_in_place(s);
    cuda_choose_online(s);
    cuda_choose_saved(s);
    cuda_choose_next(s);
    cuda_choose_blocks(s);
}

static int64_t ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

static void set_launch(const cuda_schedule *s, ml_kernel *out) {
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
    out->batchable = blocks > 0;
    out->early = true;
}

void emit_cuda_choose(emitter *e, ml_kernel *out) {
    cuda_schedule *s = ML_NEW(e->arena, cuda_schedule);
    s->e = e;
    s->narrow = stores_narrow(e);
    choose(s);
    int64_t work = s->elementwise ? e->rows / s->vec : e->rows;
    s->chunk_integer = work < UINT32_MAX / (s->chunks + 1) ? "unsigned" : "long long";
    s->compensated = ML_NEW_ARRAY(e->arena, bool, e->ir->inst_count + 1);
    cuda_find_compensated(s);
    set_launch(s, out);
    e->cuda = s;
}

static void print_packs(const cuda_schedule *s, ml_text *out) {
    bool some = s->slots > 0;
    emit_print_marked(out, "packs in registers", s->register_pack, s->e->ir->inst_count);
    if (!some) return;
    ml_text_add(out, "    slots in shared memory: %d x %lld bytes", s->slots,
                (long long)s->slot_bytes);
    if (s->resident < s->packs)
        ml_text_add(out, ", for %d packs of a thread; others %s", s->resident,
                    s->prefetch_rest ? "in registers" : "in memory");
    ml_text_add(out, "\n");
    emit_print_marked(out, "prefetched", s->prefetched, s->e->ir->inst_count);
}

static void print_team(const cuda_schedule *s, ml_text *out) {
    const emitter *e = s->e;
    ml_text_add(out, "    %s%s", s->elementwise ? "elements" : "rows",
                s->tiled      ? " of column tiles, by turns"
                : !s->chunked ? ""
                : s->spread   ? " of chunks, by turns"
                              : " of chunks");
    if (s->chunked && s->chunks != e->ir->chunks)
        ml_text_add(out, " (results for %lld)", (long long)e->ir->chunks);
    ml_text_add(out, ": blocks of %d x %d threads", s->teams, s->team);
    if (s->lane_stride > 1)
        ml_text_add(out, ", %d rows side by side over %d warps", s->lane_stride, s->warps);
    if (s->blocks > 0) ml_text_add(out, ", room for %d blocks", s->blocks);
    ml_text_add(out, "\n    a thread: packs %d x %d elements%s; indices %s, %s", s->packs, s->vec,
                s->unroll ? ", unrolled" : "", s->integer, s->column_integer);
    if (s->chunked && !s->spread) ml_text_add(out, ", %s", s->chunk_integer);
    ml_text_add(out, "\n");
}

void emit_cuda_print_schedule(const emitter *e, ml_text *out) {
    const cuda_schedule *s = e->cuda;
    const int count = e->ir->inst_count;
    print_team(s, out);
    print_packs(s, out);
    emit_print_marked(out, "in registers from pass to pass", e->buffered, count);
    emit_print_marked(out, "the same for all rows", s->invariant, count);
    emit_print_marked(out, "computed once for all rows", s->hoisted, count);
    emit_print_marked(out, "loaded a row ahead", s->next, count);
    emit_print_marked(out, "compensated sums", s->compensated, count);
    if (s->in_place >= 0)
        ml_text_add(out, "    %%%d replaces the packs of %%%d", s->in_place, s->in_place_pack);
    if (s->online_sum >= 0)
        ml_text_add(out, ", online softmax with sum %%%d by %d packs", s->online_sum,
                    s->rescale_packs);
    if (s->in_place >= 0) ml_text_add(out, "\n");
    if (s->chunked && !s->in_registers) ml_text_add(out, "    sums of columns in memory\n");
}
