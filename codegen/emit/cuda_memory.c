/* Kernels for CUDA, choices: what stays in registers from pass to pass, and what is prefetched to
 * shared memory. */
#include "codegen/emit/cuda_choose.h"

#include <string.h>

enum {
    ELEMENT_THREADS = 256,
    REGISTERS = 65536,   /* of a multiprocessor */
    OWN_REGISTERS = 34,  /* for addresses and temporaries */
    LEAST_THREADS = 512, /* that a multiprocessor should hold at once, in blocks of any size */
    REST_REGISTERS = 16, /* for the rest of rows that shared memory has no room for */
    MAX_SLOTS = 4,
    OTHER_BYTES = 5 << 10, /* of other results, which few kernels exceed */
};

/* Whether a load can be issued before the columns' loops are entered. */
static bool is_row_address(const cuda_schedule *s, int i) {
    const emitter *e = s->e;
    const ml_inst *inst = &e->ir->inst[i];
    if (s->elementwise) return inst->index == ML_NO_INST && inst->guard == ML_NO_INST;
    return (inst->index == ML_NO_INST || e->loop[inst->index] < e->ir->row_loops) &&
           (inst->guard == ML_NO_INST || e->loop[inst->guard] < e->ir->row_loops);
}

/* How many passes need the elements of a pack. */
static int readers(const cuda_schedule *s, int pack) {
    const emitter *e = s->e;
    int count = 0;
    for (int phase = 0; phase < e->phases; phase++) {
        bool reads = false;
        for (int i = pack; i < e->ir->inst_count; i++)
            reads = reads || (s->pack[i] == pack && e->need[phase][i]);
        count += reads;
    }
    return count;
}

static bool is_read_again(const cuda_schedule *s, int pack) {
    return readers(s, pack) > 1;
}

/* Registers of a thread that hold data. */
static double free_registers(const cuda_schedule *s) {
    int threads = cuda_threads(s) > LEAST_THREADS ? cuda_threads(s) : LEAST_THREADS;
    double accumulators, limit = REGISTERS / threads;
    cuda_column_registers(s, &accumulators);
    double used = s->in_registers && !s->elementwise ? accumulators * s->vec * s->packs : 0;
    for (int i = 0; i < s->e->ir->inst_count; i++)
        if (s->hoisted[i] || s->e->buffered[i])
            used += s->vec * s->packs * (ml_dtypes[s->e->ir->inst[i].dtype].bytes > 4 ? 2 : 1);
    return (limit < 255 ? limit : 255) - OWN_REGISTERS - used;
}

/* Registers of packs that several passes need. */
static double registers_again(const cuda_schedule *s) {
    double sum = 0;
    for (int i = 0; i < s->e->ir->inst_count; i++)
        if (s->pack[i] == i && is_row_address(s, i) && is_read_again(s, i))
            sum += s->packs * cuda_pack_bytes(s, i) / 4.0;
    return sum;
}

/* Intermediates that take fewer registers from pass to pass than their input packs, a sum of
 * several say, are kept in place of these. */
void cuda_choose_kept_results(cuda_schedule *s) {
    emitter *e = s->e;
    double packs = registers_again(s), left = free_registers(s);
    for (int i = e->ir->inst_count - 1; i >= 0; i--) {
        const ml_inst *inst = &e->ir->inst[i];
        double cost = s->vec * s->packs * (ml_dtypes[inst->dtype].bytes > 4 ? 2 : 1);
        if (inst->kind != ML_INST_MAP || e->loop[i] != e->inner || cost >= packs || cost > left)
            continue;
        e->buffered[i] = true;
        cuda_find_needs(s);
        double rest = registers_again(s);
        if (rest + cost < packs) {
            packs = rest;
            left -= cost;
            s->keep_results = true;
        } else {
            e->buffered[i] = false;
            cuda_find_needs(s);
        }
    }
}

/* What stays in registers from pass to pass: loads that several passes need, then other loads
 * (issued ahead of the pass), then saved values. */
void cuda_choose_registers(cuda_schedule *s) {
    emitter *e = s->e;
    const ml_kernel_ir *ir = e->ir;
    double left = free_registers(s);
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < ir->inst_count; i++) {
            if (s->prefetched[i]) continue;
            double cost = s->pack[i] == i ? s->packs * cuda_pack_bytes(s, i) / 4.0 : 0;
            if (s->pack[i] != i || s->register_pack[i] || !is_row_address(s, i) || cost > left)
                continue;
            bool again = is_read_again(s, i);
            if (!again && (round == 0 || cuda_hits_cache(s, &ir->inst[i]))) continue;
            s->register_pack[i] = true;
            left -= cost;
        }
    }
    for (int i = 0; i < ir->inst_count; i++) {
        const ml_inst *inst = &ir->inst[i];
        bool later = false;
        for (int phase = e->phase[i] + 1; phase < e->phases; phase++)
            later = later || e->need[phase][i];
        double cost = s->vec * s->packs * (ml_dtypes[inst->dtype].bytes > 4 ? 2 : 1);
        if (!inst->saved || !later || e->buffered[i] || s->pack[i] >= 0 || e->loop[i] != e->inner ||
            cost > left)
            continue;
        e->buffered[i] = true;
        left -= cost;
    }
}

/* Shared memory that one block may have, less what kernels declare themselves. */
static int64_t most_shared(const cuda_schedule *s) {
    int64_t results = cuda_results_bytes(s);
    return ml_target_shared(s->e->target.arch) - (results > OTHER_BYTES ? results : OTHER_BYTES);
}

/* Whether a pack can be copied to shared memory before its row begins: its address is known then,
 * and it is no operand that caches serve. */
static bool may_prefetch(const cuda_schedule *s, int i) {
    const ml_kernel_ir *ir = s->e->ir;
    const ml_inst *inst = &ir->inst[i];
    if (s->pack[i] != i || inst->guard != ML_NO_INST || s->e->target.arch < 80) return false;
    if (inst->index != ML_NO_INST && ir->inst[inst->index].kind != ML_INST_CONST) return false;
    return cuda_pack_bytes(s, i) % 16 == 0 && !cuda_hits_cache(s, inst);
}

/* Prefetch packs that may be (or only those that passes read again) in as many slots as `bytes` of
 * shared memory hold, if they are `least` at least. Where they hold no slot but `least` is 0, most
 * of one will do. */
static bool prefetch_rows(cuda_schedule *s, bool only_again, int64_t bytes, int least) {
    emitter *e = s->e;
    int64_t all = 0, round = 0;
    for (int i = 0; i < e->ir->inst_count; i++) {
        s->prefetched[i] = may_prefetch(s, i) && readers(s, i) > only_again;
        if (s->prefetched[i]) round += (int64_t)cuda_threads(s) * cuda_pack_bytes(s, i);
    }
    int64_t slot = round * s->packs;
    s->resident = s->packs;
    s->slots = slot == 0 ? 0 : cuda_at_most(bytes / slot, only_again ? 1 : MAX_SLOTS);
    if (slot > 0 && s->slots == 0 && least == 0 && slot < 2 * bytes) {
        s->slots = 1;
        s->resident = (int)(bytes / round);
    }
    s->prefetch_rest = (s->packs - s->resident) * (round / cuda_threads(s)) / 4 <= REST_REGISTERS;
    for (int i = 0; i < e->ir->inst_count; i++) {
        if (!s->prefetched[i]) continue;
        s->shared[i] = all;
        all += (int64_t)s->resident * cuda_threads(s) * cuda_pack_bytes(s, i);
    }
    s->slot_bytes = all;
    if (s->slots >= least && s->slots > 0) return true;
    memset(s->prefetched, 0, (size_t)e->ir->inst_count * sizeof *s->prefetched);
    s->slots = 0;
    return false;
}

/* Rows of a chunk follow each other: while one is worked on the next ones are under way. */
void cuda_prefetch_ahead(cuda_schedule *s) {
    if (!cuda_rows_follow(s)) return;
    int64_t all = most_shared(s), part = all / cuda_blocks_together(s);
    bool alone = cuda_threads(s) > CUDA_TWO_BLOCKS_THREADS;
    if (prefetch_rows(s, false, part - cuda_column_bytes(s), 2) || !alone) return;
    if (prefetch_rows(s, false, all - cuda_column_bytes(s), 2)) s->slots = 2; /* more do not help */
}

/* Long rows do not fit in registers. Packs that several passes need are saved in shared memory: one
 * row of each of two blocks, so that one loads while the other computes, or as much of a row as one
 * block has room for. Where rows follow each other the last pass makes room for the next one. */
static bool choose_shared(cuda_schedule *s) {
    emitter *e = s->e;
    cuda_schedule before = *s;
    int64_t packs = (e->columns + s->vec - 1) / s->vec;
    s->teams = 1;
    s->unroll = false;
    for (int least = 1; least >= 0; least--) {
        int threads = least == 1 ? CUDA_LONG_ROW_THREADS : CUDA_MAX_THREADS;
        s->team = cuda_summing_threads(s, packs);
        if (s->team == 0) s->team = cuda_choose_lanes(packs, (packs + threads - 1) / threads, 0);
        s->packs = (int)((packs + s->team - 1) / s->team);
        if (prefetch_rows(s, true, least == 1 ? CUDA_SHARED_BYTES : most_shared(s), least))
            return true;
    }
    *s = before;
    return false;
}

/* Not where registers cannot hold rows whole, or only those of so many threads that a
 * multiprocessor has room for one block alone. */
bool cuda_fits_registers(const cuda_schedule *s) {
    for (int i = 0; i < s->e->ir->inst_count; i++)
        if (s->pack[i] == i && is_row_address(s, i) && is_read_again(s, i) &&
            !s->register_pack[i] && !s->prefetched[i])
            return false;
    return cuda_threads(s) <= CUDA_LONG_ROW_THREADS;
}

void cuda_move_to_shared(cuda_schedule *s) {
    emitter *e = s->e;
    size_t count = (size_t)e->ir->inst_count;
    bool *cached = s->register_pack, *buffered = e->buffered;
    double accumulators;
    cuda_column_registers(s, &accumulators);
    if (accumulators > 0) return; /* those stay in registers whatever the rest does */
    s->register_pack = ML_NEW_ARRAY(e->arena, bool, count + 1);
    e->buffered = ML_NEW_ARRAY(e->arena, bool, count + 1);
    memset(s->invariant, 0, count * sizeof(bool));
    memset(s->hoisted, 0, count * sizeof(bool));
    cuda_find_needs(s);
    if (choose_shared(s)) return;
    s->register_pack = cached;
    e->buffered = buffered;
}

/* Two packs a thread, both loaded first, so that enough bytes are under way; one where an index
 * has to be loaded before it. */
void cuda_choose_elements(cuda_schedule *s) {
    const ml_kernel_ir *ir = s->e->ir;
    s->teams = 1;
    s->packs = 2;
    s->unroll = s->in_registers = true;
    s->team = s->chunked ? CUDA_CHUNK_THREADS : ELEMENT_THREADS;
    cuda_choose_registers(s);
    for (int i = 0; i < ir->inst_count; i++)
        if (s->pack[i] == i && is_row_address(s, i) && !s->register_pack[i] &&
            !cuda_hits_cache(s, &ir->inst[i]) && !s->chunked)
            s->packs = 1;
}

/* How many blocks registers are to leave room for, as shared memory does. */
void cuda_choose_blocks(cuda_schedule *s) {
    double accumulators;
    cuda_column_registers(s, &accumulators);
    if (s->keep_results && s->slots == 0)
        s->blocks = 1; /* without it ptxas spills, to fit one more */
    if (s->slots == 0 || s->resident < s->packs) return;
    if (cuda_threads(s) > CUDA_TWO_BLOCKS_THREADS) {
        s->blocks = 1;
        return;
    }
    if (accumulators * s->vec * s->packs <= CUDA_TWO_BLOCKS_SUMS)
        s->blocks = cuda_blocks_together(s);
}
