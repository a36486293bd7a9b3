/* Kernels for CUDA: what follows from a schedule and its IR. */
#include "codegen/emit/cuda_schedule.h"

#include <string.h>

enum {
    CACHED_BYTES = 64 << 10,
    LEAST_ROUNDS = 4, /* rows of a team in a chunk, for any to be prefetched */
};

bool cuda_is_column(const cuda_schedule *s, const ml_inst *inst) {
    return inst->kind == ML_INST_REDUCE && inst->scope == ML_SCOPE_COLUMN && !s->elementwise;
}

ml_dtype cuda_column_dtype(const ml_inst *inst) {
    return ml_compute_dtype(inst->dtype);
}

bool cuda_is_row_partial(const cuda_schedule *s, int i) {
    const ml_inst *inst = &s->e->ir->inst[i];
    return inst->kind == ML_INST_REDUCE && inst->scope == ML_SCOPE_ALL && !s->elementwise &&
           s->e->loop[i] < s->e->ir->row_loops;
}

int cuda_threads(const cuda_schedule *s) {
    return s->team * s->teams;
}

ml_dtype cuda_accumulator_dtype(const cuda_schedule *s, int i) {
    const ml_inst *inst = &s->e->ir->inst[i];
    return (ml_dtype)(inst->op == ML_OP_ARGMAX ? s->e->ir->inst[inst->src[0]].dtype : inst->dtype);
}

/* Whether the value is a multiple of n whatever the loops' indices are. */
static bool divisible(const ml_kernel_ir *ir, int i, int n) {
    if (i == ML_NO_INST || n == 1) return true;
    const ml_inst *inst = &ir->inst[i];
    if (inst->kind == ML_INST_CONST)
        return ml_dtypes[inst->dtype].kind == ML_KIND_INT && inst->constant.integer % n == 0;
    if (inst->kind != ML_INST_MAP) return false;
    const bool first = divisible(ir, inst->src[0], n);
    if (inst->op == ML_OP_CAST) return first;
    const bool second = ml_ops[inst->op].sources > 1 && divisible(ir, inst->src[1], n);
    if (inst->op == ML_OP_MUL) return first || second;
    if (inst->op == ML_OP_ADD || inst->op == ML_OP_SUB || inst->op == ML_OP_MAXIMUM ||
        inst->op == ML_OP_MINIMUM)
        return first && second;
    return inst->op == ML_OP_WHERE && second && divisible(ir, inst->src[2], n);
}

/* Loads and stores whose addresses follow the innermost loop one by one. */
bool cuda_is_contiguous(const cuda_schedule *s, int i) {
    const emitter *e = s->e;
    const ml_inst *inst = &e->ir->inst[i];
    if (inst->kind != ML_INST_LOAD && inst->kind != ML_INST_STORE) return false;
    int inner = e->inner;
    if (e->ir->operand[inst->operand].stride[inner] != 1) return false;
    if (strcmp(e->index[inner], "0LL") == 0) return false;
    /* a computed index or a guard that changes within the pack leaves single elements */
    if (inst->index != ML_NO_INST && e->depth[inst->index] >= inner) return false;
    return inst->guard == ML_NO_INST || e->depth[inst->guard] < inner;
}

bool cuda_allows(const cuda_schedule *s, int i, int vec) {
    const emitter *e = s->e;
    const ml_inst *inst = &e->ir->inst[i];
    const ml_operand *operand = &e->ir->operand[inst->operand];
    for (int loop = 0; loop < e->inner; loop++)
        if (strcmp(e->index[loop], "0LL") != 0 && operand->stride[loop] % vec != 0) return false;
    return divisible(e->ir, inst->index, vec);
}

bool cuda_stores_pack(const cuda_schedule *s, int i) {
    return s->e->ir->inst[i].kind == ML_INST_STORE && s->vec > 1 && cuda_is_contiguous(s, i) &&
           cuda_allows(s, i, s->vec);
}

/* Whether an access is to a small operand that is read again and again: caches serve it. */
bool cuda_hits_cache(const cuda_schedule *s, const ml_inst *inst) {
    const ml_kernel_ir *ir = s->e->ir;
    const ml_operand *operand = &ir->operand[inst->operand];
    int64_t elements = 1;
    if (inst->index != ML_NO_INST && ir->inst[inst->index].kind != ML_INST_CONST) return false;
    for (int loop = 0; loop < ir->loop_count; loop++)
        if (operand->stride[loop] != 0) elements *= ir->size[loop];
    return elements * ml_dtypes[operand->dtype].bytes <= CACHED_BYTES &&
           elements <= s->e->rows * s->e->columns / 8;
}

bool cuda_reads_pack(const cuda_schedule *s, int phase, int i, int pack) {
    bool in_place = i == s->in_place && pack == s->in_place_pack;
    return (s->pack[i] == pack || in_place) && s->e->need[phase][i];
}

/* The last pass that needs the elements of a pack. */
int cuda_last_phase(const cuda_schedule *s, int pack) {
    const emitter *e = s->e;
    int last = 0;
    for (int phase = 0; phase < e->phases; phase++)
        for (int i = pack; i < e->ir->inst_count; i++)
            if (cuda_reads_pack(s, phase, i, pack)) last = phase;
    return last;
}

int cuda_pack_bytes(const cuda_schedule *s, int pack) {
    return s->vec * ml_dtypes[s->e->ir->operand[s->e->ir->inst[pack].operand].dtype].bytes;
}

/* Registers for one column of a row: packs in bytes / 4, column accumulators. */
double cuda_column_registers(const cuda_schedule *s, double *accumulators) {
    const ml_kernel_ir *ir = s->e->ir;
    double packs = 0;
    *accumulators = 0;
    for (int i = 0; i < ir->inst_count; i++) {
        const ml_inst *inst = &ir->inst[i];
        const ml_operand *operand = &ir->operand[inst->operand];
        if (s->pack[i] == i && !cuda_hits_cache(s, &ir->inst[i]))
            packs += ml_dtypes[operand->dtype].bytes / 4.0;
        if (cuda_is_column(s, inst)) *accumulators += ml_dtypes[inst->dtype].bytes > 4 ? 2 : 1;
    }
    return packs + *accumulators;
}

/* Shared memory in which the teams' column results of one round meet, one sum after the other. */
int64_t cuda_column_bytes(const cuda_schedule *s) {
    const ml_kernel_ir *ir = s->e->ir;
    int64_t most = 0;
    for (int i = 0; i < ir->inst_count; i++) {
        int64_t bytes = ml_dtypes[cuda_column_dtype(&ir->inst[i])].bytes;
        if (cuda_is_column(s, &ir->inst[i]) && bytes > most) most = bytes;
    }
    return s->in_registers && s->teams > 1 ? most * cuda_threads(s) * s->vec : 0;
}

int64_t cuda_tiles(const cuda_schedule *s) {
    int64_t width = (int64_t)s->team * s->vec;
    return s->tiled ? (s->e->columns + width - 1) / width : 1;
}

bool cuda_is_alone(const cuda_schedule *s) {
    return s->slots * s->slot_bytes > CUDA_SHARED_BYTES;
}

/* Whether a team loops over enough rows for prefetching and hoisting to pay. */
bool cuda_rows_follow(const cuda_schedule *s) {
    return s->chunked && s->e->rows / s->chunks >= (int64_t)LEAST_ROUNDS * s->teams;
}

/* Whether values that teams of several warps share alternate between two addresses, so that threads
 * of one row need not wait for those that still read the row before's. */
bool cuda_takes_turns(const cuda_schedule *s) {
    const ml_kernel_ir *ir = s->e->ir;
    if (s->lane_stride > 1) return false;
    for (int i = 0; i < ir->inst_count; i++)
        if (ml_inst_reduces_row(&ir->inst[i]) && ir->inst[i].op == ML_OP_ARGMAX) return false;
    return s->chunked && s->e->phases > 1 && s->team > CUDA_WARP;
}

bool cuda_predicates_rows(const cuda_schedule *s) {
    return s->lane_stride > 1 && s->warps > 1;
}

/* The first of a phase's results from `from` on that is reduced like instruction `like`; or -1. */
static int next_alike(const cuda_schedule *s, int from, int like) {
    const ml_inst *inst = s->e->ir->inst;
    for (int i = from; i < s->e->ir->inst_count; i++)
        if (ml_inst_reduces_row(&inst[i]) && s->e->phase[i] == s->e->phase[like] &&
            inst[i].op == inst[like].op &&
            cuda_accumulator_dtype(s, i) == cuda_accumulator_dtype(s, like))
            return i;
    return -1;
}

/* Results that are reduced alike share their exchanges, two by two: the other one of a pair. */
int cuda_pair_of(const cuda_schedule *s, int i) {
    int first = -1, second = -1;
    if (s->team > CUDA_MAX_THREADS / 2 || s->online_sum >= 0) return -1;
    do {
        first = next_alike(s, second + 1, i);
        second = next_alike(s, first + 1, i);
    } while (first != i && second >= 0 && second < i);
    return first == i ? second : second == i ? first : -1;
}

int64_t cuda_results_bytes(const cuda_schedule *s) {
    int64_t bytes = 0, turns = cuda_takes_turns(s) ? 2 : 1;
    for (int i = 0; i < s->e->ir->inst_count; i++) {
        const ml_inst *inst = &s->e->ir->inst[i];
        if (inst->kind != ML_INST_REDUCE || cuda_is_column(s, inst)) continue;
        int64_t each = CUDA_WARP * (ml_dtypes[cuda_accumulator_dtype(s, i)].bytes > 4 ? 8 : 4);
        if (inst->op == ML_OP_ARGMAX) each += CUDA_WARP * (int64_t)sizeof(int64_t);
        if (!ml_inst_reduces_row(inst)) {
            bytes += each;
        } else if (s->team > CUDA_WARP) {
            int pair = cuda_pair_of(s, i);
            if (pair < 0 || pair > i) bytes += turns * s->teams * each;
        }
    }
    return bytes;
}

bool cuda_holds_rest(const cuda_schedule *s) {
    return s->slots == 1 && s->resident < s->packs && s->prefetch_rest;
}

bool cuda_refills(const cuda_schedule *s) {
    return s->slots == 1 && s->chunked;
}

/* The value that is taken where it is finite, and 0 elsewhere; else i itself. */
int cuda_guarded(const ml_kernel_ir *ir, int i) {
    const ml_inst *inst = &ir->inst[i];
    if (inst->kind != ML_INST_MAP || inst->op != ML_OP_WHERE) return i;
    const ml_inst *test = &ir->inst[inst->src[0]], *other = &ir->inst[inst->src[2]];
    bool guards = test->kind == ML_INST_MAP && test->op == ML_OP_IS_FINITE &&
                  test->src[0] == inst->src[1] && other->kind == ML_INST_CONST &&
                  other->constant.number == 0;
    return guards ? inst->src[1] : i;
}

/* Whether a row's value is computed of its number alone. */
bool cuda_is_of_number(const cuda_schedule *s, int i) {
    const emitter *e = s->e;
    const ml_inst *inst = &e->ir->inst[i];
    if (e->loop[i] >= e->ir->row_loops) return false;
    if (inst->kind == ML_INST_CONST || inst->kind == ML_INST_INDEX) return true;
    for (int at = 0; at < ML_INST_SOURCES; at++) {
        int source = ml_inst_source(inst, at);
        if (source != ML_NO_INST && !cuda_is_of_number(s, source)) return false;
    }
    return inst->kind == ML_INST_MAP;
}

/* The row's largest element. Those of groups are finite: they need no guard of their own. */
int cuda_online_largest(const cuda_schedule *s) {
    const ml_kernel_ir *ir = s->e->ir;
    return cuda_guarded(ir, ir->inst[ir->inst[s->in_place].src[0]].src[1]);
}

int cuda_groups(const cuda_schedule *s) {
    return s->at.part == CUDA_REST ? 1 : (s->resident + s->rescale_packs - 1) / s->rescale_packs;
}
