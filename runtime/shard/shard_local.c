/* The op of one rank: the same op on parts, with indices shifted to where the part begins. */
#include <math.h>
#include <string.h>

#include "runtime/shard/shard_internal.h"

static bool is_cut(const sharder *s, const ml_placements *at, int position) {
    return ml_layout_parts(s->layout, at, position) > 1;
}

/* i32: the global index of each element of this rank's part of an axis. */
static ml_ref global_iota(sharder *s, const ml_placements *at, int position, ml_axis axis,
                          int64_t local) {
    ml_ref iota = ml_iota(s->to, axis, local), base = shard_base(s, at, position, local);
    return base ? ml_map2(s->to, ML_OP_ADD, iota, base) : iota;
}

/* Each element's index in the whole tensor: random numbers do not depend on the layout. */
static ml_ref global_indices(sharder *s, ml_ref n, const ml_placements *out, const ml_type *local) {
    const ml_type *t = ml_graph_type(s->from, n);
    ml_type wide = *local;
    wide.dtype = ML_I64;
    ml_ref sum = 0;
    int64_t stride = 1;
    for (int i = t->rank - 1; i >= 0; stride *= t->size[i--]) {
        ml_ref index = ml_cast(s->to, global_iota(s, out, i, t->axis[i], local->size[i]), ML_I64);
        index = ml_map2(s->to, ML_OP_MUL, index, ml_const_int(s->to, ML_I64, stride));
        index = ml_broadcast(s->to, index, &wide);
        sum = sum ? ml_map2(s->to, ML_OP_ADD, sum, index) : index;
    }
    return sum;
}

static ml_ref local_random(sharder *s, ml_ref n, const ml_ref *sources, const ml_placements *out,
                           const ml_type *local) {
    bool given = ml_graph_node(s->from, n)->source_count == 2, cut = false;
    for (int i = 0; i < local->rank; i++) cut = cut || is_cut(s, out, i);
    ml_ref all[2] = {sources[0]};
    if (given || cut) all[1] = given ? sources[1] : global_indices(s, n, out, local);
    return ml_graph_add(s->to, ML_OP_RANDOM, all, all[1] ? 2 : 1, NULL, 0, local);
}

/* Indices into an axis of which this rank holds a part: others' are out of range here. */
static ml_ref shifted(sharder *s, ml_ref index, const ml_placements *at, int position,
                      int64_t local) {
    ml_ref base = shard_base(s, at, position, local);
    return base ? ml_map2(s->to, ML_OP_SUB, index, base) : index;
}

/* ---- Filling --------------------------------------------------------------------------------- */

/* What changes nothing in the reduction: 0, or the least or greatest number of the dtype. */
static ml_ref identity(ml_graph *g, ml_op op, ml_dtype dtype) {
    int64_t greatest = dtype == ML_I64 ? INT64_MAX : dtype == ML_BOOL ? 1 : INT32_MAX;
    if (op != ML_OP_MAX && op != ML_OP_MIN) return ml_const(g, dtype, 0);
    if (ml_is_float(dtype)) return ml_const(g, dtype, op == ML_OP_MAX ? -INFINITY : INFINITY);
    if (op == ML_OP_MAX) greatest = dtype == ML_BOOL ? 0 : -greatest - 1;
    return ml_const_int(g, dtype, greatest);
}

/* Whether the filling of x along the axis (its elements beyond the end of the whole axis) is 0.
 * That of states always is. So is that of a product with an operand whose filling is 0, as long as
 * the other operand is finite; one that is not makes the whole row infinite or NaN anyway. */
static bool is_clear(const ml_graph *g, ml_ref x, ml_axis axis, int depth) {
    const ml_node *node = ml_graph_node(g, x);
    double value;
    if (ml_graph_constant(g, x, &value)) return value == 0;
    if (node->op == ML_OP_STATE) return true;
    bool linear = node->op == ML_OP_CAST || node->op == ML_OP_PERMUTE || node->op == ML_OP_NEG ||
                  node->op == ML_OP_STOP_GRADIENT || node->op == ML_OP_BROADCAST;
    bool product = node->op == ML_OP_MUL || node->op == ML_OP_DOT;
    bool sum = node->op == ML_OP_ADD || node->op == ML_OP_SUB;
    if (depth == 0 || !(linear || product || sum)) return false;
    int having = 0, clear = 0;
    for (int k = 0; k < node->source_count; k++) {
        ml_ref source = ml_graph_source(g, x, k);
        if (ml_type_find(ml_graph_type(g, source), axis) < 0) continue;
        having++;
        clear += is_clear(g, source, axis, depth - 1);
    }
    return having == clear && having >= (sum ? 2 : 1);
}

/* x, the part of a tensor of type `global`, with what changes nothing in a reduction by `op` where
 * it is filled up along its axis i. */
static ml_ref fill(sharder *s, ml_ref x, const ml_type *global, const ml_placements *at, int i,
                   ml_op op) {
    const ml_type t = *ml_graph_type(s->to, x);
    ml_ref value = identity(s->to, op, (ml_dtype)t.dtype);
    double number;
    if (!ml_layout_uneven(s->layout, global, at, i)) return x;
    if (ml_graph_constant(s->to, value, &number) && number == 0 && is_clear(s->to, x, t.axis[i], 8))
        return x;
    ml_ref index = global_iota(s, at, i, t.axis[i], t.size[i]);
    ml_ref counts = ml_map2(s->to, ML_OP_LT, index, ml_const_int(s->to, ML_I32, global->size[i]));
    return ml_where(s->to, counts, x, value);
}

ml_ref shard_clear(sharder *s, ml_ref x, const ml_type *global, const ml_placements *at) {
    for (int i = 0; i < global->rank; i++) x = fill(s, x, global, at, i, ML_OP_SUM);
    return x;
}

/* Other products read the cleared operand too: it is stored once. */
static void keep_cleared(sharder *s, ml_ref n, ml_ref before, ml_ref after) {
    for (uint32_t v = s->values[n].versions; v; v = s->versions.at[v].next)
        if (s->versions.at[v].node == before) s->versions.at[v].node = after;
}

/* The least number in rows that are others' where a maximum is over rows of groups. */
static ml_ref of_own_rows(sharder *s, ml_ref n, ml_ref x, const ml_placements *at) {
    const ml_ref source = ml_graph_source(s->from, n, 0);
    const ml_type *global = ml_graph_type(s->from, source), *t = ml_graph_type(s->from, n);
    for (int i = 0; i < s->layout->count; i++) {
        const ml_placement p = at->over[i];
        if ((p.kind != ML_OWNED && p.kind != ML_SENT) || ml_type_find(t, global->axis[p.axis]) >= 0)
            continue;
        const ml_ref own = s->rows->own(s, source, x, at);
        return ml_where(s->to, own, x, identity(s->to, ML_OP_MAX, (ml_dtype)global->dtype));
    }
    return x;
}

ml_ref shard_reduced_source(sharder *s, ml_ref n, int k, ml_ref x, const ml_placements *at) {
    const ml_type *global = ml_graph_type(s->from, ml_graph_source(s->from, n, k));
    const ml_type *t = ml_graph_type(s->from, n);
    ml_op op = ml_graph_node(s->from, n)->op;
    const int64_t *args = ml_graph_args(s->from, n);
    const ml_ref given = x;
    if (op == ML_OP_MAX) x = of_own_rows(s, n, x, at);
    for (int i = 0; i < global->rank; i++) {
        bool kept = ml_type_find(t, global->axis[i]) >= 0 &&
                    (op != ML_OP_SCATTER_ADD || global->axis[i] != (ml_axis)args[0]);
        if (!kept) x = fill(s, x, global, at, i, op);
    }
    if (op == ML_OP_DOT && x != given) keep_cleared(s, ml_graph_source(s->from, n, k), given, x);
    return x;
}

/* Indices into an axis with filling: those beyond the end of the whole axis become -1, which
 * gathers read as 0 and scatters skip. */
static ml_ref within(sharder *s, ml_ref index, const ml_type *whole, const ml_placements *at,
                     int position) {
    if (!ml_layout_uneven(s->layout, whole, at, position)) return index;
    ml_dtype dtype = (ml_dtype)ml_graph_type(s->to, index)->dtype;
    ml_ref inside =
        ml_map2(s->to, ML_OP_LT, index, ml_const_int(s->to, dtype, whole->size[position]));
    return ml_where(s->to, inside, index, ml_const_int(s->to, dtype, -1));
}

void shard_local(sharder *s, ml_ref n, const ml_ref *sources, const ml_placements *need,
                 const ml_placements *out, ml_ref *outputs) {
    const ml_node *node = ml_graph_node(s->from, n);
    const ml_type *t = ml_graph_type(s->from, n);
    const int64_t *args = ml_graph_args(s->from, n);
    ml_type local = ml_layout_local(s->layout, t, &out[0]);
    ml_ref pair[3];
    int64_t sizes[5];
    ml_op op = node->op;
    if (ml_op_interfaces[op] && ml_op_interfaces[op]->local) {
        ml_op_interfaces[op]->local(s, n, sources, need, out, outputs);
        return;
    }
    if (op == ML_OP_PLACE || op == ML_OP_IOTA || op == ML_OP_RANDOM) {
        outputs[0] = op == ML_OP_PLACE  ? sources[0]
                     : op == ML_OP_IOTA ? global_iota(s, out, 0, t->axis[0], local.size[0])
                                        : local_random(s, n, sources, out, &local);
        return;
    }
    if (op == ML_OP_SPLIT) {
        memcpy(sizes, args, sizeof sizes);
        sizes[2] = local.size[ml_type_find(t, (ml_axis)args[1])];
        args = sizes;
    } else if (op == ML_OP_GATHER) {
        const ml_type *table = ml_graph_type(s->to, sources[0]);
        int at = ml_type_find(table, (ml_axis)args[0]);
        pair[0] = sources[0];
        pair[1] = within(s, sources[1], ml_graph_type(s->from, ml_graph_source(s->from, n, 0)),
                         &need[0], at);
        pair[1] = shifted(s, pair[1], &need[0], at, table->size[at]);
        sources = pair;
    } else if (op == ML_OP_SCATTER_ADD) {
        int at = ml_type_find(t, (ml_axis)args[0]);
        pair[0] = shifted(s, sources[0], out, at, local.size[at]);
        pair[1] = shard_reduced_source(s, n, 1, sources[1], &need[1]);
        sources = pair;
    } else if (op == ML_OP_SUM || op == ML_OP_MAX || op == ML_OP_MIN || op == ML_OP_DOT) {
        for (int k = 0; k < node->source_count; k++)
            pair[k] = shard_reduced_source(s, n, k, sources[k], &need[k]);
        sources = pair;
    }
    if (node->source_count == 1 && node->op == ML_OP_BROADCAST &&
        ml_type_equal(ml_graph_type(s->to, sources[0]), &local))
        outputs[0] = sources[0];
    else
        outputs[0] = ml_graph_add(s->to, (ml_op)node->op, sources, node->source_count, args,
                                  node->arg_count, &local);
    for (int i = 1; i < ml_op_outputs(s->from, n); i++) outputs[i] = ml_out(s->to, outputs[0], i);
}
