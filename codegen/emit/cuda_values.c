/* Kernels for CUDA, choices: which values of elements and rows wait in registers until they are
 * needed, or are found by fewer instructions. */
#include "codegen/emit/cuda_choose.h"

#include <string.h>

enum {
    HOISTED_REGISTERS = 32, /* for values that all rows share and columns' sums */
    MOST_HOISTED = 16,      /* where sums leave no room for a second block */
    SAVED_REGISTERS = 16,   /* of values that later passes would compute again ... */
    MOST_BESIDE_SAVED = 32, /* ... where no more hold sums and what all rows share */
    WORTH_SAVING = 3,       /* instructions */
};

enum { MOST_GROUPS = 4 /* of a slot: as many groups of copies are under way */ };

static bool is_column_number(const cuda_schedule *s, int i) {
    const ml_inst *inst = &s->e->ir->inst[i];
    if (inst->kind == ML_INST_MAP && inst->op == ML_OP_CAST &&
        ml_dtypes[inst->dtype].kind == ML_KIND_INT)
        return is_column_number(s, inst->src[0]);
    return inst->kind == ML_INST_INDEX && inst->operand == s->e->inner;
}

/* One-hot predicates: comparisons of the column's number with a value of the row. */
void cuda_find_one_hot(cuda_schedule *s) {
    const emitter *e = s->e;
    for (int i = 0; i < e->ir->inst_count; i++) {
        const ml_inst *inst = &e->ir->inst[i];
        s->one_hot[i] = -1;
        if (inst->kind != ML_INST_MAP || s->vec == 1 || s->elementwise) continue;
        for (int side = 0; side < 2 && inst->op == ML_OP_EQ; side++) {
            int other = inst->src[1 - side];
            if (is_column_number(s, inst->src[side]) && e->loop[other] < e->ir->row_loops &&
                ml_dtypes[e->ir->inst[other].dtype].kind == ML_KIND_INT)
                s->one_hot[i] = other;
        }
        if (inst->op == ML_OP_WHERE && s->one_hot[inst->src[0]] >= 0) {
            const ml_inst *other = &e->ir->inst[inst->src[2]];
            s->zero_elsewhere[i] = other->kind == ML_INST_CONST && other->constant.integer == 0;
        }
        if (inst->op == ML_OP_CAST) s->zero_elsewhere[i] = s->zero_elsewhere[inst->src[0]];
    }
}

/* Maxima of bf16 elements themselves: two are compared by one instruction. */
void cuda_find_largest(cuda_schedule *s) {
    const ml_kernel_ir *ir = s->e->ir;
    for (int i = 0; i < ir->inst_count; i++) {
        s->largest[i] = -1;
        if (!ml_inst_reduces_row(&ir->inst[i]) || ir->inst[i].op != ML_OP_MAX || s->vec == 1 ||
            ml_dtypes[ir->inst[i].dtype].kind != ML_KIND_FLOAT || s->e->target.arch < 80)
            continue;
        int from = ir->inst[i].src[0];
        if (ir->inst[from].kind == ML_INST_MAP && ir->inst[from].op == ML_OP_CAST)
            from = ir->inst[from].src[0];
        if (ir->inst[from].kind == ML_INST_LOAD && s->pack[from] >= 0 &&
            ir->operand[ir->inst[from].operand].dtype == ML_BF16)
            s->largest[i] = s->pack[from];
    }
}

/* Element values that depend on no row: loads, and what is computed of them and constants. */
static bool is_invariant(const cuda_schedule *s, int i) {
    const emitter *e = s->e;
    const ml_kernel_ir *ir = e->ir;
    const ml_inst *inst = &ir->inst[i];
    bool any = false;
    if (e->loop[i] != e->inner) return false;
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

/* Whether an instruction that computes (in `phase`, or in any where it is negative) reads i. */
static bool is_used(const cuda_schedule *s, int i, int phase, bool by_invariant) {
    const emitter *e = s->e;
    for (int j = i + 1; j < e->ir->inst_count; j++) {
        if (s->hoisted[j] || (s->invariant[j] && !by_invariant)) continue;
        if (phase >= 0 && !e->need[phase][j]) continue;
        for (int at = 0; at < ML_INST_SOURCES; at++)
            if (ml_inst_source(&e->ir->inst[j], at) == i) return true;
    }
    return false;
}

/* Whether an element, or what it is the cast of, is in a register: its pack is not loaded then. */
static bool is_hoisted(const cuda_schedule *s, int i) {
    const ml_inst *inst = &s->e->ir->inst[i];
    return s->hoisted[i] || (inst->kind == ML_INST_MAP && s->hoisted[inst->src[0]]);
}

/* Values that all rows share wait in registers, where a few hold them. */
void cuda_choose_hoisted(cuda_schedule *s) {
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
void cuda_find_needs(cuda_schedule *s) {
    emitter *e = s->e;
    for (int phase = 0; phase < e->phases; phase++)
        memset(e->need[phase], 0, (size_t)e->ir->inst_count * sizeof(bool));
    emit_needs(e);
    for (int phase = 0; phase < e->phases; phase++)
        for (int i = e->ir->inst_count - 1; i >= 0; i--)
            if (s->invariant[i]) e->need[phase][i] = is_used(s, i, phase, true);
}

/* Instructions for an element's value again, in a pass that has its packs in shared memory. */
static int work_again(const cuda_schedule *s, int i) {
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
void cuda_choose_saved(cuda_schedule *s) {
    emitter *e = s->e;
    const ml_kernel_ir *ir = e->ir;
    double accumulators;
    cuda_column_registers(s, &accumulators);
    int left = SAVED_REGISTERS, used = (int)accumulators * s->vec * s->packs;
    for (int i = 0; i < ir->inst_count; i++)
        if (s->hoisted[i]) used += s->vec * s->packs;
    if (s->slots < 2 || used > MOST_BESIDE_SAVED) return;
    for (int i = ir->inst_count - 1; i >= 0; i--) {
        const ml_inst *inst = &ir->inst[i];
        int cost = s->vec * s->packs * (ml_dtypes[inst->dtype].bytes > 4 ? 2 : 1);
        bool later = false;
        for (int phase = e->phase[i] + 1; phase < e->phases; phase++)
            later = later || e->need[phase][i];
        if (inst->kind != ML_INST_MAP || inst->op == ML_OP_CAST || e->loop[i] != e->inner ||
            e->buffered[i] || s->invariant[i] || !later || cost > left ||
            work_again(s, i) < WORTH_SAVING)
            continue;
        e->buffered[i] = true;
        left -= cost;
        cuda_find_needs(s);
    }
}

/* The element of a pack of bf16 that a value is, or the cast of. */
static int element_of(const cuda_schedule *s, int i) {
    const ml_kernel_ir *ir = s->e->ir;
    if (ir->inst[i].kind == ML_INST_MAP && ir->inst[i].op == ML_OP_CAST) i = ir->inst[i].src[0];
    return ir->inst[i].kind == ML_INST_LOAD && s->pack[i] >= 0 ? s->pack[i] : -1;
}

/* exp(x - the row's largest x) of bf16 elements x in shared memory, for passes that need no x: from
 * 0 to 1, it takes the place of x as f16, whose 2^-12 the rounding of results to bf16 hides, so
 * that it is computed once. A row with an infinite element, of which nothing is lessened, may
 * become NaN throughout. */
void cuda_choose_in_place(cuda_schedule *s) {
    emitter *e = s->e;
    const ml_kernel_ir *ir = e->ir;
    bool all = s->resident == s->packs || cuda_holds_rest(s);
    for (int i = 0; i < ir->inst_count && s->narrow && s->slots == 1 && all; i++) {
        const ml_inst *inst = &ir->inst[i], *less = &ir->inst[inst->src[0]];
        bool is_exp = inst->kind == ML_INST_MAP && inst->op == ML_OP_EXP && inst->quick &&
                      e->loop[i] == e->inner && !e->buffered[i];
        if (!is_exp || less->kind != ML_INST_MAP || less->op != ML_OP_SUB) continue;
        int pack = element_of(s, less->src[0]), later = 0, others = 0;
        int largest = cuda_guarded(ir, less->src[1]);
        if (pack < 0 || !s->prefetched[pack] || s->largest[largest] != pack) continue;
        e->buffered[i] = true;
        cuda_find_needs(s);
        for (int phase = e->phase[i] + 1; phase < e->phases; phase++) {
            later += e->need[phase][i];
            for (int j = 0; j < ir->inst_count; j++)
                others += s->pack[j] == pack && e->need[phase][j];
        }
        if (later > 0 && others == 0) {
            s->in_place = i;
            s->in_place_pack = pack;
            return;
        }
        e->buffered[i] = false;
        cuda_find_needs(s);
    }
}

/* What a row has one of is loaded while the row before is worked on. */
void cuda_choose_next(cuda_schedule *s) {
    const emitter *e = s->e;
    bool follow = cuda_rows_follow(s) || cuda_refills(s);
    for (int i = 0; i < e->ir->inst_count; i++) {
        const ml_inst *inst = &e->ir->inst[i];
        s->next[i] = follow && inst->kind == ML_INST_LOAD && e->loop[i] >= 0 &&
                     e->loop[i] < e->ir->row_loops &&
                     (inst->index == ML_NO_INST || cuda_is_of_number(s, inst->index)) &&
                     (inst->guard == ML_NO_INST || cuda_is_of_number(s, inst->guard));
    }
}

/* Whether an instruction of the exponentials' pass is part of them or of their sum. */
static bool belongs(const cuda_schedule *s, int i, int sum) {
    const ml_kernel_ir *ir = s->e->ir;
    int less = ir->inst[s->in_place].src[0], element = ir->inst[less].src[0];
    return i == s->in_place || i == less || i == element || i == sum || s->pack[i] >= 0 ||
           ir->inst[i].kind == ML_INST_CONST;
}

/* Whether the pass of the largest element reads, gathers or writes anything else by packs. */
static bool has_others(const cuda_schedule *s, int largest) {
    const emitter *e = s->e;
    for (int i = 0; i < e->ir->inst_count; i++) {
        if (!e->need[e->phase[largest]][i] || i == largest) continue;
        bool reads = s->pack[i] >= 0 && s->pack[i] != s->in_place_pack;
        if (s->largest[i] >= 0 || reads || cuda_stores_pack(s, i)) return true;
    }
    return false;
}

void cuda_choose_online(cuda_schedule *s) {
    emitter *e = s->e;
    const ml_kernel_ir *ir = e->ir;
    /* beside a second block, what it would save is hidden, and registers lack */
    if (s->in_place < 0 || s->team <= CUDA_WARP || !cuda_is_alone(s)) return;
    int phase = e->phase[s->in_place], sum = -1;
    int largest = cuda_online_largest(s);
    if (e->phase[largest] + 1 != phase || phase + 2 != e->phases || has_others(s, largest)) return;
    for (int i = 0; i < ir->inst_count; i++) {
        bool adds = ml_inst_reduces_row(&ir->inst[i]) && e->phase[i] == phase;
        if (!adds) continue;
        if (sum >= 0 || ir->inst[i].op != ML_OP_SUM || ir->inst[i].src[0] != s->in_place) return;
        sum = i;
    }
    for (int i = 0; i < ir->inst_count && sum >= 0; i++)
        if (e->need[phase][i] && e->loop[i] >= ir->row_loops && !belongs(s, i, sum)) return;
    if (sum < 0) return;
    s->online_sum = sum;
    s->rescale_packs = (s->resident + MOST_GROUPS - 1) / MOST_GROUPS;
    if (s->packs - s->resident > s->rescale_packs) s->rescale_packs = s->packs - s->resident;
}

/* Terms that a thread adds up one by one: of a row, or of its rows of a chunk. */
static int64_t terms_of(const cuda_schedule *s, int i) {
    const emitter *e = s->e;
    if (s->elementwise) return e->rows / s->chunks / cuda_threads(s);
    int64_t own = cuda_is_row_partial(s, i) ? 1 : (int64_t)s->packs * s->vec;
    bool all = e->ir->inst[i].scope == ML_SCOPE_ALL;
    return all ? own * (e->rows / s->chunks / s->teams + 1) : own;
}

/* In f32 the roundings of LONG_SUM equal terms may add up to 4e-5. (Columns' sums of so many rows a
 * thread would be of tensors of 8 GB and more.) */
void cuda_find_compensated(cuda_schedule *s) {
    enum { LONG_SUM = 4096 };
    for (int i = 0; i < s->e->ir->inst_count; i++) {
        const ml_inst *inst = &s->e->ir->inst[i];
        bool sums = inst->kind == ML_INST_REDUCE && inst->op == ML_OP_SUM && i != s->online_sum &&
                    !cuda_is_column(s, inst) && strcmp(ml_suffix(inst->dtype), "f32") == 0;
        s->compensated[i] = sums && terms_of(s, i) > LONG_SUM;
    }
}
