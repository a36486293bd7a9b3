/* What both targets know of a kernel's IR before they choose a schedule: which phase and loop each
 * instruction belongs to, and what each pass needs. */
#include "codegen/emit/emit_internal.h"

int ml_inst_source(const ml_inst *inst, int at) {
    bool memory = inst->kind == ML_INST_LOAD || inst->kind == ML_INST_STORE;
    if (at >= 3) return !memory ? ML_NO_INST : at == 3 ? inst->index : inst->guard;
    if (inst->kind == ML_INST_MAP) return inst->src[at];
    bool one = inst->kind == ML_INST_STORE || inst->kind == ML_INST_REDUCE;
    return one && at == 0 ? inst->src[0] : ML_NO_INST;
}

bool ml_inst_reduces_row(const ml_inst *inst) {
    return inst->kind == ML_INST_REDUCE && inst->scope == ML_SCOPE_ROW;
}

bool ml_inst_reduces_partly(const ml_inst *inst) {
    return inst->kind == ML_INST_REDUCE && inst->scope != ML_SCOPE_ROW;
}

static int larger(int a, int b) {
    return a > b ? a : b;
}

/* A loop of size 1 has no index. The size of an outermost row loop is not known to the source. */
static bool is_trivial(const ml_kernel_ir *ir, int loop) {
    return ir->size[loop] == 1 && !(loop == 0 && ir->row_loops > 0);
}

static int operand_depth(const ml_kernel_ir *ir, int operand) {
    for (int loop = ir->loop_count - 1; loop >= 0; loop--)
        if (ir->operand[operand].stride[loop] != 0 && !is_trivial(ir, loop)) return loop;
    return -1;
}

static void analyse_instruction(emitter *e, int i) {
    const ml_kernel_ir *ir = e->ir;
    const ml_inst *inst = &ir->inst[i];
    int depth = -1, phase = inst->phase;
    FOR_EACH_SOURCE(inst, source) {
        const ml_inst *from = &ir->inst[source];
        if (source >= i)
            ml_raise(ML_INTERNAL, "kernel instruction %d reads %d, which comes later", i, source);
        depth = larger(depth, e->depth[source]);
        phase = larger(phase, e->phase[source] + ml_inst_reduces_row(from));
    }
    if (inst->kind == ML_INST_INDEX) depth = inst->operand;
    if (inst->kind == ML_INST_LOAD || inst->kind == ML_INST_STORE)
        depth = larger(depth, operand_depth(ir, inst->operand));
    e->phase[i] = phase;
    e->loop[i] = e->depth[i] = depth;
    if (inst->kind == ML_INST_REDUCE) {
        /* accumulates once for each element (or row) even where what it adds up is constant */
        bool by_row = inst->level == ML_LEVEL_ROW && inst->scope == ML_SCOPE_ALL;
        e->loop[i] = by_row ? ir->row_loops - 1 : e->inner;
        e->depth[i] = ir->row_loops - 1;
        if (by_row && depth >= ir->row_loops)
            ml_raise(ML_INTERNAL, "kernel instruction %d reduces columns at row level", i);
    }
    if (e->phase[i] >= EMIT_MAX_PHASES)
        ml_raise(ML_INTERNAL, "a kernel needs more than %d passes", EMIT_MAX_PHASES);
    e->phases = larger(e->phases, phase + 1 + ml_inst_reduces_row(inst));
}

bool emit_rounds(const ml_inst *inst) {
    return inst->kind == ML_INST_MAP && ml_is_narrow((ml_dtype)inst->dtype) &&
           !ml_op_is(inst->op, ML_EXACT);
}

/* A value of a narrow float need not be rounded where only stores of that dtype see it. */
static void find_exact(emitter *e) {
    const ml_kernel_ir *ir = e->ir;
    for (int i = 0; i < ir->inst_count; i++) e->exact[i] = emit_rounds(&ir->inst[i]);
    for (int i = 0; i < ir->inst_count; i++) {
        const ml_inst *inst = &ir->inst[i];
        const int stored = inst->kind == ML_INST_STORE ? ir->operand[inst->operand].dtype : -1;
        FOR_EACH_SOURCE(inst, source)
        if (ir->inst[source].dtype != stored) e->exact[source] = false;
    }
}

/* Keys of random numbers are scalars, so that all parameters of a shape are drawn by one kernel. */
static void find_scalars(emitter *e) {
    const ml_kernel_ir *ir = e->ir;
    e->scalars = EMIT_OWN_SCALARS;
    for (int i = 0; i < ir->inst_count; i++) {
        const ml_inst *inst = &ir->inst[i];
        if (inst->kind != ML_INST_MAP || inst->op != ML_OP_RANDOM) continue;
        int key = inst->src[0];
        if (ir->inst[key].kind == ML_INST_CONST && e->scalar[key] == 0 &&
            e->scalars < ML_MAX_SCALARS)
            e->scalar[key] = e->scalars++;
    }
}

static const char *index_text(emitter *e, int loop) {
    return is_trivial(e->ir, loop) ? "0LL" : ml_arena_format(e->arena, "i%d", loop);
}

void emit_analyse(emitter *e) {
    const ml_kernel_ir *ir = e->ir;
    size_t count = (size_t)ir->inst_count + 1;
    e->phase = ML_NEW_ARRAY(e->arena, int, count);
    e->depth = ML_NEW_ARRAY(e->arena, int, count);
    e->loop = ML_NEW_ARRAY(e->arena, int, count);
    e->buffered = ML_NEW_ARRAY(e->arena, bool, count);
    e->exact = ML_NEW_ARRAY(e->arena, bool, count);
    e->scalar = ML_NEW_ARRAY(e->arena, int, count);
    for (int s = 0; s < EMIT_MAX_PHASES; s++) e->need[s] = ML_NEW_ARRAY(e->arena, bool, count);
    e->index = ML_NEW_ARRAY(e->arena, const char *, ML_MAX_LOOPS);
    e->inner = ir->loop_count - 1;
    e->rows = e->columns = 1;
    e->phases = 1;
    for (int loop = 0; loop < ir->loop_count; loop++) {
        e->index[loop] = index_text(e, loop);
        *(loop < ir->row_loops ? &e->rows : &e->columns) *= ir->size[loop];
    }
    for (int i = 0; i < ir->inst_count; i++) analyse_instruction(e, i);
    find_exact(e);
    find_scalars(e);
}

/* Whether the value of instruction i must be carried from pass to pass: it changes by column. */
static bool crosses(const emitter *e, int i, int phase) {
    return e->phase[i] < phase && e->depth[i] >= e->ir->row_loops;
}

void emit_needs(emitter *e) {
    const ml_kernel_ir *ir = e->ir;
    for (int phase = 0; phase < e->phases; phase++) {
        bool *need = e->need[phase];
        for (int i = ir->inst_count - 1; i >= 0; i--) {
            const ml_inst *inst = &ir->inst[i];
            if (e->phase[i] == phase) need[i] = true;
            if (!need[i] || (crosses(e, i, phase) && e->buffered[i])) continue;
            FOR_EACH_SOURCE(inst, source)
            if (crosses(e, source, phase)) need[source] = true;
        }
        e->passes[phase] = false;
        for (int i = 0; i < ir->inst_count; i++)
            if (need[i] && e->loop[i] >= ir->row_loops) e->passes[phase] = true;
    }
}
