/* Short forms of the constructor for passes. They fold constants and drop what does nothing. */
#include <assert.h>
#include <math.h>
#include <string.h>

#include "runtime/graph/infer.h"

static bool is_float(ml_dtype dtype) {
    return ml_dtypes[dtype].kind == ML_KIND_FLOAT;
}

ml_ref ml_const_int(ml_graph *g, ml_dtype dtype, int64_t value) {
    if (is_float(dtype)) return ml_const(g, dtype, (double)value);
    if (dtype == ML_BOOL) value = value != 0;
    if (dtype == ML_I32 && (value < INT32_MIN || value > INT32_MAX))
        ml_raise(ML_INVALID, "%lld does not fit i32", (long long)value);
    return ml_graph_add(g, ML_OP_CONST, NULL, 0, &value, 1, &(ml_type){.dtype = dtype});
}

/* bf16 constants keep the precision of f32, in which bf16 tensors are computed. */
ml_ref ml_const(ml_graph *g, ml_dtype dtype, double value) {
    if (dtype == ML_BOOL) return ml_const_int(g, dtype, value != 0);
    if (!is_float(dtype)) {
        if (!(value >= -9223372036854775808.0 && value < 9223372036854775808.0) ||
            value != trunc(value)) {
            ml_fail(ML_INVALID, "%g is not an %s", value, ml_dtypes[dtype].name);
            ml_help("cast the tensor: x:cast(\"f32\")");
            ml_raise_last();
        }
        return ml_const_int(g, dtype, (int64_t)value);
    }
    if (dtype != ML_F64) value = (double)(float)value;
    int64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return ml_graph_add(g, ML_OP_CONST, NULL, 0, &bits, 1, &(ml_type){.dtype = dtype});
}

/* ---- Elementwise ----------------------------------------------------------------------------- */

static ml_ref add_plain(ml_graph *g, ml_op op, const ml_ref *sources, int count) {
    return ml_graph_add(g, op, sources, count, NULL, 0, NULL);
}

/* `value` with the type that the op on a and b would have; 0 where its dtype is another. */
static ml_ref instead(ml_graph *g, ml_ref value, ml_ref a, ml_ref b) {
    const ml_type *left = ml_graph_type(g, a), *right = ml_graph_type(g, b);
    const ml_type *larger = right->rank > left->rank ? right : left;
    if (left->dtype != right->dtype) return 0;
    ml_ref shaped = ml_broadcast(g, value, larger);
    return ml_graph_type(g, shaped)->dtype == left->dtype ? shaped : 0;
}

/* One of them covers the other, with equal sizes: else the constructor must complain. */
static bool fit(const ml_type *a, const ml_type *b) {
    if (b->rank > a->rank) {
        const ml_type *swap = a;
        a = b;
        b = swap;
    }
    for (int i = 0; i < b->rank; i++) {
        int at = ml_type_find(a, b->axis[i]);
        if (at < 0 || a->size[at] != b->size[i]) return false;
    }
    return true;
}

/* x op b where b is the constant `value`; 0 where nothing can be dropped. */
static ml_ref right_constant(ml_graph *g, ml_op op, ml_ref x, ml_ref b, double value) {
    ml_dtype dtype = ml_graph_type(g, x)->dtype;
    if (dtype == ML_BOOL) return 0;
    bool by_one = op == ML_OP_MUL || op == ML_OP_DIV || op == ML_OP_POW ||
                  (op == ML_OP_IDIV && !is_float(dtype));
    if (op == ML_OP_MUL && value == 0 && !is_float(dtype))
        return instead(g, ml_const(g, dtype, 0), x, b);
    bool drops = by_one ? value == 1 : (op == ML_OP_ADD || op == ML_OP_SUB) && value == 0;
    return drops ? instead(g, x, x, b) : 0;
}

static ml_ref drop2(ml_graph *g, ml_op op, ml_ref a, ml_ref b) {
    double left, right;
    bool left_known = ml_graph_constant(g, a, &left), right_known = ml_graph_constant(g, b, &right);
    if ((!left_known && !right_known) || !fit(ml_graph_type(g, a), ml_graph_type(g, b))) return 0;
    ml_dtype dtype = ml_graph_type(g, a)->dtype;
    if (left_known && right_known && dtype == ml_graph_type(g, b)->dtype) {
        const ml_op_info *info = &ml_ops[op];
        bool test = info->rule == ML_RULE_TEST || info->rule == ML_RULE_LOGIC;
        bool allowed = info->rule == ML_RULE_LOGIC ? dtype == ML_BOOL
                       : info->rule == ML_RULE_FLOAT
                           ? is_float(dtype)
                           : dtype != ML_BOOL || op == ML_OP_EQ || op == ML_OP_NE;
        ml_dtype result = test ? ML_BOOL : dtype;
        double value;
        if (allowed && fold_map(op, dtype, result, (double[]){left, right}, &value)) {
            const ml_type *t = ml_graph_type(g, a), *other = ml_graph_type(g, b);
            return ml_broadcast(g, ml_const(g, result, value), other->rank > t->rank ? other : t);
        }
    }
    ml_ref dropped = right_known ? right_constant(g, op, a, b, right) : 0;
    if (!dropped && left_known && (op == ML_OP_ADD || op == ML_OP_MUL))
        dropped = right_constant(g, op, b, a, left);
    if (!dropped && left_known && left == 0 && op == ML_OP_SUB &&
        dtype == ml_graph_type(g, b)->dtype && dtype != ML_BOOL &&
        ml_graph_type(g, b)->rank >= ml_graph_type(g, a)->rank)
        dropped = ml_map1(g, ML_OP_NEG, b);
    return dropped;
}

ml_ref ml_map2(ml_graph *g, ml_op op, ml_ref a, ml_ref b) {
    assert(ml_ops[op].op_class == ML_CLASS_MAP && ml_ops[op].sources == 2);
    ml_ref dropped = drop2(g, op, a, b);
    return dropped ? dropped : add_plain(g, op, (ml_ref[]){a, b}, 2);
}

static ml_ref fold1(ml_graph *g, ml_op op, ml_ref a) {
    double values[2] = {0}, value;
    const ml_type *t = ml_graph_type(g, a);
    if (op == ML_OP_STOP_GRADIENT || !ml_graph_constant(g, a, values)) return 0;
    bool test = ml_ops[op].rule == ML_RULE_TEST || ml_ops[op].rule == ML_RULE_LOGIC;
    if (test ? (op == ML_OP_NOT) != (t->dtype == ML_BOOL)
             : t->dtype == ML_BOOL || (ml_ops[op].rule == ML_RULE_FLOAT && !is_float(t->dtype)))
        return 0;
    ml_dtype result = test ? ML_BOOL : t->dtype;
    if (!fold_map(op, t->dtype, result, values, &value)) return 0;
    return ml_broadcast(g, ml_const(g, result, value), t);
}

ml_ref ml_map1(ml_graph *g, ml_op op, ml_ref a) {
    assert(ml_ops[op].op_class == ML_CLASS_MAP && ml_ops[op].sources == 1 && op != ML_OP_CAST &&
           op != ML_OP_RANDOM);
    int inner = ml_graph_node(g, a)->op;
    if ((op == ML_OP_NEG || op == ML_OP_NOT) && inner == (int)op) return ml_graph_source(g, a, 0);
    if (op == ML_OP_STOP_GRADIENT && inner == (int)op) return a;
    ml_ref folded = fold1(g, op, a);
    return folded ? folded : add_plain(g, op, &a, 1);
}

ml_ref ml_where(ml_graph *g, ml_ref test, ml_ref a, ml_ref b) {
    double known;
    const ml_type *t = ml_graph_type(g, test);
    const ml_type *left = ml_graph_type(g, a), *right = ml_graph_type(g, b);
    if (t->dtype == ML_BOOL && t->rank == 0 && left->dtype == right->dtype && fit(left, right) &&
        ml_graph_constant(g, test, &known))
        return ml_broadcast(g, known != 0 ? a : b, right->rank > left->rank ? right : left);
    return add_plain(g, ML_OP_WHERE, (ml_ref[]){test, a, b}, 3);
}

/* Every value of `from` is a value of `to`. */
static bool holds(ml_dtype to, ml_dtype from) {
    if (from == to || from == ML_BOOL) return true;
    if (is_float(from)) return is_float(to) && to >= from;
    return from == ML_I32 && (to == ML_I64 || to == ML_F64);
}

ml_ref ml_cast(ml_graph *g, ml_ref a, ml_dtype dtype) {
    while (ml_graph_type(g, a)->dtype != dtype && ml_graph_node(g, a)->op == ML_OP_CAST) {
        ml_ref inner = ml_graph_source(g, a, 0);
        if (!holds(ml_graph_type(g, a)->dtype, ml_graph_type(g, inner)->dtype)) break;
        a = inner;
    }
    const ml_type *t = ml_graph_type(g, a);
    if (t->dtype == dtype) return a;
    double values[2] = {0}, value;
    if (ml_graph_constant(g, a, values) && fold_map(ML_OP_CAST, t->dtype, dtype, values, &value))
        return ml_broadcast(g, ml_const(g, dtype, value), t);
    return ml_graph_add(g, ML_OP_CAST, &a, 1, NULL, 0, &(ml_type){.dtype = dtype});
}

/* ---- Movements ------------------------------------------------------------------------------- */

static bool same_order(const ml_type *a, const ml_type *b) {
    return a->rank == b->rank && !memcmp(a->axis, b->axis, sizeof *a->axis * a->rank) &&
           !memcmp(a->size, b->size, sizeof *a->size * a->rank);
}

ml_ref ml_broadcast(ml_graph *g, ml_ref a, const ml_type *as) {
    const ml_type *t = ml_graph_type(g, a);
    if (t->rank > as->rank || !fit(as, t)) /* the constructor complains */
        return ml_graph_add(g, ML_OP_BROADCAST, &a, 1, NULL, 0, as);
    while (ml_graph_node(g, a)->op == ML_OP_BROADCAST && !same_order(ml_graph_type(g, a), as))
        a = ml_graph_source(g, a, 0);
    t = ml_graph_type(g, a);
    if (same_order(t, as)) return a;
    if (ml_type_same_axes(t, as)) return ml_permute(g, a, as);
    return ml_graph_add(g, ML_OP_BROADCAST, &a, 1, NULL, 0, as);
}

ml_ref ml_permute(ml_graph *g, ml_ref a, const ml_type *as) {
    if (same_order(ml_graph_type(g, a), as)) return a;
    if (ml_type_same_axes(ml_graph_type(g, a), as)) {
        while (ml_graph_node(g, a)->op == ML_OP_PERMUTE) a = ml_graph_source(g, a, 0);
        if (same_order(ml_graph_type(g, a), as)) return a;
        if (ml_graph_node(g, a)->op == ML_OP_BROADCAST)
            return ml_broadcast(g, ml_graph_source(g, a, 0), as);
    }
    return ml_graph_add(g, ML_OP_PERMUTE, &a, 1, NULL, 0, as);
}

ml_ref ml_rename(ml_graph *g, ml_ref a, ml_axis old, ml_axis new_name) {
    if (old == new_name && ml_type_find(ml_graph_type(g, a), old) >= 0) return a;
    return ml_graph_add(g, ML_OP_RENAME, &a, 1, (int64_t[]){old, new_name}, 2, NULL);
}

ml_ref ml_slice(ml_graph *g, ml_ref a, ml_axis axis, int64_t start, int64_t stop) {
    const ml_type *t = ml_graph_type(g, a);
    int at = ml_type_find(t, axis);
    if (at >= 0 && start == 0 && stop == t->size[at]) return a;
    return ml_graph_add(g, ML_OP_SLICE, &a, 1, (int64_t[]){axis, start, stop}, 3, NULL);
}

ml_ref ml_pad(ml_graph *g, ml_ref a, ml_axis axis, int64_t before, int64_t after) {
    if (before == 0 && after == 0 && ml_type_find(ml_graph_type(g, a), axis) >= 0) return a;
    return ml_graph_add(g, ML_OP_PAD, &a, 1, (int64_t[]){axis, before, after}, 3, NULL);
}

ml_ref ml_split(ml_graph *g, ml_ref a, ml_axis axis, ml_axis outer, int64_t outer_size,
                ml_axis inner, int64_t inner_size) {
    int64_t args[] = {axis, outer, outer_size, inner, inner_size};
    return ml_graph_add(g, ML_OP_SPLIT, &a, 1, args, 5, NULL);
}

ml_ref ml_merge(ml_graph *g, ml_ref a, ml_axis outer, ml_axis inner, ml_axis merged) {
    return ml_graph_add(g, ML_OP_MERGE, &a, 1, (int64_t[]){outer, inner, merged}, 3, NULL);
}

ml_ref ml_concat(ml_graph *g, const ml_ref *sources, int count, ml_axis axis) {
    if (count == 1 && ml_type_find(ml_graph_type(g, sources[0]), axis) >= 0) return sources[0];
    return ml_graph_add(g, ML_OP_CONCAT, sources, count, (int64_t[]){axis}, 1, NULL);
}

/* ---- The rest -------------------------------------------------------------------------------- */

static int copy_axes(const ml_axis *axes, int count, int64_t *args) {
    if (count > ML_MAX_AXES) ml_raise(ML_INVALID, "more than %d axes are named", ML_MAX_AXES);
    for (int i = 0; i < count; i++) args[i] = axes[i];
    return count;
}

ml_ref ml_reduce(ml_graph *g, ml_op op, ml_ref a, const ml_axis *axes, int count) {
    int64_t args[ML_MAX_AXES];
    if (count == 0 && op != ML_OP_ARGMAX) return a;
    copy_axes(axes, count, args);
    return ml_graph_add(g, op, &a, 1, args, count, NULL);
}

ml_ref ml_iota(ml_graph *g, ml_axis axis, int64_t size) {
    return ml_graph_add(g, ML_OP_IOTA, NULL, 0, (int64_t[]){axis, size}, 2, NULL);
}

ml_ref ml_gather(ml_graph *g, ml_ref table, ml_ref index, ml_axis axis) {
    return ml_graph_add(g, ML_OP_GATHER, (ml_ref[]){table, index}, 2, (int64_t[]){axis}, 1, NULL);
}

ml_ref ml_scatter_add(ml_graph *g, ml_ref index, ml_ref value, ml_axis axis, const ml_type *type) {
    return ml_graph_add(g, ML_OP_SCATTER_ADD, (ml_ref[]){index, value}, 2, (int64_t[]){axis}, 1,
                        type);
}

ml_ref ml_write_rows(ml_graph *g, ml_ref cache, ml_ref index, ml_ref value, ml_axis axis) {
    return ml_graph_add(g, ML_OP_WRITE_ROWS, (ml_ref[]){cache, index, value}, 3, (int64_t[]){axis},
                        1, NULL);
}

ml_ref ml_dot(ml_graph *g, ml_ref a, ml_ref b, const ml_axis *axes, int count, ml_dtype dtype) {
    int64_t args[ML_MAX_AXES];
    copy_axes(axes, count, args);
    return ml_graph_add(g, ML_OP_DOT, (ml_ref[]){a, b}, 2, args, count, &(ml_type){.dtype = dtype});
}

ml_ref ml_scaled_dot(ml_graph *g, ml_ref a, ml_ref b, ml_ref scale, const ml_axis *axes, int count,
                     ml_dtype dtype) {
    int64_t args[ML_MAX_AXES];
    copy_axes(axes, count, args);
    return ml_graph_add(g, ML_OP_DOT, (ml_ref[]){a, b, scale}, 3, args, count,
                        &(ml_type){.dtype = dtype});
}

ml_ref ml_out(ml_graph *g, ml_ref n, int output) {
    if (output == 0) return n;
    return ml_graph_add(g, ML_OP_OUT, &n, 1, (int64_t[]){output}, 1, NULL);
}
