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

/* What a root of the kernel is written to: its result, or the chunks' partial ones. */
static uint32_t written_value(emission *e, const lower_root *root, bool partial) {
    if (partial) return partial_value(e, root);
    if (fuse_available(root)) return views_value(e->l, root->node);
    return root->kind == LOWER_ROOT_PART ? part_value(e->l, root) : root->value;
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
        add_write(e, written_value(e, root, true), r, true);
        inst.level = root->scope == ML_SCOPE_COLUMN ? ML_LEVEL_ELEMENT : ML_LEVEL_ROW;
    }
    uint16_t result = eval_inst(&e->b, &inst);
    return root->scope == ML_SCOPE_ROW ? eval_rounded(&e->b, result, dtype) : result;
}

static void store(emission *e, uint32_t r, uint16_t from) {
    const uint32_t value = written_value(e, &e->group->roots.at[r], false);
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
        if (l->info[root->node].stored) store(e, r, inst);
    } else if (root->kind == LOWER_ROOT_PART || root->kind == LOWER_ROOT_PACK) {
        store(e, r, inst);
    }
}

/* --- operands --- */

/* The value of a node in memory, `offset` from where that begins. */
static uint32_t read_value(lowering *l, ml_ref node, bool partial, int64_t offset) {
    lower_layout scratch;
    if (partial) return l->info[node].partial_value;
    if (offset == 0) return views_value(l, node);
    const lower_layout *layout = views_layout(l, node, &scratch);
    return views_value_at(l, node, ml_graph_type(l->g, node), layout->offset + offset,
                          layout->stride);
}

static void read_operand(emission *e, const lower_access *access, kernel_part *part,
                         ml_operand *operand) {
    lowering *l = e->l;
    lower_layout scratch;
    const int64_t *stride;
    memset(operand, 0, sizeof *operand);
    if (access->partial) {
        const ml_value *partial = &l->s->values.at[l->info[access->node].partial_value];
        operand->dtype = partial->type.dtype;
        stride = partial->stride;
    } else {
        operand->dtype = ml_graph_type(l->g, access->node)->dtype;
        stride = views_layout(l, access->node, &scratch)->stride;
    }
    for (int i = 0; i < access->rank; i++) {
        part->offset += stride[i] * access->index[i].offset;
        for (int d = 0; d < e->b.digits; d++)
            operand->stride[d] += stride[i] * access->index[i].coef[d];
    }
    if (access->partial) part->offset = 0;
    part->node = l->number[access->node];
    part->partial = access->partial;
    part->value = read_value(l, access->node, part->partial, part->offset);
}

static void write_operand(emission *e, const lower_write *write, kernel_part *part,
                          ml_operand *operand) {
    const ml_value *value = &e->l->s->values.at[write->value];
    const lower_root *root = &e->group->roots.at[write->root];
    memset(operand, 0, sizeof *operand);
    part->value = write->value;
    part->node = write->root;
    part->partial = write->partial;
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

static uint16_t intern_operand(emission *e, const ml_operand *operand, uint32_t value) {
    for (uint32_t o = 0; o < e->operands.count; o++)
        if (e->values.at[o] == value && memcmp(&e->operands.at[o], operand, sizeof *operand) == 0)
            return (uint16_t)o;
    *ML_PUSH(e->b.arena, &e->operands) = *operand;
    *ML_PUSH(e->b.arena, &e->values) = value;
    return (uint16_t)(e->operands.count - 1);
}

/* Loads of one tensor at several constant offsets share a pointer: the offsets become addresses. */
static bool merge_offsets(emission *e, kernel_part *part, const ml_operand *operand,
                          int64_t *extra) {
    const ml_value *value = &e->l->s->values.at[part->value];
    for (uint32_t o = 0; o < e->operands.count; o++) {
        const ml_operand *other = &e->operands.at[o];
        const ml_value *at = &e->l->s->values.at[e->values.at[o]];
        if (at->storage != value->storage || other->dtype != operand->dtype ||
            memcmp(other->stride, operand->stride, sizeof other->stride) != 0)
            continue;
        *extra = value->offset - at->offset;
        part->value = e->values.at[o];
        part->merged = true;
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

static uint32_t moved_value(lowering *l, uint32_t id, int64_t back) {
    const ml_value value = l->s->values.at[id];
    ml_value *moved = ML_PUSH(l->arena, &l->s->values);
    *moved = value;
    moved->offset -= back;
    return l->s->values.count - 1;
}

/* Kernels may rely on operands that begin at multiples of 16 bytes. */
static int64_t misalignment(emission *e, kernel_part *part) {
    const ml_value *value = &e->l->s->values.at[part->value];
    int64_t unit = 16 / ml_dtypes[value->type.dtype].bytes;
    int64_t rest = ((value->offset % unit) + unit) % unit;
    if (e->l->target->kind != ML_TARGET_CUDA || rest == 0) return 0;
    part->value = moved_value(e->l, part->value, rest);
    return part->back = rest;
}

/* Operand numbers of all instructions. */
static void number_operands(emission *e) {
    uint32_t count = e->b.inst.count, reads = e->b.access.count;
    e->part_count = reads + e->writes.count;
    e->parts = ML_NEW_ARRAY(e->b.arena, kernel_part, e->part_count + 1);
    int64_t *extra = ML_NEW_ARRAY(e->b.arena, int64_t, e->part_count + 1);
    bool crowded = e->part_count > 24;
    for (uint32_t a = 0; a < e->part_count; a++) {
        ml_operand operand;
        kernel_part *part = &e->parts[a];
        if (a < reads)
            read_operand(e, &e->b.access.at[a], part, &operand);
        else
            write_operand(e, &e->writes.at[a - reads], part, &operand);
        if (a >= reads || !crowded || !merge_offsets(e, part, &operand, &extra[a]))
            extra[a] = misalignment(e, part);
        part->operand = intern_operand(e, &operand, part->value);
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
        inst->operand = e->parts[at].operand;
        if (extra[at] != 0) add_offset(e, i, extra[at]);
    }
}

/* --- the step --- */

/* Equal kernels of a schedule are one, and so are their instructions. */
static void set_kernel(lowering *l, ml_step *step, const ml_kernel_ir *ir) {
    uint64_t hash = lower_hash_ir(ir);
    uint32_t cursor = 0, found;
    while ((found = ml_index_next(&l->kernels, hash, &cursor)) != ML_INDEX_NONE) {
        if (!lower_same_ir(l->distinct.at[found], ir)) continue;
        step->ir = l->distinct.at[found];
        step->kernel = l->distinct_kernels.at[found];
        return;
    }
    step->ir = ir;
    step->kernel = ML_NEW(l->arena, ml_kernel);
    ml_emit(ir, l->target, l->arena, step->kernel);
    *ML_PUSH(l->scratch, &l->distinct) = ir;
    *ML_PUSH(l->scratch, &l->distinct_kernels) = step->kernel;
    ml_index_add(&l->kernels, hash, l->distinct.count - 1);
}

/* A kernel as it was made for a group that is alike: of its step all but the node and the values,
 * which are those of `parts`, in the order in which they are made: reads, then writes. */
typedef struct {
    ml_step step;
    uint32_t part_count, read_parts;
    const kernel_part *parts;
} known_kernel;

static void note_kernel(emission *e, const ml_step *step) {
    lowering *l = e->l;
    for (uint32_t a = 0; a < e->b.access.count && e->parts != NULL; a++)
        if (e->parts[a].node == 0) return; /* is none of what describes the group */
    known_kernel *known = ML_NEW(l->scratch, known_kernel);
    kernel_part *parts = ML_NEW_ARRAY(l->scratch, kernel_part, e->part_count + 1);
    if (e->part_count > 0) memcpy(parts, e->parts, sizeof *parts * e->part_count);
    *known = (known_kernel){.part_count = e->part_count, .read_parts = e->b.access.count};
    known->parts = parts;
    if (step != NULL) known->step = *step;
    alike_add(l, &l->made, known);
}

static void add_step(lowering *l, const lower_group *group, const ml_step *like,
                     const uint32_t *values) {
    ml_step *step = lower_step(l, ML_STEP_KERNEL, group->node, values, like->read_count,
                               values + like->read_count, like->write_count);
    step->ir = like->ir;
    step->kernel = like->kernel;
    step->may_alias = like->may_alias;
    step->flops += like->flops;
    step->bytes += like->bytes;
}

/* The same for the values of this group. */
static void make_again(lowering *l, const lower_group *group, const known_kernel *known) {
    emission e = {.l = l, .group = group, .b = {.digits = group->digits}};
    uint32_t values[ML_MAX_OPERANDS], count = 0;
    ml_arena_reset(l->work);
    uint32_t *made = ML_NEW_ARRAY(l->work, uint32_t, known->part_count + 1);
    memcpy(e.b.size, group->size, sizeof e.b.size);
    if (known->step.kernel == NULL) return;
    for (uint32_t a = known->read_parts; a < known->part_count; a++) {
        const lower_root *root = &group->roots.at[known->parts[a].node];
        made[a] = written_value(&e, root, known->parts[a].partial);
    }
    for (uint32_t a = 0; a < known->part_count; a++) {
        const kernel_part *part = &known->parts[a];
        if (a < known->read_parts)
            made[a] = read_value(l, l->numbered.at[part->node - 1], part->partial, part->offset);
        if (part->back != 0) made[a] = moved_value(l, made[a], part->back);
        if (part->operand == count) values[count++] = made[a];
    }
    add_step(l, group, &known->step, values);
}

static void make_kernel(lowering *l, const lower_group *group) {
    emission e;
    memset(&e, 0, sizeof e);
    e.l = l;
    e.group = group;
    eval_begin(&e.b, l, group);
    for (uint32_t r = 0; r < group->roots.count; r++) emit_root(&e, r);
    if (e.writes.count == 0) { /* nothing of it is needed */
        note_kernel(&e, NULL);
        return;
    }
    number_operands(&e);
    ml_kernel_ir *ir = ML_NEW(l->arena, ml_kernel_ir);
    lower_finish_ir(&e, ir);
    ml_step step = {.read_count = e.reads, .write_count = ir->operand_count - e.reads};
    step.values = e.values.at;
    step.may_alias = lower_aliases(&e, ir);
    lower_describe_ir(l->s, ir, &step);
    set_kernel(l, &step, ir);
    note_kernel(&e, &step);
    add_step(l, group, &step, e.values.at);
}

void lower_kernel_step(lowering *l, lower_group *group) {
    alike_kernel(l, group);
    const known_kernel *known = alike_find(l, &l->made);
    if (known != NULL)
        make_again(l, group, known);
    else
        make_kernel(l, group);
}
