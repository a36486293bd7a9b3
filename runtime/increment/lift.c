/* Nodes that compute each position from the same position of their operands: the same op on
 * operands that have other axes in the place of positions. */
#include "runtime/increment/internal.h"

/* Pairs of a RENAME, axes of a reduction: those of the arguments that are left. */
static int keep_args(const ml_graph *g, ml_ref n, const lifting *by, int step, int64_t *out) {
    const int64_t *args = ml_graph_args(g, n);
    int count = 0;
    for (int i = 0; i < ml_graph_node(g, n)->arg_count; i += step) {
        if (args[i] == by->batch || args[i] == by->axis || args[i] == by->outer) continue;
        for (int k = 0; k < step; k++) out[count++] = args[i + k];
    }
    return count;
}

static ml_ref lift_rename(increment *inc, ml_ref n, ml_ref source, const lifting *by) {
    int64_t args[2 * ML_MAX_AXES];
    lifting from = *by;
    from.axis = increment_before(inc->g, n, by->axis);
    from.batch = increment_before(inc->g, n, by->batch);
    from.outer = increment_before(inc->g, n, by->outer);
    int count = keep_args(inc->g, n, &from, 2, args);
    if (!count) return source;
    return ml_graph_add(inc->g, ML_OP_RENAME, &source, 1, args, count, NULL);
}

/* A sum over an axis of size 1 is what it sums. */
static ml_ref lift_reduction(increment *inc, ml_ref n, const ml_ref *sources, const lifting *by,
                             const ml_type *type) {
    int64_t args[ML_MAX_AXES];
    const ml_node node = *ml_graph_node(inc->g, n);
    int count = keep_args(inc->g, n, by, 1, args);
    if (!count) return sources[0];
    return ml_graph_add(inc->g, (ml_op)node.op, sources, node.source_count, args, count, type);
}

static ml_ref lift_concat(increment *inc, ml_ref n, const ml_ref *sources, const lifting *by) {
    ml_graph *g = inc->g;
    int count = ml_graph_node(g, n)->source_count;
    ml_axis axis = (ml_axis)ml_graph_args(g, n)[0];
    ml_ref *parts = ML_NEW_ARRAY(inc->arena, ml_ref, count);
    for (int i = 0; i < count; i++) {
        ml_type type = increment_lifted_type(ml_graph_type(g, ml_graph_source(g, n, i)), by);
        parts[i] = ml_broadcast(g, sources[i], &type);
    }
    return ml_concat(g, parts, count, axis);
}

static ml_ref lift_move(increment *inc, ml_ref n, const ml_ref *sources, const lifting *by,
                        const ml_type *type) {
    ml_graph *g = inc->g;
    const ml_node node = *ml_graph_node(g, n);
    const int64_t *args = ml_graph_args(g, n);
    switch ((ml_move_op)node.op) {
    case ML_MOVE_BROADCAST: return ml_broadcast(g, sources[0], type);
    case ML_MOVE_PERMUTE: return ml_permute(g, sources[0], type);
    case ML_MOVE_RENAME: return lift_rename(inc, n, sources[0], by);
    case ML_MOVE_CONCAT: return lift_concat(inc, n, sources, by);
    case ML_MOVE_OUT: return ml_out(g, sources[0], (int)args[0]);
    case ML_MOVE_PLACE:
        if (increment_names(g, n, by->axis) || increment_names(g, n, by->batch)) return sources[0];
        break;
    case ML_MOVE_SLICE:
    case ML_MOVE_PAD:
    case ML_MOVE_SPLIT:
    case ML_MOVE_MERGE:
    case ML_MOVE_GATHER: break;
    }
    return ml_graph_add(g, (ml_op)node.op, sources, node.source_count, args, node.arg_count, NULL);
}

ml_ref increment_lift(increment *inc, ml_ref n, const ml_ref *sources, const lifting *by) {
    ml_graph *g = inc->g;
    const ml_node node = *ml_graph_node(g, n);
    const ml_type type = increment_lifted_type(ml_graph_type(g, n), by);
    ml_op op = (ml_op)node.op;
    if (op == ML_OP_STOP_GRADIENT) return sources[0];
    if (op == ML_OP_CAST) return ml_cast(g, sources[0], (ml_dtype)type.dtype);
    if (ml_ops[op].op_class == ML_CLASS_MOVE) return lift_move(inc, n, sources, by, &type);
    if (ml_ops[op].op_class == ML_CLASS_REDUCE || op == ML_OP_DOT)
        return lift_reduction(inc, n, sources, by, &type);
    return ml_graph_add(g, op, sources, node.source_count, ml_graph_args(g, n), node.arg_count,
                        ml_op_is_map(op) && op != ML_OP_RANDOM ? NULL : &type);
}
