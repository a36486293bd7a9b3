/* Kernels for CUDA: which values of elements and rows wait in registers until they are needed. */
#include "codegen/emit/emit_cuda.h"

#include <string.h>

enum {
    HOISTED_REGISTERS = 32, /* for values that all rows share and columns' sums */
    MOST_HOISTED = 16,      /* where sums leave no room for a second block */
    KEPT_REGISTERS = 16,    /* of values that later passes would compute again ... */
    MOST_BESIDE_KEPT = 32,  /* ... where no more hold sums and what all rows share */
    WORTH_KEEPING = 3,      /* instructions */
};

/* Element values that depend on no row: loads, and what is computed of them and constants. */
static bool is_invariant(const cuda_shape *s, int i) {
    const emitter *e = s->e;
    const ml_kernel_ir *ir = e->ir;
    const ml_inst *inst = &ir->inst[i];
    bool any = false;
    if (e->place[i] != e->inner) return false;
    if (inst->kind == ML_INST_LOAD) {
        if (inst->guard != ML_NO_INST) return false;
        if (inst->index != ML_NO_INST && ir->inst[inst->index].kind != ML_INST_CONST) return false;
        for (int loop = 0; loop < ir->row_loops; loop++)
            if (ir->operand[inst->operand].stride[loop] != 0) return false;
        return true;
    }
    if (inst->kind != ML_INST_MAP || inst->op == ML_OP_RANDOM) return false;
    for (int at = 0; at < ML_INST_SOURCES; at++) {
        int source = ml_inst_source(inst, at);
        if (source == ML_NO_INST || ir->inst[source].kind == ML_INST_CONST) continue;
        if (!s->invariant[source]) return false;
        any = true;
    }
    return any;
}

/* Whether an instruction that computes (in `stage`, or in any where it is negative) reads i. */
static bool is_used(const cuda_shape *s, int i, int stage, bool by_invariant) {
    const emitter *e = s->e;
    for (int j = i + 1; j < e->ir->inst_count; j++) {
        if (s->hoisted[j] || (s->invariant[j] && !by_invariant)) continue;
        if (stage >= 0 && !e->need[stage][j]) continue;
        for (int at = 0; at < ML_INST_SOURCES; at++)
            if (ml_inst_source(&e->ir->inst[j], at) == i) return true;
    }
    return false;
}

/* Whether an element, or what it is the cast of, is in a register: its pack is not loaded then. */
static bool is_hoisted(const cuda_shape *s, int i) {
    const ml_inst *inst = &s->e->ir->inst[i];
    return s->hoisted[i] || (inst->kind == ML_INST_MAP && s->hoisted[inst->src[0]]);
}

/* Values that all rows share wait in registers, where a few hold them. */
void cuda_choose_hoisted(cuda_shape *s) {
    const ml_kernel_ir *ir = s->e->ir;
    double accumulators;
    cuda_column_registers(s, &accumulators);
    bool room = s->unroll && s->in_registers && !s->tiled && cuda_rows_follow(s);
    int sums = (int)accumulators * s->vec * s->packs;
    int left = !room ? 0 : sums > CUDA_TWO_BLOCKS_SUMS ? MOST_HOISTED : HOISTED_REGISTERS - sums;
    for (int i = 0; i < ir->inst_count; i++) s->invariant[i] = left > 0 && is_invariant(s, i);
    for (int i = 0; i < ir->inst_count; i++) {
        int cost = s->vec * s->packs * (ml_dtypes[ir->inst[i].dtype].bytes > 4 ? 2 : 1);
        if (!s->invariant[i] || cost > left || !is_used(s, i, -1, false)) continue;
        s->hoisted[i] = true;
        left -= cost;
    }
    for (int i = 0; i < ir->inst_count; i++)
        if (s->largest[i] >= 0 && is_hoisted(s, ir->inst[i].src[0])) s->largest[i] = -1;
}

/* What passes need, less what leads to hoisted values alone. */
void cuda_find_needs(cuda_shape *s) {
    emitter *e = s->e;
    for (int stage = 0; stage < e->stages; stage++)
        memset(e->need[stage], 0, (size_t)e->ir->inst_count * sizeof(bool));
    emit_needs(e);
    for (int stage = 0; stage < e->stages; stage++)
        for (int i = e->ir->inst_count - 1; i >= 0; i--)
            if (s->invariant[i]) e->need[stage][i] = is_used(s, i, stage, true);
}

/* Instructions for an element's value again, in a pass that has its packs in shared memory. */
static int work_again(const cuda_shape *s, int i) {
    const emitter *e = s->e;
    const ml_inst *inst = &e->ir->inst[i];
    if (e->depth[i] < e->ir->row_loops || s->hoisted[i] || e->buffered[i]) return 0;
    int work = inst->kind != ML_INST_MAP || inst->op != ML_OP_CAST;
    for (int at = 0; at < ML_INST_SOURCES && inst->kind == ML_INST_MAP; at++) {
        int source = ml_inst_source(inst, at);
        if (source != ML_NO_INST) work += work_again(s, source);
    }
    return work;
}

/* Values of elements that later passes would compute again of packs in shared memory stay in
 * registers where sums and values that all rows share leave some. */
void cuda_choose_kept(cuda_shape *s) {
    emitter *e = s->e;
    const ml_kernel_ir *ir = e->ir;
    double accumulators;
    cuda_column_registers(s, &accumulators);
    int left = KEPT_REGISTERS, used = (int)accumulators * s->vec * s->packs;
    for (int i = 0; i < ir->inst_count; i++)
        if (s->hoisted[i]) used += s->vec * s->packs;
    if (s->slots < 2 || used > MOST_BESIDE_KEPT) return;
    for (int i = ir->inst_count - 1; i >= 0; i--) {
        const ml_inst *inst = &ir->inst[i];
        int cost = s->vec * s->packs * (ml_dtypes[inst->dtype].bytes > 4 ? 2 : 1);
        bool later = false;
        for (int stage = e->stage[i] + 1; stage < e->stages; stage++)
            later = later || e->need[stage][i];
        if (inst->kind != ML_INST_MAP || inst->op == ML_OP_CAST || e->place[i] != e->inner ||
            e->buffered[i] || s->invariant[i] || !later || cost > left ||
            work_again(s, i) < WORTH_KEEPING)
            continue;
        e->buffered[i] = true;
        left -= cost;
        cuda_find_needs(s);
    }
}

/* The element of a pack of bf16 that a value is, or the cast of. */
static int element_of(const cuda_shape *s, int i) {
    const ml_kernel_ir *ir = s->e->ir;
    if (ir->inst[i].kind == ML_INST_MAP && ir->inst[i].op == ML_OP_CAST) i = ir->inst[i].src[0];
    return ir->inst[i].kind == ML_INST_LOAD && s->pack[i] >= 0 ? s->pack[i] : -1;
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

/* exp(x - the row's largest x) of bf16 elements x in shared memory, for passes that need no x: from
 * 0 to 1, it takes the place of x as f16, whose 2^-12 the rounding of results to bf16 hides, so
 * that it is computed once. A row with an infinite element, of which nothing is lessened, may
 * become NaN throughout. */
void cuda_choose_folded(cuda_shape *s) {
    emitter *e = s->e;
    const ml_kernel_ir *ir = e->ir;
    bool all = s->resident == s->packs || cuda_holds_rest(s);
    for (int i = 0; i < ir->inst_count && s->quick && s->slots == 1 && all; i++) {
        const ml_inst *inst = &ir->inst[i], *less = &ir->inst[inst->src[0]];
        bool is_exp = inst->kind == ML_INST_MAP && inst->op == ML_OP_EXP && inst->dtype == ML_F32 &&
                      e->place[i] == e->inner && !e->buffered[i];
        if (!is_exp || less->kind != ML_INST_MAP || less->op != ML_OP_SUB) continue;
        int pack = element_of(s, less->src[0]), later = 0, others = 0;
        int largest = cuda_guarded(ir, less->src[1]);
        if (pack < 0 || !s->staged[pack] || s->largest[largest] != pack) continue;
        e->buffered[i] = true;
        cuda_find_needs(s);
        for (int stage = e->stage[i] + 1; stage < e->stages; stage++) {
            later += e->need[stage][i];
            for (int j = 0; j < ir->inst_count; j++)
                others += s->pack[j] == pack && e->need[stage][j];
        }
        if (later > 0 && others == 0) {
            s->folded = i;
            s->folded_pack = pack;
            return;
        }
        e->buffered[i] = false;
        cuda_find_needs(s);
    }
}

/* Whether a row's value is computed of its number alone. */
bool cuda_is_of_number(const cuda_shape *s, int i) {
    const emitter *e = s->e;
    const ml_inst *inst = &e->ir->inst[i];
    if (e->place[i] >= e->ir->row_loops) return false;
    if (inst->kind == ML_INST_CONST || inst->kind == ML_INST_INDEX) return true;
    for (int at = 0; at < ML_INST_SOURCES; at++) {
        int source = ml_inst_source(inst, at);
        if (source != ML_NO_INST && !cuda_is_of_number(s, source)) return false;
    }
    return inst->kind == ML_INST_MAP;
}

/* What a row has one of is loaded while the row before is worked on. */
void cuda_choose_next(cuda_shape *s) {
    const emitter *e = s->e;
    bool follow = cuda_rows_follow(s) || cuda_refills(s);
    for (int i = 0; i < e->ir->inst_count; i++) {
        const ml_inst *inst = &e->ir->inst[i];
        s->next[i] = follow && inst->kind == ML_INST_LOAD && e->place[i] >= 0 &&
                     e->place[i] < e->ir->row_loops &&
                     (inst->index == ML_NO_INST || cuda_is_of_number(s, inst->index)) &&
                     (inst->guard == ML_NO_INST || cuda_is_of_number(s, inst->guard));
    }
}
