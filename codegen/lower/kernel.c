/* A group's kernel: instructions of all roots, phases, collapsed loops, operands, what may be
 * overwritten. */
#include "codegen/lower/kernel_internal.h"

#include <string.h>

enum { WRITES = 0x4000 /* operand numbers of writes, until the reads are known */ };

/* --- instructions of the roots --- */

static lower_write *add_write(emission *e, uint32_t value, uint32_t root, bool partial) {
    lower_write *write = ML_PUSH(e->b.arena, &e->writes);
    write->value = value;
    write->root = root;
    write->partial = partial;
    return write;
}

static bool reduces(const emission *e, const lower_root *root) {
    const ml_type *type = ml_graph_type(e->l->g, root->node);
    if (root->kind != LOWER_ROOT_REDUCE && root->kind != LOWER_ROOT_FINISH) return false;
    for (int i = 0; i < root->space.rank; i++)
        if (ml_type_find(type, root->space.axis[i]) < 0 && root->space.size[i] != 1) return true;
    return false;
}

/* Partial results: [chunks][columns] in the compute type; the axes of the result within the
 * columns follow from the digits. */
static uint32_t partial_value(emission *e, const lower_root *root) {
    lowering *l = e->l;
    const ml_type *type = ml_graph_type(l->g, root->node);
    ml_type partial = {.dtype =
                           ml_is_narrow(type->dtype) ? ml_compute_dtype(type->dtype) : type->dtype};
    partial.rank = (uint8_t)(type->rank + 1);
    partial.size[0] = e->group->chunks;
    memcpy(partial.axis + 1, type->axis, sizeof(ml_axis) * type->rank);
    memcpy(partial.size + 1, type->size, sizeof(int64_t) * type->rank);
    uint32_t id = views_temporary(l, 0, &partial);
    ml_value *value = &l->s->values.at[id];
    int64_t linear[ML_MAX_LOOPS] = {0}, step = 1;
    for (int d = e->b.digits - 1; d >= e->group->row_digits; d--) {
        linear[d] = step;
        step *= e->b.size[d];
    }
    if (root->scope == ML_SCOPE_ALL) step = 1;
    value->stride[0] = step;
    for (int i = 0; i < type->rank; i++) {
        const lower_index *index = &root->index[ml_type_find(&root->space, type->axis[i])];
        int found[ML_MAX_LOOPS];
        int count = fuse_digits_of(index, e->b.size, e->b.digits, found);
        if (count < 0) ml_raise(ML_INTERNAL, "lowering: a column sum has no place for its axes");
        value->stride[i + 1] = count > 0 ? linear[found[0]] : 0;
    }
    return l->info[root->node].partial_value = id;
}

/* Narrow floats are summed in the compute type, and the sum is rounded once. */
static uint16_t reduction(emission *e, uint32_t r, uint16_t from) {
    const lower_root *root = &e->group->roots.at[r];
    const ml_graph *g = e->l->g;
    ml_op op = (ml_op)ml_graph_node(g, root->node)->op;
    ml_inst inst;
    memset(&inst, 0, sizeof inst);
    inst.src[0] = inst.src[1] = inst.src[2] = inst.index = inst.guard = ML_NO_INST;
    const ml_dtype dtype = (ml_dtype)ml_graph_type(g, root->node)->dtype;
    const bool sums = op == ML_OP_DOT || op == ML_OP_SUM;
    inst.dtype = (uint8_t)(sums && ml_is_narrow(dtype) ? ml_compute_dtype(dtype) : dtype);
    if (!reduces(e, root)) {
        if (op != ML_OP_ARGMAX) return eval_rounded(&e->b, from, dtype);
        inst.kind = ML_INST_CONST;
        inst.from_dtype = inst.dtype;
        return eval_inst(&e->b, &inst);
    }
    inst.kind = ML_INST_REDUCE;
    inst.op = (uint8_t)(op == ML_OP_DOT ? ML_OP_SUM : op);
    inst.from_dtype = e->b.inst.at[from].dtype;
    inst.scope = root->scope;
    inst.src[0] = from;
    if (root->scope != ML_SCOPE_ROW) {
        inst.operand = (uint16_t)(WRITES + e->writes.count);
        add_write(e, partial_value(e, root), r, true);
        inst.level = root->scope == ML_SCOPE_COLUMN ? ML_LEVEL_ELEMENT : ML_LEVEL_ROW;
    }
    uint16_t result = eval_inst(&e->b, &inst);
    return root->scope == ML_SCOPE_ROW ? eval_rounded(&e->b, result, dtype) : result;
}

static void store(emission *e, uint32_t r, uint16_t from, uint32_t value) {
    ml_inst inst;
    memset(&inst, 0, sizeof inst);
    inst.kind = ML_INST_STORE;
    inst.src[0] = from;
    inst.src[1] = inst.src[2] = inst.index = inst.guard = ML_NO_INST;
    inst.dtype = inst.from_dtype = e->l->s->values.at[value].type.dtype;
    inst.operand = (uint16_t)(WRITES + e->writes.count);
    add_write(e, value, r, false);
    eval_inst(&e->b, &inst);
}

static uint32_t part_value(lowering *l, const lower_root *root) {
    ml_ref n = root->node;
    lower_layout scratch;
    const lower_layout *layout = views_layout(l, n, &scratch);
    const ml_type *type = ml_graph_type(l->g, n);
    ml_axis axis = (ml_axis)ml_graph_args(l->g, n)[0];
    int64_t at = 0, stride[ML_MAX_AXES] = {0};
    for (int i = 0; i < root->part; i++) {
        const ml_type *part = ml_graph_type(l->g, ml_graph_source(l->g, n, i));
        at += ml_type_size(part, axis);
    }
    for (int i = 0; i < root->space.rank; i++)
        stride[i] = views_axis_stride(type, layout->stride, root->space.axis[i]);
    at *= views_axis_stride(type, layout->stride, axis);
    return views_value_at(l, n, &root->space, layout->offset + at, stride);
}

static void emit_root(emission *e, uint32_t r) {
    lowering *l = e->l;
    lower_root *root = &e->group->roots.at[r];
    uint16_t inst = eval_root(&e->b, root);
    if (root->kind == LOWER_ROOT_REDUCE || root->kind == LOWER_ROOT_FINISH)
        inst = reduction(e, r, inst);
    if (fuse_available(root)) {
        lower_memo *memo = ML_PUSH(e->b.arena, &e->b.computed);
        memo->node = root->node;
        memo->inst = inst;
        memo->rank = ml_graph_type(l->g, root->node)->rank;
        memo->index = ML_NEW_ARRAY(e->b.arena, lower_index, ML_MAX_AXES);
        fuse_result_index(l->g, root, memo->index);
        if (l->info[root->node].stored) store(e, r, inst, views_value(l, root->node));
    } else if (root->kind == LOWER_ROOT_PART) {
        store(e, r, inst, part_value(l, root));
    } else if (root->kind == LOWER_ROOT_PACK) {
        store(e, r, inst, root->value);
    }
}

/* --- operands --- */

static void read_operand(emission *e, const lower_access *access, ml_operand *operand) {
    lowering *l = e->l;
    lower_layout scratch;
    memset(operand, 0, sizeof *operand);
    const int64_t *stride;
    const ml_type *type = ml_graph_type(l->g, access->node);
    int64_t offset = 0;
    uint32_t partial = l->info[access->node].partial_value;
    if (access->partial) {
        type = &l->s->values.at[partial].type;
        stride = l->s->values.at[partial].stride;
    } else {
        const lower_layout *layout = views_layout(l, access->node, &scratch);
        stride = layout->stride;
        offset = layout->offset;
    }
    int64_t own = offset;
    for (int i = 0; i < access->rank; i++) {
        offset += stride[i] * access->index[i].offset;
        for (int d = 0; d < e->b.digits; d++)
            operand->stride[d] += stride[i] * access->index[i].coef[d];
    }
    operand->dtype = type->dtype;
    if (access->partial)
        operand->value = partial;
    else if (offset == own)
        operand->value = views_value(l, access->node);
    else
        operand->value = views_value_at(l, access->node, type, offset, stride);
}

static void write_operand(emission *e, const lower_write *write, ml_operand *operand) {
    const ml_value *value = &e->l->s->values.at[write->value];
    const lower_root *root = &e->group->roots.at[write->root];
    memset(operand, 0, sizeof *operand);
    operand->value = write->value;
    operand->dtype = value->type.dtype;
    operand->written = true;
    if (write->partial) {
        int64_t step = 1;
        for (int d = e->b.digits - 1; d >= e->group->row_digits; d--) {
            if (root->scope == ML_SCOPE_COLUMN) operand->stride[d] = step;
            step *= e->b.size[d];
        }
        return;
    }
    for (int i = 0; i < value->type.rank; i++) {
        const lower_index *index = &root->index[ml_type_find(&root->space, value->type.axis[i])];
        for (int d = 0; d < e->b.digits; d++)
            operand->stride[d] += value->stride[i] * index->coef[d];
    }
}

static uint16_t intern_operand(emission *e, const ml_operand *operand) {
    for (uint32_t o = 0; o < e->operands.count; o++)
        if (memcmp(&e->operands.at[o], operand, sizeof *operand) == 0) return (uint16_t)o;
    *ML_PUSH(e->b.arena, &e->operands) = *operand;
    return (uint16_t)(e->operands.count - 1);
}

/* Loads of one tensor at several constant offsets share a pointer: the offsets become addresses. */
static bool merge_offsets(emission *e, ml_operand *operand, int64_t *extra) {
    const ml_value *value = &e->l->s->values.at[operand->value];
    for (uint32_t o = 0; o < e->operands.count; o++) {
        const ml_operand *other = &e->operands.at[o];
        const ml_value *at = &e->l->s->values.at[other->value];
        if (at->storage != value->storage || other->dtype != operand->dtype ||
            memcmp(other->stride, operand->stride, sizeof other->stride) != 0)
            continue;
        *extra = value->offset - at->offset;
        operand->value = other->value;
        return true;
    }
    return false;
}

/* Instruction i's address is `offset` further on. */
static void add_offset(emission *e, uint32_t i, int64_t offset) {
    ml_inst number;
    memset(&number, 0, sizeof number);
    number.kind = ML_INST_CONST;
    number.dtype = number.from_dtype = ML_I64;
    number.src[0] = number.src[1] = number.src[2] = number.index = number.guard = ML_NO_INST;
    number.constant.integer = offset;
    uint16_t by = eval_inst(&e->b, &number), old = e->b.inst.at[i].index;
    if (old != ML_NO_INST) {
        number.kind = ML_INST_MAP;
        number.op = ML_OP_ADD;
        number.constant.integer = 0;
        number.src[0] = old;
        number.src[1] = by;
        by = eval_inst(&e->b, &number);
    }
    e->b.inst.at[i].index = by;
}

/* Kernels may rely on operands that begin at multiples of 16 bytes. */
static int64_t misalignment(emission *e, ml_operand *operand) {
    lowering *l = e->l;
    const ml_value value = l->s->values.at[operand->value];
    int64_t unit = 16 / ml_dtypes[value.type.dtype].bytes;
    int64_t rest = ((value.offset % unit) + unit) % unit;
    if (l->target->kind != ML_TARGET_CUDA || rest == 0) return 0;
    ml_value *moved = ML_PUSH(l->arena, &l->s->values);
    *moved = value;
    moved->offset -= rest;
    operand->value = l->s->values.count - 1;
    return rest;
}

/* Operand numbers of all instructions. */
static void number_operands(emission *e) {
    uint32_t count = e->b.inst.count, reads = e->b.access.count;
    uint16_t *number = ML_NEW_ARRAY(e->b.arena, uint16_t, reads + e->writes.count + 1);
    int64_t *extra = ML_NEW_ARRAY(e->b.arena, int64_t, reads + e->writes.count + 1);
    bool crowded = reads + e->writes.count > 24;
    for (uint32_t a = 0; a < reads + e->writes.count; a++) {
        ml_operand operand;
        if (a < reads)
            read_operand(e, &e->b.access.at[a], &operand);
        else
            write_operand(e, &e->writes.at[a - reads], &operand);
        if (a >= reads || !crowded || !merge_offsets(e, &operand, &extra[a]))
            extra[a] = misalignment(e, &operand);
        number[a] = intern_operand(e, &operand);
        if (a + 1 == reads) e->reads = (int)e->operands.count;
    }
    if (reads == 0) e->reads = 0;
    if (e->operands.count > ML_MAX_OPERANDS)
        ml_raise(ML_INVALID, "one kernel would need more than %d tensors", ML_MAX_OPERANDS);
    for (uint32_t i = 0; i < count; i++) {
        ml_inst *inst = &e->b.inst.at[i];
        bool writes = inst->kind == ML_INST_STORE ||
                      (inst->kind == ML_INST_REDUCE && inst->scope != ML_SCOPE_ROW);
        if (inst->kind != ML_INST_LOAD && !writes) continue;
        uint32_t at = writes ? reads + inst->operand - WRITES : inst->operand;
        inst->operand = number[at];
        if (extra[at] != 0) add_offset(e, i, extra[at]);
    }
}

/* --- the step --- */

static void set_kernel(lowering *l, ml_step *step, const ml_kernel_ir *ir) {
    uint64_t hash = lower_hash_ir(ir);
    uint32_t cursor = 0, found;
    while ((found = ml_index_next(&l->kernels, hash, &cursor)) != ML_INDEX_NONE) {
        if (!lower_same_ir(l->distinct.at[found], ir)) continue;
        step->kernel = l->distinct_kernels.at[found];
        return;
    }
    step->kernel = ML_NEW(l->arena, ml_kernel);
    ml_emit(ir, l->target, l->arena, step->kernel);
    *ML_PUSH(l->scratch, &l->distinct) = ir;
    *ML_PUSH(l->scratch, &l->distinct_kernels) = step->kernel;
    ml_index_add(&l->kernels, hash, l->distinct.count - 1);
}

void lower_kernel_step(lowering *l, lower_group *group) {
    emission e;
    memset(&e, 0, sizeof e);
    e.l = l;
    e.group = group;
    eval_begin(&e.b, l, group);
    for (uint32_t r = 0; r < group->roots.count; r++) emit_root(&e, r);
    if (e.writes.count == 0) return; /* nothing of it is needed */
    number_operands(&e);
    ml_kernel_ir *ir = ML_NEW(l->arena, ml_kernel_ir);
    lower_finish_ir(&e, ir);
    uint32_t values[ML_MAX_OPERANDS];
    for (int o = 0; o < ir->operand_count; o++) values[o] = ir->operand[o].value;
    ml_step *step = lower_step(l, ML_STEP_KERNEL, group->node, values, e.reads, values + e.reads,
                               ir->operand_count - e.reads);
    step->ir = ir;
    step->may_alias = lower_aliases(&e, ir);
    lower_describe_ir(l->s, ir, step);
    set_kernel(l, step, ir);
}
