/* A kernel of loops, in three steps: choose a schedule for the target, from which the launch and
 * the kernel's name follow; print the schedule, for people; print the source, when it is asked for.
 */
#include "codegen/emit/emit_internal.h"
#include "codegen/kernel_files.h"

#include <stddef.h>
#include <string.h>

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

void ml_kernel_print_schedule(const ml_kernel *kernel, ml_text *out) {
    if (kernel->print != print) return;
    const emitter *e = kernel->recipe;
    (e->target.kind == ML_TARGET_CUDA ? emit_cuda_print_schedule : emit_c_print_schedule)(e, out);
}

/* Once the target has set its own. */
static void set_scalars(const emitter *e, ml_kernel *out) {
    out->scalar_count = e->scalars;
    for (int i = 0; i < e->ir->inst_count; i++)
        if (e->scalar[i] > 0) out->scalar[e->scalar[i]] = e->ir->inst[i].constant.integer;
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
    return kernel->batchable ? (WORDS - 1) / (kernel->pointer_count + 1 + kernel->scalar_count) : 0;
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
    out->batchable = false;
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

const char *ml_prelude(ml_target_kind kind) {
    const char *name = kind == ML_TARGET_CUDA ? "prelude.cuh" : "prelude.h";
    return ml_kernel_file_find(name, strlen(name))->text;
}
