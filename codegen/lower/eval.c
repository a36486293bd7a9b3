/* Expressions to instructions: the value of a node at given indices.
 *
 * Movements change the indices, pointwise nodes become MAP instructions, nodes in memory become
 * loads. `guard` is a condition under which memory may be read (outside it a value is 0). The same
 * code runs twice for a root: alone, to find out what it reads, and again inside its kernel. */
#include "codegen/lower/lower_internal.h"

#include <string.h>

enum { MAX_INSTS = 8000, MAX_DEPTH = 2000 };

void eval_begin(lower_builder *b, lowering *l, const lower_group *group) {
    memset(b, 0, sizeof *b);
    if (l->work != NULL) ml_arena_reset(l->work);
    if (l->work == NULL) l->work = ml_arena_new();
    if (l->work == NULL) ml_raise(ML_NO_MEMORY, "out of memory while lowering a program");
    b->l = l;
    b->arena = l->work;
    b->digits = group->digits;
    memcpy(b->size, group->size, sizeof b->size);
    b->memos.arena = b->insts.arena = l->work;
    b->refine_digit = -1;
}

/* --- instructions --- */

static ml_inst new_inst(ml_inst_kind kind, ml_dtype dtype) {
    ml_inst inst;
    memset(&inst, 0, sizeof inst);
    inst.kind = (uint8_t)kind;
    inst.dtype = inst.from_dtype = (uint8_t)dtype;
    inst.src[0] = inst.src[1] = inst.src[2] = inst.index = inst.guard = ML_NO_INST;
    return inst;
}

uint16_t eval_inst(lower_builder *b, const ml_inst *inst) {
    uint64_t hash = ml_hash(inst, sizeof *inst, 0);
    uint32_t cursor = 0, found;
    while ((found = ml_index_next(&b->insts, hash, &cursor)) != ML_INDEX_NONE)
        if (memcmp(&b->inst.at[found], inst, sizeof *inst) == 0) return (uint16_t)found;
    if (b->inst.count >= MAX_INSTS)
        ml_raise(ML_INVALID, "one kernel would need more than %d instructions", MAX_INSTS);
    memcpy(ML_PUSH(b->arena, &b->inst), inst, sizeof *inst);
    ml_index_add(&b->insts, hash, b->inst.count - 1);
    return (uint16_t)(b->inst.count - 1);
}

static uint16_t constant_int(lower_builder *b, ml_dtype dtype, int64_t value) {
    ml_inst inst = new_inst(ML_INST_CONST, dtype);
    inst.constant.integer = value;
    return eval_inst(b, &inst);
}

static uint16_t constant_zero(lower_builder *b, ml_dtype dtype) {
    ml_inst inst = new_inst(ML_INST_CONST, dtype);
    if (ml_dtypes[dtype].kind == ML_KIND_FLOAT) inst.constant.number = 0.0;
    return eval_inst(b, &inst);
}

/* Exponentials in f32 are approximate throughout a program with narrow floats, whose rounding hides
 * errors of about 1e-6: not by kernel, whose results would depend on what else it stores. */
static bool is_quick(const lowering *l, ml_op op, ml_dtype dtype) {
    const bool exponential = op == ML_OP_EXP || op == ML_OP_SIGMOID || op == ML_OP_TANH;
    return exponential && dtype == ML_F32 && l->narrow && l->target->kind == ML_TARGET_CUDA;
}

static uint16_t map(lower_builder *b, ml_op op, ml_dtype dtype, ml_dtype from, uint16_t x,
                    uint16_t y, uint16_t z) {
    ml_inst inst = new_inst(ML_INST_MAP, dtype);
    inst.op = (uint8_t)op;
    inst.quick = is_quick(b->l, op, dtype);
    inst.from_dtype = (uint8_t)from;
    inst.src[0] = x;
    inst.src[1] = y;
    inst.src[2] = z;
    return eval_inst(b, &inst);
}

/* A value that was computed in the compute type, in the narrow float that the graph says. */
uint16_t eval_rounded(lower_builder *b, uint16_t value, ml_dtype dtype) {
    ml_dtype from = (ml_dtype)b->inst.at[value].dtype;
    if (from == dtype || !ml_is_narrow(dtype)) return value;
    return map(b, ML_OP_CAST, dtype, from, value, ML_NO_INST, ML_NO_INST);
}

static uint16_t map_i64(lower_builder *b, ml_op op, uint16_t x, uint16_t y) {
    return map(b, op, ML_I64, ML_I64, x, y, ML_NO_INST);
}

static uint16_t all_of(lower_builder *b, uint16_t x, uint16_t y) {
    if (x == ML_NO_INST || x == y) return y;
    if (y == ML_NO_INST) return x;
    return map(b, ML_OP_AND, ML_BOOL, ML_BOOL, x, y, ML_NO_INST);
}

/* --- indices --- */

static bool is_constant(const lower_index *index) {
    for (int d = 0; d < ML_MAX_LOOPS; d++)
        if (index->coef[d] != 0) return false;
    return index->inst == ML_NO_INST;
}

/* The affine part alone as an i64 instruction. */
static uint16_t affine_inst(lower_builder *b, const lower_index *index) {
    lower_index affine = *index;
    affine.inst = ML_NO_INST;
    affine.scale = 0;
    if (is_constant(&affine)) return constant_int(b, ML_I64, affine.offset);
    uint32_t at = 0;
    while (at < b->affine.count && memcmp(&b->affine.at[at], &affine, sizeof affine) != 0) at++;
    if (at == b->affine.count) *ML_PUSH(b->arena, &b->affine) = affine;
    ml_inst inst = new_inst((ml_inst_kind)LOWER_INST_AFFINE, ML_I64);
    inst.operand = (uint16_t)at;
    return eval_inst(b, &inst);
}

static uint16_t times(lower_builder *b, uint16_t x, int64_t factor) {
    return factor == 1 ? x : map_i64(b, ML_OP_MUL, x, constant_int(b, ML_I64, factor));
}

uint16_t eval_index(lower_builder *b, const lower_index *index) {
    if (index->inst == ML_NO_INST) return affine_inst(b, index);
    uint16_t opaque = times(b, (uint16_t)index->inst, index->scale);
    lower_index affine = *index;
    affine.inst = ML_NO_INST;
    if (is_constant(&affine) && affine.offset == 0) return opaque;
    return map_i64(b, ML_OP_ADD, opaque, affine_inst(b, &affine));
}

static lower_index opaque_index(uint16_t inst) {
    lower_index index = fuse_index_zero();
    index.inst = inst;
    index.scale = 1;
    return index;
}

/* sum += factor * term */
static void add_index(lower_builder *b, lower_index *sum, const lower_index *term, int64_t factor) {
    if (factor == 0) return;
    sum->offset += factor * term->offset;
    for (int d = 0; d < ML_MAX_LOOPS; d++) sum->coef[d] += factor * term->coef[d];
    if (term->inst == ML_NO_INST) return;
    if (sum->inst == ML_NO_INST) {
        sum->inst = term->inst;
        sum->scale = factor * term->scale;
        return;
    }
    uint16_t both = map_i64(b, ML_OP_ADD, times(b, (uint16_t)sum->inst, sum->scale),
                            times(b, (uint16_t)term->inst, factor * term->scale));
    sum->inst = both;
    sum->scale = 1;
}

/* index = outer * size + inner with 0 <= inner < size, where digits show it. */
static bool divide_digits(lower_builder *b, const lower_index *index, int64_t size,
                          lower_index *outer, lower_index *inner) {
    if (index->inst != ML_NO_INST) return false;
    *outer = *inner = fuse_index_zero();
    inner->offset = ((index->offset % size) + size) % size;
    outer->offset = (index->offset - inner->offset) / size;
    int64_t most = inner->offset;
    int digit = -1;
    for (int d = 0; d < b->digits; d++) {
        int64_t coef = index->coef[d];
        if (coef < 0) return false;
        if (coef % size == 0) {
            outer->coef[d] = coef / size;
            continue;
        }
        inner->coef[d] = coef;
        most += coef * (b->size[d] - 1);
        if (coef < size && coef * b->size[d] > size && size % coef == 0) digit = d;
    }
    if (most < size) return true;
    if (digit >= 0 && b->digits < ML_MAX_LOOPS && b->refine_digit < 0) {
        int64_t part = size / index->coef[digit];
        if (b->size[digit] % part == 0) {
            b->refine_digit = digit;
            b->refine_inner = part;
        }
    }
    return false;
}

static void divide_index(lower_builder *b, const lower_index *index, int64_t size,
                         lower_index *outer, lower_index *inner) {
    if (divide_digits(b, index, size, outer, inner)) return;
    uint16_t whole = eval_index(b, index), by = constant_int(b, ML_I64, size);
    *outer = opaque_index(map_i64(b, ML_OP_IDIV, whole, by));
    *inner = opaque_index(map_i64(b, ML_OP_MOD, whole, by));
}

/* --- nodes --- */

static uint16_t eval(lower_builder *b, ml_ref n, const lower_index *index, uint16_t guard);

/* The indices of `to`'s axes, found by name among `from`'s; 0 for axes that `from` lacks. */
static void indices_by_name(const ml_type *from, const lower_index *index, const ml_type *to,
                            lower_index *out) {
    for (int i = 0; i < to->rank; i++) {
        int at = ml_type_find(from, to->axis[i]);
        out[i] = at < 0 ? fuse_index_zero() : index[at];
    }
}

static uint16_t access_operand(lower_builder *b, ml_ref n, bool partial, int rank,
                               const lower_index *index) {
    lower_index plain[ML_MAX_AXES + 1];
    for (int i = 0; i < rank; i++) {
        plain[i] = index[i];
        plain[i].scale = 0;
        if (plain[i].inst != ML_NO_INST) plain[i].inst = 0;
    }
    size_t bytes = sizeof(lower_index) * (size_t)rank;
    for (uint32_t a = 0; a < b->access.count; a++) {
        const lower_access *access = &b->access.at[a];
        if (access->node == n && access->partial == partial &&
            (rank == 0 || memcmp(access->index, plain, bytes) == 0))
            return (uint16_t)a;
    }
    lower_access *access = ML_PUSH(b->arena, &b->access);
    access->node = n;
    access->partial = partial;
    access->rank = (uint8_t)rank;
    access->index = ML_NEW_ARRAY(b->arena, lower_index, rank + 1);
    if (rank > 0) memcpy(access->index, plain, bytes);
    return (uint16_t)(b->access.count - 1);
}

static uint16_t load(lower_builder *b, ml_ref n, const lower_index *index, uint16_t guard) {
    const ml_type *type = ml_graph_type(b->l->g, n);
    lower_layout scratch;
    const lower_layout *layout = views_layout(b->l, n, &scratch);
    ml_inst inst = new_inst(ML_INST_LOAD, (ml_dtype)type->dtype);
    inst.guard = guard;
    lower_index computed = fuse_index_zero();
    for (int i = 0; i < type->rank; i++) {
        if (index[i].inst == ML_NO_INST) continue;
        lower_index opaque = opaque_index((uint16_t)index[i].inst);
        opaque.scale = index[i].scale;
        add_index(b, &computed, &opaque, layout->stride[i]);
    }
    if (computed.inst != ML_NO_INST) inst.index = eval_index(b, &computed);
    inst.operand = access_operand(b, n, false, type->rank, index);
    return eval_inst(b, &inst);
}

/* value where `guard` holds, else 0. Loads under that guard are 0 already. */
static uint16_t guarded(lower_builder *b, uint16_t value, uint16_t guard) {
    uint16_t at = value;
    while (b->inst.at[at].kind == ML_INST_MAP && b->inst.at[at].op == ML_OP_CAST)
        at = b->inst.at[at].src[0];
    if (guard == ML_NO_INST) return value;
    if (b->inst.at[at].kind == ML_INST_LOAD && b->inst.at[at].guard == guard) return value;
    ml_dtype dtype = (ml_dtype)b->inst.at[value].dtype;
    uint16_t zero = constant_zero(b, dtype);
    return value == zero ? value : map(b, ML_OP_WHERE, dtype, dtype, guard, value, zero);
}

static uint16_t in_range(lower_builder *b, uint16_t i, bool low, bool high, int64_t size) {
    uint16_t above = ML_NO_INST, below = ML_NO_INST;
    if (low) above = map(b, ML_OP_GE, ML_BOOL, ML_I64, i, constant_int(b, ML_I64, 0), ML_NO_INST);
    if (high)
        below = map(b, ML_OP_LT, ML_BOOL, ML_I64, i, constant_int(b, ML_I64, size), ML_NO_INST);
    return all_of(b, above, below);
}

static uint16_t eval_pad(lower_builder *b, ml_ref n, const lower_index *index, uint16_t guard) {
    ml_ref source = ml_graph_source(b->l->g, n, 0);
    const ml_type *type = ml_graph_type(b->l->g, source);
    const int64_t *args = ml_graph_args(b->l->g, n);
    lower_index inner[ML_MAX_AXES];
    indices_by_name(ml_graph_type(b->l->g, n), index, type, inner);
    int at = ml_type_find(type, (ml_axis)args[0]);
    inner[at].offset -= args[1];
    uint16_t inside =
        in_range(b, eval_index(b, &inner[at]), args[1] > 0, args[2] > 0, type->size[at]);
    uint16_t both = all_of(b, guard, inside);
    return guarded(b, eval(b, source, inner, both), both);
}

static uint16_t eval_gather(lower_builder *b, ml_ref n, const lower_index *index, uint16_t guard) {
    const ml_graph *g = b->l->g;
    ml_ref table = ml_graph_source(g, n, 0), which = ml_graph_source(g, n, 1);
    const ml_type *type = ml_graph_type(g, n), *from = ml_graph_type(g, table);
    lower_index inner[ML_MAX_AXES];
    indices_by_name(type, index, ml_graph_type(g, which), inner);
    uint16_t row = eval(b, which, inner, guard);
    ml_dtype dtype = (ml_dtype)ml_graph_type(g, which)->dtype;
    if (dtype != ML_I64) row = map(b, ML_OP_CAST, ML_I64, dtype, row, ML_NO_INST, ML_NO_INST);
    indices_by_name(type, index, from, inner);
    int at = ml_type_find(from, (ml_axis)ml_graph_args(g, n)[0]);
    uint16_t both = all_of(b, guard, in_range(b, row, true, true, from->size[at]));
    inner[at] = opaque_index(row);
    return guarded(b, eval(b, table, inner, both), both);
}

/* where(iota along the axis == index, value, 0) */
static uint16_t eval_scatter(lower_builder *b, ml_ref n, const lower_index *index, uint16_t guard) {
    const ml_graph *g = b->l->g;
    ml_ref which = ml_graph_source(g, n, 0), value = ml_graph_source(g, n, 1);
    const ml_type *type = ml_graph_type(g, n);
    lower_index inner[ML_MAX_AXES];
    indices_by_name(type, index, ml_graph_type(g, which), inner);
    uint16_t row = eval(b, which, inner, guard);
    ml_dtype dtype = (ml_dtype)ml_graph_type(g, which)->dtype, to = (ml_dtype)type->dtype;
    if (dtype != ML_I64) row = map(b, ML_OP_CAST, ML_I64, dtype, row, ML_NO_INST, ML_NO_INST);
    int at = ml_type_find(type, (ml_axis)ml_graph_args(g, n)[0]);
    uint16_t here = map(b, ML_OP_EQ, ML_BOOL, ML_I64, eval_index(b, &index[at]), row, ML_NO_INST);
    indices_by_name(type, index, ml_graph_type(g, value), inner);
    uint16_t v = eval(b, value, inner, guard);
    dtype = (ml_dtype)ml_graph_type(g, value)->dtype;
    if (dtype != to) v = map(b, ML_OP_CAST, to, dtype, v, ML_NO_INST, ML_NO_INST);
    return map(b, ML_OP_WHERE, to, to, here, v, constant_zero(b, to));
}

static uint16_t eval_move(lower_builder *b, ml_ref n, const lower_index *index, uint16_t guard) {
    const ml_graph *g = b->l->g;
    int op = ml_graph_node(g, n)->op;
    if (op == ML_OP_PAD) return eval_pad(b, n, index, guard);
    if (op == ML_OP_GATHER) return eval_gather(b, n, index, guard);
    ml_ref source = ml_graph_source(g, n, 0);
    const ml_type *to = ml_graph_type(g, n), *from = ml_graph_type(g, source);
    const int64_t *args = ml_graph_args(g, n);
    lower_index inner[ML_MAX_AXES];
    if (op == ML_OP_RENAME) {
        memcpy(inner, index, sizeof(lower_index) * to->rank);
    } else {
        indices_by_name(to, index, from, inner);
    }
    if (op == ML_OP_SLICE) {
        inner[ml_type_find(from, (ml_axis)args[0])].offset += args[1];
    } else if (op == ML_OP_SPLIT) {
        lower_index sum = index[ml_type_find(to, (ml_axis)args[3])];
        add_index(b, &sum, &index[ml_type_find(to, (ml_axis)args[1])], args[4]);
        inner[ml_type_find(from, (ml_axis)args[0])] = sum;
    } else if (op == ML_OP_MERGE) {
        int out = ml_type_find(from, (ml_axis)args[0]), in = ml_type_find(from, (ml_axis)args[1]);
        divide_index(b, &index[ml_type_find(to, (ml_axis)args[2])], from->size[in], &inner[out],
                     &inner[in]);
    }
    return eval(b, source, inner, guard);
}

static uint16_t eval_leaf(lower_builder *b, ml_ref n, const lower_index *index) {
    const ml_graph *g = b->l->g;
    const int64_t *args = ml_graph_args(g, n);
    ml_dtype dtype = (ml_dtype)ml_graph_type(g, n)->dtype;
    if (ml_graph_node(g, n)->op == ML_OP_IOTA) {
        uint16_t i = eval_index(b, &index[0]);
        return dtype == ML_I64 ? i : map(b, ML_OP_CAST, dtype, ML_I64, i, ML_NO_INST, ML_NO_INST);
    }
    ml_inst inst = new_inst(ML_INST_CONST, dtype);
    inst.constant.integer = args[0]; /* a double is stored by its bits */
    return eval_inst(b, &inst);
}

static uint16_t eval_random(lower_builder *b, ml_ref n, const lower_index *index, uint16_t guard) {
    const ml_graph *g = b->l->g;
    const ml_type *type = ml_graph_type(g, n);
    uint16_t key = eval(b, ml_graph_source(g, n, 0), NULL, guard), element;
    if (ml_graph_node(g, n)->source_count == 2) { /* the indices are given */
        lower_index inner[ML_MAX_AXES];
        indices_by_name(type, index, ml_graph_type(g, ml_graph_source(g, n, 1)), inner);
        element = eval(b, ml_graph_source(g, n, 1), inner, guard);
    } else {
        int64_t stride[ML_MAX_AXES];
        views_strides(type, stride);
        lower_index linear = fuse_index_zero();
        for (int i = 0; i < type->rank; i++) add_index(b, &linear, &index[i], stride[i]);
        element = eval_index(b, &linear);
    }
    return map(b, ML_OP_RANDOM, (ml_dtype)type->dtype, ML_I64, key, element, ML_NO_INST);
}

static uint16_t eval_map(lower_builder *b, ml_ref n, const lower_index *index, uint16_t guard) {
    const ml_graph *g = b->l->g;
    const ml_node *node = ml_graph_node(g, n);
    const ml_type *type = ml_graph_type(g, n);
    if (node->op == ML_OP_RANDOM) return eval_random(b, n, index, guard);
    uint16_t source[3] = {ML_NO_INST, ML_NO_INST, ML_NO_INST};
    for (int i = 0; i < node->source_count; i++) {
        ml_ref from = ml_graph_source(g, n, i);
        lower_index inner[ML_MAX_AXES];
        indices_by_name(type, index, ml_graph_type(g, from), inner);
        source[i] = eval(b, from, inner, guard);
    }
    if (node->op == ML_OP_STOP_GRADIENT) return source[0];
    int from = node->op == ML_OP_WHERE ? 1 : 0;
    ml_dtype dtype = (ml_dtype)ml_graph_type(g, ml_graph_source(g, n, from))->dtype;
    return map(b, (ml_op)node->op, (ml_dtype)type->dtype, dtype, source[0], source[1], source[2]);
}

/* In the compute type: what it is summed in, too. */
static uint16_t eval_product(lower_builder *b, ml_ref n, const ml_type *space,
                             const lower_index *index, uint16_t guard) {
    const ml_graph *g = b->l->g;
    ml_dtype to = ml_compute_dtype(ml_graph_type(g, n)->dtype);
    uint16_t source[2];
    for (int i = 0; i < 2; i++) {
        ml_ref from = ml_graph_source(g, n, i);
        lower_index inner[ML_MAX_AXES];
        indices_by_name(space, index, ml_graph_type(g, from), inner);
        source[i] = eval(b, from, inner, guard);
        ml_dtype dtype = (ml_dtype)ml_graph_type(g, from)->dtype;
        if (dtype != to)
            source[i] = map(b, ML_OP_CAST, to, dtype, source[i], ML_NO_INST, ML_NO_INST);
    }
    return map(b, ML_OP_MUL, to, to, source[0], source[1], ML_NO_INST);
}

static ml_op combining_op(ml_op reduction) {
    return reduction == ML_OP_SUM   ? ML_OP_ADD
           : reduction == ML_OP_MAX ? ML_OP_MAXIMUM
                                    : ML_OP_MINIMUM;
}

/* A small reduction, written out: summed in the compute type, rounded once. */
static uint16_t eval_unrolled(lower_builder *b, ml_ref n, const lower_index *index,
                              uint16_t guard) {
    const ml_graph *g = b->l->g;
    ml_ref source = ml_graph_source(g, n, 0);
    const ml_type *from = ml_graph_type(g, source);
    ml_dtype dtype = ml_is_narrow(from->dtype) ? ml_compute_dtype(from->dtype) : from->dtype;
    ml_op op = combining_op((ml_op)ml_graph_node(g, n)->op);
    lower_index inner[ML_MAX_AXES];
    indices_by_name(ml_graph_type(g, n), index, from, inner);
    int reduced[ML_MAX_AXES], count = ml_graph_node(g, n)->arg_count;
    int64_t total = 1;
    for (int i = 0; i < count; i++) {
        reduced[i] = ml_type_find(from, (ml_axis)ml_graph_args(g, n)[i]);
        total *= from->size[reduced[i]];
    }
    uint16_t result = ML_NO_INST;
    for (int64_t at = 0; at < total; at++) {
        int64_t rest = at;
        for (int i = count - 1; i >= 0; i--) {
            inner[reduced[i]] = fuse_index_zero();
            inner[reduced[i]].offset = rest % from->size[reduced[i]];
            rest /= from->size[reduced[i]];
        }
        uint16_t value = eval(b, source, inner, guard);
        result = at == 0 ? value : map(b, op, dtype, dtype, result, value, ML_NO_INST);
    }
    if (result == ML_NO_INST) return constant_zero(b, (ml_dtype)from->dtype);
    return total > 1 ? eval_rounded(b, result, (ml_dtype)from->dtype) : result;
}

static uint16_t eval_inline(lower_builder *b, ml_ref n, const lower_index *index, uint16_t guard) {
    const ml_node *node = ml_graph_node(b->l->g, n);
    switch (ml_ops[node->op].op_class) {
    case ML_CLASS_LEAF: return eval_leaf(b, n, index);
    case ML_CLASS_MAP: return eval_map(b, n, index, guard);
    case ML_CLASS_MOVE: return eval_move(b, n, index, guard);
    case ML_CLASS_REDUCE: return eval_unrolled(b, n, index, guard);
    case ML_CLASS_ROUTINE: return eval_scatter(b, n, index, guard);
    case ML_CLASS_CONTRACT: {
        const ml_type *type = ml_graph_type(b->l->g, n);
        return eval_rounded(b, eval_product(b, n, type, index, guard), (ml_dtype)type->dtype);
    }
    case ML_CLASS_COLLECTIVE:
    case ML_CLASS_SCAN: break;
    }
    ml_raise(ML_INTERNAL, "lowering: %s cannot be computed inside a kernel", ml_ops[node->op].name);
}

/* A root that this kernel has computed, at the same indices. */
static uint16_t find_known(const lower_builder *b, ml_ref n, const lower_index *index) {
    for (uint32_t i = 0; i < b->computed.count; i++) {
        const lower_memo *known = &b->computed.at[i];
        if (known->node != n) continue;
        for (int a = 0; a < known->rank; a++)
            if (!fuse_index_equal(&known->index[a], &index[a]))
                ml_raise(ML_INTERNAL, "lowering: node %%%u is used at other places of its kernel",
                         n);
        return known->inst;
    }
    return ML_NO_INST;
}

static uint16_t eval(lower_builder *b, ml_ref n, const lower_index *index, uint16_t guard) {
    /* a constant is known, also where something needs it in memory */
    if (lower_in_memory(b->l, n) && ml_graph_node(b->l->g, n)->op != ML_OP_CONST) {
        uint16_t known = find_known(b, n, index);
        return known != ML_NO_INST ? known : load(b, n, index, guard);
    }
    int rank = ml_graph_type(b->l->g, n)->rank;
    size_t bytes = sizeof(lower_index) * (size_t)rank;
    uint64_t hash = ml_hash(&(uint64_t[2]){n, guard}, 16, rank > 0 ? ml_hash(index, bytes, 0) : 0);
    uint32_t cursor = 0, found;
    while ((found = ml_index_next(&b->memos, hash, &cursor)) != ML_INDEX_NONE) {
        const lower_memo *memo = &b->memo.at[found];
        if (memo->node == n && memo->guard == guard &&
            (rank == 0 || memcmp(memo->index, index, bytes) == 0))
            return memo->inst;
    }
    if (++b->depth > MAX_DEPTH)
        ml_raise(ML_INTERNAL, "lowering: an expression is more than %d nodes deep", MAX_DEPTH);
    uint16_t inst = eval_inline(b, n, index, guard);
    b->depth--;
    lower_memo *memo = ML_PUSH(b->arena, &b->memo);
    memo->node = n;
    memo->guard = guard;
    memo->inst = inst;
    memo->index = ML_NEW_ARRAY(b->arena, lower_index, rank + 1);
    if (rank > 0) memcpy(memo->index, index, bytes);
    ml_index_add(&b->memos, hash, b->memo.count - 1);
    return inst;
}

static uint16_t load_partial(lower_builder *b, const lower_root *root) {
    ml_dtype dtype = (ml_dtype)root->space.dtype;
    ml_inst inst = new_inst(ML_INST_LOAD, dtype);
    inst.operand = access_operand(b, root->node, true, root->space.rank, root->index);
    return eval_inst(b, &inst);
}

uint16_t eval_root(lower_builder *b, const lower_root *root) {
    const ml_graph *g = b->l->g;
    ml_ref n = root->node;
    switch (root->kind) {
    case LOWER_ROOT_FINISH: return load_partial(b, root);
    case LOWER_ROOT_PART:
        return eval(b, ml_graph_source(g, n, root->part), root->index, ML_NO_INST);
    case LOWER_ROOT_REDUCE:
        if (ml_graph_node(g, n)->op == ML_OP_DOT)
            return eval_product(b, n, &root->space, root->index, ML_NO_INST);
        return eval(b, ml_graph_source(g, n, 0), root->index, ML_NO_INST);
    case LOWER_ROOT_PACK: {
        lower_index inner[ML_MAX_AXES];
        indices_by_name(&root->space, root->index, ml_graph_type(g, n), inner);
        return eval(b, n, inner, ML_NO_INST);
    }
    default: return eval_inline(b, n, root->index, ML_NO_INST);
    }
}
