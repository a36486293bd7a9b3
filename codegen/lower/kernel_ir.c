/* The last steps to kernel IR: levels and phases of instructions, loops collapsed where every
 * operand allows it, index arithmetic written out, memory that may be overwritten. */
#include "codegen/lower/kernel_internal.h"

#include <math.h>
#include <string.h>

enum {
    WORTH_SAVING = 6,         /* FLOPs of an element from which it is saved for a later phase */
    KEPT_LOAD_COLUMNS = 4096, /* CUDA: rows up to this length keep what they loaded */
};

static bool is_sink(const ml_inst *inst) {
    return inst->kind == ML_INST_STORE || ml_inst_reduces_partly(inst);
}

static bool uses_columns(const emission *e, const int64_t *stride) {
    if (!e->group->committed) return false;
    for (int d = e->group->row_digits; d < e->b.digits; d++)
        if (stride[d] != 0) return true;
    return false;
}

/* An ALL reduction takes one value an element, or one a row where it reduces the rows' axes alone.
 */
static ml_level all_level(const emission *e, const ml_inst *inst) {
    for (uint32_t w = 0; w < e->writes.count; w++) {
        const lower_root *root = &e->group->roots.at[e->writes.at[w].root];
        if (!e->writes.at[w].partial || root->scope != ML_SCOPE_ALL) continue;
        if (e->values.at[inst->operand] != e->writes.at[w].value) continue;
        for (int i = 0; i < root->space.rank; i++)
            if (uses_columns(e, root->index[i].coef)) return ML_LEVEL_ELEMENT;
    }
    return ML_LEVEL_ROW;
}

static void find_levels(emission *e) {
    for (uint32_t i = 0; i < e->b.inst.count; i++) {
        const ml_inst *inst = &e->b.inst.at[i];
        uint8_t level = ML_LEVEL_ROW;
        for (int s = 0; s < ML_INST_SOURCES; s++)
            if (ml_inst_source(inst, s) != ML_NO_INST && e->level[ml_inst_source(inst, s)] > level)
                level = e->level[ml_inst_source(inst, s)];
        if (inst->kind == LOWER_INST_AFFINE && uses_columns(e, e->b.affine.at[inst->operand].coef))
            level = ML_LEVEL_ELEMENT;
        if ((inst->kind == ML_INST_LOAD || inst->kind == ML_INST_STORE) &&
            uses_columns(e, e->operands.at[inst->operand].stride))
            level = ML_LEVEL_ELEMENT;
        if (inst->kind == ML_INST_REDUCE)
            level = inst->scope == ML_SCOPE_ROW      ? ML_LEVEL_ROW
                    : inst->scope == ML_SCOPE_COLUMN ? ML_LEVEL_ELEMENT
                                                     : all_level(e, inst);
        e->level[i] = level;
    }
}

/* Sinks and row reductions run as early as they can, everything else where it is first needed. */
static void find_phases(emission *e) {
    uint32_t count = e->b.inst.count;
    uint8_t *first = e->phase;
    for (uint32_t i = 0; i < count; i++) {
        const ml_inst *inst = &e->b.inst.at[i];
        for (int s = 0; s < ML_INST_SOURCES; s++) {
            int from = ml_inst_source(inst, s);
            if (from == ML_NO_INST) continue;
            int phase = first[from] + ml_inst_reduces_row(&e->b.inst.at[from]);
            if (phase > first[i]) first[i] = (uint8_t)phase;
        }
    }
    for (uint32_t at = count; at > 0; at--) {
        uint32_t i = at - 1;
        const ml_inst *inst = &e->b.inst.at[i];
        bool fixed = is_sink(inst) || ml_inst_reduces_row(inst);
        if (is_sink(inst)) e->live[i] = true;
        if (!e->live[i]) continue;
        if (!fixed && e->last[i] > 0) e->phase[i] = (uint8_t)(e->last[i] - 1);
        e->last[i] = e->phase[i];
        for (int s = 0; s < ML_INST_SOURCES; s++) {
            int from = ml_inst_source(inst, s);
            if (from == ML_NO_INST) continue;
            /* last[] holds, before its instruction is visited, the earliest need + 1 */
            uint8_t need = (uint8_t)(e->phase[i] + 1);
            if (!e->live[from] || need < e->last[from]) e->last[from] = need;
            e->live[from] = true;
        }
    }
    for (uint32_t at = count; at > 0; at--) { /* the last phase in which it may be computed again */
        uint32_t i = at - 1;
        const ml_inst *inst = &e->b.inst.at[i];
        if (!e->live[i]) continue;
        uint8_t last = is_sink(inst) || ml_inst_reduces_row(inst) || e->level[i] == ML_LEVEL_ROW
                           ? e->phase[i]
                           : e->last[i];
        for (int s = 0; s < ML_INST_SOURCES; s++) {
            int from = ml_inst_source(inst, s);
            if (from != ML_NO_INST && last > e->last[from]) e->last[from] = last;
        }
    }
}

/* --- loops --- */

typedef struct {
    int count, rows;
    int digit[ML_MAX_LOOPS]; /* the innermost digit of each loop */
    int64_t size[ML_MAX_LOOPS];
} loops;

/* Whether digits d and d + 1 can be one loop for every operand and index. */
static bool can_join(const emission *e, int d) {
    if (e->group->committed && d + 1 == e->group->row_digits) return false;
    for (uint32_t o = 0; o < e->operands.count; o++)
        if (e->operands.at[o].stride[d] != e->operands.at[o].stride[d + 1] * e->b.size[d + 1])
            return false;
    for (uint32_t i = 0; i < e->b.inst.count; i++) {
        const ml_inst *inst = &e->b.inst.at[i];
        if (e->live[i] && inst->kind == LOWER_INST_AFFINE &&
            e->b.affine.at[inst->operand].coef[d] !=
                e->b.affine.at[inst->operand].coef[d + 1] * e->b.size[d + 1])
            return false;
    }
    return true;
}

static void collapse(const emission *e, loops *out) {
    int row_digits = e->group->committed ? e->group->row_digits : e->b.digits;
    memset(out, 0, sizeof *out);
    for (int d = 0; d < e->b.digits; d++) {
        bool joins = d > 0 && can_join(e, d - 1);
        if (!joins) {
            out->size[out->count] = 1;
            out->count++;
            if (d < row_digits) out->rows++;
        }
        out->size[out->count - 1] *= e->b.size[d];
        out->digit[out->count - 1] = d;
    }
    if (out->rows > 0 || out->count == ML_MAX_LOOPS) return;
    /* a kernel has at least one row */
    for (int i = out->count; i > 0; i--) {
        out->size[i] = out->size[i - 1];
        out->digit[i] = out->digit[i - 1];
    }
    out->size[0] = 1;
    out->digit[0] = -1;
    out->count++;
    out->rows = 1;
}

/* --- writing it out --- */

typedef struct {
    emission *e;
    ml_kernel_ir *ir;
    const loops *loops;
    uint16_t *to; /* new number of each instruction */
    ML_VEC(ml_inst) inst;
    uint16_t index[ML_MAX_LOOPS]; /* INDEX instructions by loop */
} writer;

static uint16_t put(writer *w, const ml_inst *inst) {
    *ML_PUSH(w->e->b.arena, &w->inst) = *inst;
    if (w->inst.count >= ML_NO_INST) ml_raise(ML_INVALID, "one kernel has too many instructions");
    return (uint16_t)(w->inst.count - 1);
}

static ml_inst plain_i64(ml_inst_kind kind, uint8_t level, uint8_t phase) {
    ml_inst inst;
    memset(&inst, 0, sizeof inst);
    inst.kind = (uint8_t)kind;
    inst.dtype = inst.from_dtype = ML_I64;
    inst.level = level;
    inst.phase = phase;
    inst.src[0] = inst.src[1] = inst.src[2] = inst.index = inst.guard = ML_NO_INST;
    return inst;
}

static uint16_t put_const(writer *w, int64_t value, uint8_t phase) {
    ml_inst inst = plain_i64(ML_INST_CONST, ML_LEVEL_ROW, phase);
    inst.constant.integer = value;
    return put(w, &inst);
}

static uint16_t put_binary(writer *w, ml_op op, uint16_t a, uint16_t b, uint8_t phase) {
    uint8_t level =
        w->inst.at[a].level > w->inst.at[b].level ? w->inst.at[a].level : w->inst.at[b].level;
    ml_inst inst = plain_i64(ML_INST_MAP, level, phase);
    inst.op = (uint8_t)op;
    inst.src[0] = a;
    inst.src[1] = b;
    return put(w, &inst);
}

static uint16_t put_affine(writer *w, const lower_index *index, uint8_t phase) {
    uint16_t sum = ML_NO_INST;
    for (int i = 0; i < w->loops->count; i++) {
        int64_t coef = w->loops->digit[i] < 0 ? 0 : index->coef[w->loops->digit[i]];
        if (coef == 0) continue;
        ml_inst inst =
            plain_i64(ML_INST_INDEX, i < w->loops->rows ? ML_LEVEL_ROW : ML_LEVEL_ELEMENT, 0);
        inst.operand = (uint16_t)i;
        if (w->index[i] == ML_NO_INST) w->index[i] = put(w, &inst);
        uint16_t term = w->index[i];
        if (coef != 1) term = put_binary(w, ML_OP_MUL, term, put_const(w, coef, phase), phase);
        sum = sum == ML_NO_INST ? term : put_binary(w, ML_OP_ADD, sum, term, phase);
    }
    if (sum == ML_NO_INST) return put_const(w, index->offset, phase);
    if (index->offset == 0) return sum;
    return put_binary(w, ML_OP_ADD, sum, put_const(w, index->offset, phase), phase);
}

static uint16_t renumber(const writer *w, uint16_t inst) {
    return inst == ML_NO_INST ? ML_NO_INST : w->to[inst];
}

/* FLOPs to compute an element again, loads at 0. */
static int cost_of(const ml_inst *inst, const int *cost) {
    int total = inst->kind == ML_INST_MAP ? ml_ops[inst->op].flops : 0;
    for (int s = 0; s < 3 && inst->kind == ML_INST_MAP; s++)
        if (inst->src[s] != ML_NO_INST) total += cost[inst->src[s]];
    return total > 1000 ? 1000 : total;
}

static bool worth_keeping(const emission *e, const ml_inst *inst, int cost) {
    if (inst->kind == ML_INST_LOAD)
        return e->l->target->kind == ML_TARGET_CUDA && inst->index == ML_NO_INST &&
               fuse_columns(e->group) <= KEPT_LOAD_COLUMNS;
    return inst->kind == ML_INST_MAP && cost >= WORTH_SAVING;
}

static void write_insts(writer *w) {
    emission *e = w->e;
    uint32_t count = e->b.inst.count;
    int *cost = ML_NEW_ARRAY(e->b.arena, int, count + 1);
    w->to = ML_NEW_ARRAY(e->b.arena, uint16_t, count + 1);
    memset(w->index, 0xff, sizeof w->index);
    for (uint32_t at = 0; at < 2 * count; at++) {
        uint32_t i = at % count; /* stores come last: they may overwrite what others load */
        ml_inst inst = e->b.inst.at[i];
        if (!e->live[i] || (inst.kind == ML_INST_STORE) != (at >= count)) continue;
        cost[i] = e->level[i] == ML_LEVEL_ROW ? 0 : cost_of(&inst, cost);
        if (inst.kind == LOWER_INST_AFFINE) {
            w->to[i] = put_affine(w, &e->b.affine.at[inst.operand], e->phase[i]);
            continue;
        }
        inst.level = e->level[i];
        inst.phase = e->phase[i];
        inst.saved = e->level[i] == ML_LEVEL_ELEMENT && e->last[i] > e->phase[i] &&
                     worth_keeping(e, &inst, cost[i]);
        for (int s = 0; s < 3; s++) inst.src[s] = renumber(w, inst.src[s]);
        inst.index = renumber(w, inst.index);
        inst.guard = renumber(w, inst.guard);
        w->to[i] = put(w, &inst);
        int end = inst.phase + 1 + ml_inst_reduces_row(&inst);
        if (end > w->ir->phases) w->ir->phases = end;
    }
}

/* Instructions that were appended after the instructions that use them: order them by use. */
static void sort_insts(emission *e) {
    uint32_t count = e->b.inst.count;
    bool sorted = true;
    for (uint32_t i = 0; i < count; i++)
        for (int s = 0; s < ML_INST_SOURCES; s++) {
            int from = ml_inst_source(&e->b.inst.at[i], s);
            sorted = sorted && (from == ML_NO_INST || (uint32_t)from < i);
        }
    if (sorted) return;
    uint16_t *to = ML_NEW_ARRAY(e->b.arena, uint16_t, count);
    ml_inst *out = ML_NEW_ARRAY(e->b.arena, ml_inst, count);
    uint32_t placed = 0;
    memset(to, 0xff, sizeof *to * count);
    while (placed < count) {
        for (uint32_t i = 0; i < count; i++) {
            bool ready = to[i] == ML_NO_INST;
            for (int s = 0; s < ML_INST_SOURCES && ready; s++) {
                int from = ml_inst_source(&e->b.inst.at[i], s);
                ready = from == ML_NO_INST || to[from] != ML_NO_INST;
            }
            if (!ready) continue;
            ml_inst inst = e->b.inst.at[i];
            for (int s = 0; s < 3; s++)
                if (inst.src[s] != ML_NO_INST) inst.src[s] = to[inst.src[s]];
            if (inst.index != ML_NO_INST) inst.index = to[inst.index];
            if (inst.guard != ML_NO_INST) inst.guard = to[inst.guard];
            to[i] = (uint16_t)placed;
            out[placed++] = inst;
        }
    }
    memcpy(e->b.inst.at, out, sizeof *out * count);
}

void lower_finish_ir(emission *e, ml_kernel_ir *ir) {
    sort_insts(e);
    uint32_t count = e->b.inst.count;
    loops loop;
    e->level = ML_NEW_ARRAY(e->b.arena, uint8_t, count + 1);
    e->phase = ML_NEW_ARRAY(e->b.arena, uint8_t, count + 1);
    e->last = ML_NEW_ARRAY(e->b.arena, uint8_t, count + 1);
    e->live = ML_NEW_ARRAY(e->b.arena, bool, count + 1);
    find_levels(e);
    find_phases(e);
    collapse(e, &loop);
    ir->loop_count = loop.count;
    ir->row_loops = loop.rows;
    ir->operand_count = (int)e->operands.count;
    memcpy(ir->size, loop.size, sizeof ir->size);
    ir->operand = ML_NEW_ARRAY(e->l->arena, ml_operand, e->operands.count + 1);
    for (int o = 0; o < ir->operand_count; o++) {
        ir->operand[o] = e->operands.at[o];
        for (int i = 0; i < ML_MAX_LOOPS; i++)
            ir->operand[o].stride[i] =
                i < loop.count && loop.digit[i] >= 0 ? e->operands.at[o].stride[loop.digit[i]] : 0;
    }
    writer w = {.e = e, .ir = ir, .loops = &loop};
    ir->phases = 1;
    write_insts(&w);
    ir->inst_count = (int)w.inst.count;
    ir->inst = ML_NEW_ARRAY(e->l->arena, ml_inst, w.inst.count + 1);
    if (w.inst.count > 0) memcpy(ir->inst, w.inst.at, sizeof *ir->inst * w.inst.count);
    bool partial = false;
    for (uint32_t i = 0; i < e->writes.count; i++) partial = partial || e->writes.at[i].partial;
    ir->chunks = partial ? e->group->chunks : 0;
}

/* --- overwriting --- */

/* The phase in which operand o is read for the last time; -1 where it is read at computed places.
 */
static int last_read(const emission *e, int o) {
    int last = 0;
    for (uint32_t i = 0; i < e->b.inst.count; i++) {
        const ml_inst *inst = &e->b.inst.at[i];
        if (!e->live[i] || inst->kind != ML_INST_LOAD || inst->operand != o) continue;
        if (inst->index != ML_NO_INST || inst->guard != ML_NO_INST) return -1;
        if (e->last[i] > last) last = e->last[i];
    }
    return last;
}

static int store_phase(const emission *e, int o) {
    for (uint32_t i = 0; i < e->b.inst.count; i++) {
        const ml_inst *inst = &e->b.inst.at[i];
        if (inst->kind == ML_INST_STORE && inst->operand == o)
            return inst->index == ML_NO_INST ? e->phase[i] : -1;
    }
    return -1;
}

/* What is read or written at several iterations never shares memory, not even along the columns of
 * a row: a GPU may cut a row over blocks, and each of them reads what the row needs. */
static bool same_elements(const ml_kernel_ir *ir, const ml_operand *a, const ml_operand *b) {
    if (ml_dtypes[a->dtype].bytes != ml_dtypes[b->dtype].bytes) return false;
    for (int i = 0; i < ir->loop_count; i++) {
        if (ir->size[i] == 1) continue;
        if (a->stride[i] != b->stride[i] || a->stride[i] == 0) return false;
    }
    return true;
}

static bool read_once(const emission *e, int read) {
    const ml_schedule *s = e->l->s;
    uint32_t storage = s->values.at[e->values.at[read]].storage;
    for (int o = 0; o < e->reads; o++)
        if (o != read && s->values.at[e->values.at[o]].storage == storage) return false;
    return true;
}

uint64_t *lower_aliases(const emission *e, const ml_kernel_ir *ir) {
    uint64_t *alias = ML_NEW_ARRAY(e->l->arena, uint64_t, ir->operand_count - e->reads + 1);
    const ml_schedule *s = e->l->s;
    for (int write = e->reads; write < ir->operand_count; write++) {
        int phase = store_phase(e, write);
        for (int read = 0; read < e->reads && phase >= 0; read++) {
            int last = last_read(e, read);
            const ml_value *from = &s->values.at[e->values.at[read]];
            const ml_value *to = &s->values.at[e->values.at[write]];
            /* a row's value is loaded by many threads: all have it only after a reduction */
            int first = e->group->committed && !uses_columns(e, e->operands.at[read].stride);
            bool fits = last >= 0 && last + first <= phase && read_once(e, read) &&
                        same_elements(ir, &ir->operand[read], &ir->operand[write]) &&
                        from->offset == to->offset &&
                        s->storages.at[from->storage].bytes >= s->storages.at[to->storage].bytes;
            if (fits) alias[write - e->reads] |= (uint64_t)1 << read;
        }
    }
    return alias;
}

/* --- cost and identity --- */

/* Elements of an operand that loads at computed indices reach: each once at most. */
static int64_t gathered(const ml_value *value, const ml_kernel_ir *ir, int operand, double rows,
                        double elements) {
    double most = (double)ml_type_elements(&value->type), reached = 0;
    for (int i = 0; i < ir->inst_count; i++) {
        const ml_inst *inst = &ir->inst[i];
        bool computed = inst->kind == ML_INST_LOAD && inst->operand == operand &&
                        inst->index != ML_NO_INST && ir->inst[inst->index].kind != ML_INST_CONST;
        if (computed) reached += inst->level == ML_LEVEL_ELEMENT ? elements : rows;
    }
    return (int64_t)(reached < most ? reached : most);
}

/* Which part of an operand's elements is also of operand `other`, which reads the same memory by
 * the same strides from elsewhere on: taps of a convolution. */
static double also_of(const ml_schedule *s, const ml_kernel_ir *ir, const uint32_t *values,
                      int operand, int other) {
    const ml_operand *a = &ir->operand[operand], *b = &ir->operand[other];
    const ml_value *here = &s->values.at[values[operand]], *there = &s->values.at[values[other]];
    int64_t apart = here->offset - there->offset;
    double share = 1;
    if (here->storage != there->storage || a->written || b->written || a->dtype != b->dtype ||
        memcmp(a->stride, b->stride, sizeof a->stride) != 0)
        return 0;
    for (int i = 0; i < ir->loop_count; i++) { /* outer loops have larger strides */
        if (a->stride[i] <= 0) continue;
        int64_t steps = apart / a->stride[i];
        apart -= steps * a->stride[i];
        share *= 1 - fmin(1, fabs((double)steps) / (double)ir->size[i]);
    }
    return apart ? 0 : share;
}

void lower_describe_ir(const ml_schedule *s, const ml_kernel_ir *ir, ml_step *step) {
    double rows = 1, elements = 1;
    for (int i = 0; i < ir->loop_count; i++) {
        if (i < ir->row_loops) rows *= (double)ir->size[i];
        elements *= (double)ir->size[i];
    }
    for (int i = 0; i < ir->inst_count; i++) {
        const ml_inst *inst = &ir->inst[i];
        if (inst->kind != ML_INST_MAP && inst->kind != ML_INST_REDUCE) continue;
        if (ml_dtypes[inst->dtype].kind != ML_KIND_FLOAT) continue;
        bool element = inst->level == ML_LEVEL_ELEMENT || inst->kind == ML_INST_REDUCE;
        step->flops += ml_ops[inst->op].flops * (element ? elements : rows);
    }
    for (int o = 0; o < ir->operand_count; o++) {
        int64_t touched = 1, computed;
        computed = gathered(&s->values.at[step->values[o]], ir, o, rows, elements);
        for (int i = 0; i < ir->loop_count; i++)
            if (ir->operand[o].stride[i] != 0) touched *= ir->size[i];
        double again = 0;
        for (int before = 0; before < o && computed <= 0; before++)
            again = fmax(again, also_of(s, ir, step->values, o, before));
        touched = computed > 0 ? computed : (int64_t)((1 - again) * (double)touched);
        step->bytes += touched * ml_dtypes[ir->operand[o].dtype].bytes;
    }
}

uint64_t lower_hash_ir(const ml_kernel_ir *ir) {
    int64_t head[5] = {ir->loop_count, ir->row_loops, ir->operand_count, ir->phases, ir->chunks};
    uint64_t hash = ml_hash(head, sizeof head, 7);
    hash = ml_hash(ir->size, sizeof ir->size, hash);
    for (int o = 0; o < ir->operand_count; o++) {
        hash = ml_hash(&ir->operand[o].dtype, 1, hash);
        hash = ml_hash(ir->operand[o].stride, sizeof ir->operand[o].stride, hash);
    }
    return ml_hash(ir->inst, sizeof *ir->inst * (size_t)ir->inst_count, hash);
}

bool lower_same_ir(const ml_kernel_ir *a, const ml_kernel_ir *b) {
    if (a->loop_count != b->loop_count || a->row_loops != b->row_loops ||
        a->operand_count != b->operand_count || a->inst_count != b->inst_count ||
        a->phases != b->phases || a->chunks != b->chunks ||
        memcmp(a->size, b->size, sizeof a->size) != 0)
        return false;
    for (int o = 0; o < a->operand_count; o++) {
        if (a->operand[o].dtype != b->operand[o].dtype ||
            a->operand[o].written != b->operand[o].written ||
            memcmp(a->operand[o].stride, b->operand[o].stride, sizeof a->operand[o].stride) != 0)
            return false;
    }
    return memcmp(a->inst, b->inst, sizeof *a->inst * (size_t)a->inst_count) == 0;
}
