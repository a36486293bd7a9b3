/* Kernel IR to kernels: what both targets share. emit_c.c and emit_cuda*.c choose schedules and
 * print loops. */
#include "codegen/emit/emit.h"

#include <stddef.h>
#include <string.h>

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

#define FOR_EACH_SOURCE(inst, source)                                                              \
    for (int source##_at = 0, source; source##_at < ML_INST_SOURCES; source##_at++)                \
        if ((source = ml_inst_source(inst, source##_at)) != ML_NO_INST)

static void analyse_instruction(emitter *e, int i) {
    const ml_kernel_ir *ir = e->ir;
    const ml_inst *inst = &ir->inst[i];
    int depth = -1, stage = inst->phase;
    FOR_EACH_SOURCE(inst, source) {
        const ml_inst *from = &ir->inst[source];
        if (source >= i)
            ml_raise(ML_INTERNAL, "kernel instruction %d reads %d, which comes later", i, source);
        depth = larger(depth, e->depth[source]);
        stage = larger(stage, e->stage[source] + ml_inst_reduces_row(from));
    }
    if (inst->kind == ML_INST_INDEX) depth = inst->operand;
    if (inst->kind == ML_INST_LOAD || inst->kind == ML_INST_STORE)
        depth = larger(depth, operand_depth(ir, inst->operand));
    e->stage[i] = stage;
    e->place[i] = e->depth[i] = depth;
    if (inst->kind == ML_INST_REDUCE) {
        /* accumulates once for each element (or row) even where what it adds up is constant */
        bool by_row = inst->level == ML_LEVEL_ROW && inst->scope == ML_SCOPE_ALL;
        e->place[i] = by_row ? ir->row_loops - 1 : e->inner;
        e->depth[i] = ir->row_loops - 1;
        if (by_row && depth >= ir->row_loops)
            ml_raise(ML_INTERNAL, "kernel instruction %d reduces columns at row level", i);
    }
    if (e->stage[i] >= EMIT_MAX_STAGES)
        ml_raise(ML_INTERNAL, "a kernel needs more than %d passes", EMIT_MAX_STAGES);
    e->stages = larger(e->stages, stage + 1 + ml_inst_reduces_row(inst));
}

/* A cast to bf16 need not round where only stores to bf16 see it. */
static void find_exact_casts(emitter *e) {
    const ml_kernel_ir *ir = e->ir;
    for (int i = 0; i < ir->inst_count; i++)
        e->exact[i] = ir->inst[i].kind == ML_INST_MAP && ir->inst[i].op == ML_OP_CAST &&
                      ir->inst[i].dtype == ML_BF16;
    for (int i = 0; i < ir->inst_count; i++) {
        const ml_inst *inst = &ir->inst[i];
        bool rounds = inst->kind == ML_INST_STORE && ir->operand[inst->operand].dtype == ML_BF16;
        if (rounds) continue;
        FOR_EACH_SOURCE(inst, source) e->exact[source] = false;
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

/* Once the target has set its own. */
static void set_scalars(const emitter *e, ml_kernel *out) {
    out->scalar_count = e->scalars;
    for (int i = 0; i < e->ir->inst_count; i++)
        if (e->scalar[i] > 0) out->scalar[e->scalar[i]] = e->ir->inst[i].constant.integer;
}

static const char *index_text(emitter *e, int loop) {
    return is_trivial(e->ir, loop) ? "0LL" : ml_arena_format(e->arena, "i%d", loop);
}

void emit_analyse(emitter *e) {
    const ml_kernel_ir *ir = e->ir;
    size_t count = (size_t)ir->inst_count + 1;
    e->stage = ML_NEW_ARRAY(e->arena, int, count);
    e->depth = ML_NEW_ARRAY(e->arena, int, count);
    e->place = ML_NEW_ARRAY(e->arena, int, count);
    e->buffered = ML_NEW_ARRAY(e->arena, bool, count);
    e->exact = ML_NEW_ARRAY(e->arena, bool, count);
    e->scalar = ML_NEW_ARRAY(e->arena, int, count);
    for (int s = 0; s < EMIT_MAX_STAGES; s++) e->need[s] = ML_NEW_ARRAY(e->arena, bool, count);
    e->index = ML_NEW_ARRAY(e->arena, const char *, ML_MAX_LOOPS);
    e->inner = ir->loop_count - 1;
    e->rows = e->columns = 1;
    e->stages = 1;
    for (int loop = 0; loop < ir->loop_count; loop++) {
        e->index[loop] = index_text(e, loop);
        *(loop < ir->row_loops ? &e->rows : &e->columns) *= ir->size[loop];
    }
    for (int i = 0; i < ir->inst_count; i++) analyse_instruction(e, i);
    find_exact_casts(e);
    find_scalars(e);
}

/* Whether the value of instruction i must be carried from pass to pass: it changes by column. */
static bool crosses(const emitter *e, int i, int stage) {
    return e->stage[i] < stage && e->depth[i] >= e->ir->row_loops;
}

void emit_needs(emitter *e) {
    const ml_kernel_ir *ir = e->ir;
    for (int stage = 0; stage < e->stages; stage++) {
        bool *need = e->need[stage];
        for (int i = ir->inst_count - 1; i >= 0; i--) {
            const ml_inst *inst = &ir->inst[i];
            if (e->stage[i] == stage) need[i] = true;
            if (!need[i] || (crosses(e, i, stage) && e->buffered[i])) continue;
            FOR_EACH_SOURCE(inst, source)
            if (crosses(e, source, stage)) need[source] = true;
        }
        e->passes[stage] = false;
        for (int i = 0; i < ir->inst_count; i++)
            if (need[i] && e->place[i] >= ir->row_loops) e->passes[stage] = true;
    }
}

void emit_offset(emitter *e, ml_text *out, const ml_operand *operand, int first, int last,
                 int skip) {
    for (int loop = first; loop <= last; loop++) {
        int64_t stride = operand->stride[loop];
        if (stride == 0 || loop == skip || strcmp(e->index[loop], "0LL") == 0) continue;
        if (stride == 1)
            ml_text_add(out, " + %s", e->index[loop]);
        else
            ml_text_add(out, " + %s * %lld", e->index[loop], (long long)stride);
    }
}

const char *emit_name(emitter *e, int inst) {
    const ml_inst *value = &e->ir->inst[inst];
    if (value->kind != ML_INST_CONST) return ml_arena_format(e->arena, "v%d", inst);
    if (e->scalar[inst] > 0)
        return ml_arena_format(e->arena, "%ss[%d]", e->target.kind == ML_TARGET_CUDA ? "a." : "",
                               e->scalar[inst]);
    ml_text text = {.arena = e->arena};
    emit_constant(&text, (ml_dtype)value->dtype, value->constant.number, value->constant.integer);
    return text.text;
}

void emit_value(emitter *e, ml_text *out, int i) {
    const ml_inst *inst = &e->ir->inst[i];
    if (inst->kind == ML_INST_CONST) return;
    ml_text_add(out, "const %s v%d = ", emit_compute_type((ml_dtype)inst->dtype), i);
    if (inst->kind == ML_INST_INDEX) {
        ml_text_add(out, "%s;\n", e->index[inst->operand]);
        return;
    }
    const char *operands[3] = {"", "", ""};
    FOR_EACH_SOURCE(inst, source) operands[source_at] = emit_name(e, source);
    ml_dtype from = (ml_dtype)e->ir->inst[inst->src[0]].dtype, to = (ml_dtype)inst->dtype;
    if (e->exact[i]) to = from == ML_F64 ? ML_F32 : from;
    ml_emit_map(out, (ml_op)inst->op, to, from, operands);
    ml_text_add(out, ";\n");
}

/* "exp+sum+div": the distinct operations, for people. */
static const char *make_label(emitter *e) {
    const ml_kernel_ir *ir = e->ir;
    ml_text text = {.arena = e->arena};
    bool seen[ML_OP_COUNT] = {false};
    int named = 0;
    for (int i = 0; i < ir->inst_count; i++) {
        const ml_inst *inst = &ir->inst[i];
        if (inst->kind != ML_INST_MAP && inst->kind != ML_INST_REDUCE) continue;
        if (seen[inst->op] || inst->op == ML_OP_CAST) continue;
        seen[inst->op] = true;
        if (++named > 8) continue;
        ml_text_add(&text, "%s%s", named > 1 ? "+" : "", ml_ops[inst->op].name);
    }
    if (named > 8) ml_text_add(&text, "+...");
    return named > 0 ? text.text : "copy";
}

const char *ml_prelude(ml_target_kind kind) {
    return kind == ML_TARGET_CUDA ? emit_prelude_cuda : emit_prelude_c;
}

/* --- kernels --- */

static const ml_kernel_ir *copy_ir(const ml_kernel_ir *ir, ml_arena *arena) {
    ml_kernel_ir *own = ML_NEW(arena, ml_kernel_ir);
    *own = *ir;
    own->inst = ML_NEW_ARRAY(arena, ml_inst, ir->inst_count + 1);
    own->operand = ML_NEW_ARRAY(arena, ml_operand, ir->operand_count + 1);
    memcpy(own->inst, ir->inst, sizeof *ir->inst * (size_t)ir->inst_count);
    memcpy(own->operand, ir->operand, sizeof *ir->operand * (size_t)ir->operand_count);
    if (ir->loop_count == 0) { /* a single element: one loop of size 1 */
        own->loop_count = own->row_loops = 1;
        own->size[0] = 1;
    }
    return own;
}

/* Of what the source shows: not of an outermost row loop's size, nor of scalars. */
static uint64_t hash_ir(const emitter *e) {
    const ml_kernel_ir *ir = e->ir;
    int bounded = ir->row_loops > 0; /* the outermost loop's bound is an argument */
    int head[] = {ir->loop_count, ir->row_loops, ir->operand_count, ir->inst_count};
    uint64_t hash = ml_hash(head, sizeof head, (uint64_t)e->target.kind);
    hash = ml_hash(ir->size + bounded, sizeof *ir->size * (size_t)(ir->loop_count - bounded), hash);
    for (int o = 0; o < ir->operand_count; o++) {
        const ml_operand *operand = &ir->operand[o];
        uint8_t kind[] = {operand->dtype, operand->written};
        hash = ml_hash(kind, sizeof kind, hash);
        hash = ml_hash(operand->stride, sizeof *operand->stride * (size_t)ir->loop_count, hash);
    }
    for (int i = 0; i < ir->inst_count; i++) {
        const ml_inst *inst = &ir->inst[i];
        int64_t constant = e->scalar[i] > 0 ? e->scalar[i] : inst->constant.integer;
        hash = ml_hash(inst, offsetof(ml_inst, guard) + sizeof inst->guard, hash);
        hash = ml_hash(&constant, sizeof constant, hash);
    }
    return hash;
}

static void name(ml_kernel *kernel, uint64_t key, ml_arena *arena) {
    kernel->key = key;
    kernel->entry = ml_arena_format(arena, "ml_%016llx", (unsigned long long)key);
}

static const char *print(const ml_kernel *kernel, ml_arena *arena) {
    emitter e = *(const emitter *)kernel->recipe;
    e.arena = arena;
    e.text = (ml_text){.arena = arena};
    e.entry = kernel->entry;
    e.batch = kernel->capacity;
    return e.target.kind == ML_TARGET_CUDA ? emit_cuda_print(&e) : emit_c_print(&e);
}

void emit_print_marked(ml_text *out, const char *name, const bool *marks, int count) {
    bool any = false;
    for (int i = 0; i < count; i++) {
        if (!marks[i]) continue;
        if (!any) ml_text_add(out, "    %s", name);
        ml_text_add(out, " %%%d", i);
        any = true;
    }
    if (any) ml_text_add(out, "\n");
}

void ml_kernel_print_schedule(const ml_kernel *kernel, ml_text *out) {
    if (kernel->print != print) return;
    const emitter *e = kernel->recipe;
    (e->target.kind == ML_TARGET_CUDA ? emit_cuda_print_schedule : emit_c_print_schedule)(e, out);
}

void ml_emit(const ml_kernel_ir *ir, const ml_target *target, ml_arena *arena, ml_kernel *out) {
    emitter *e = ML_NEW(arena, emitter);
    *e = (emitter){.ir = copy_ir(ir, arena), .target = *target, .arena = arena};
    memset(out, 0, sizeof *out);
    emit_analyse(e);
    (target->kind == ML_TARGET_CUDA ? emit_cuda_choose : emit_c_choose)(e, out);
    set_scalars(e, out);
    out->pointer_count = ir->operand_count;
    out->label = make_label(e);
    out->print = print;
    out->recipe = e;
    ml_text schedule = {.arena = arena};
    ml_kernel_print_schedule(out, &schedule);
    name(out, ml_hash(schedule.text, schedule.length, hash_ir(e)), arena);
}

int ml_batch_capacity(const ml_kernel *kernel) {
    enum { WORDS = 512 }; /* of a kernel's arguments: 4 KiB */
    return kernel->joins ? (WORDS - 1) / (kernel->pointer_count + 1 + kernel->scalar_count) : 0;
}

void ml_kernel_batch(const ml_kernel *const *members, int count, ml_arena *arena, ml_kernel *out) {
    int capacity = ml_batch_capacity(members[0]), scalars = members[0]->scalar_count;
    int words = 1 + (1 + scalars) * capacity;
    int64_t *table = ML_NEW_ARRAY(arena, int64_t, words), blocks = 0;
    *out = *members[0];
    out->capacity = capacity;
    name(out, ml_hash(&capacity, sizeof capacity, members[0]->key), arena);
    out->pointer_count = capacity * members[0]->pointer_count;
    out->scalar_count = 0;
    out->joins = false;
    out->table = table;
    out->table_count = words;
    table[0] = count;
    for (int i = 0; i < count; i++) {
        table[1 + i] = blocks;
        for (int k = 0; k < scalars; k++)
            table[1 + capacity + scalars * i + k] = members[i]->scalar[k];
        blocks += members[i]->grid[0];
    }
    if (blocks > INT32_MAX)
        ml_raise(ML_TOO_LARGE, "a launch needs %lld blocks, more than a GPU can start",
                 (long long)blocks);
    out->grid[0] = (uint32_t)blocks;
}
