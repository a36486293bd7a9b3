/* Splits and merges of the axes of positions and of the batch. */
#include "runtime/increment/internal.h"

/* SPLIT of an axis that increments have not, into one that they have not either and one of size 1;
 * MERGE of such. */
static ml_ref split_or_merge(increment *inc, ml_ref n, ml_ref value, const lifting *by) {
    ml_graph *g = inc->g;
    const ml_node node = *ml_graph_node(g, n);
    const int64_t *args = ml_graph_args(g, n);
    const place *from = &inc->places[ml_graph_source(g, n, 0)];
    ml_type type = increment_lifted_type(ml_graph_type(g, n), by);
    bool first = increment_unit(from, (ml_axis)args[0]) || args[0] == from->batch;
    bool second = increment_unit(from, (ml_axis)args[1]) || args[1] == from->batch;
    if (node.op == ML_OP_SPLIT)
        return first ? ml_broadcast(g, value, &type)
                     : ml_graph_add(g, ML_OP_SPLIT, &value, 1, args, node.arg_count, NULL);
    if (!first && !second)
        return ml_graph_add(g, ML_OP_MERGE, &value, 1, args, node.arg_count, NULL);
    if (first && second) return value;
    ml_axis other = (ml_axis)args[first];
    if (args[0] == from->axis || args[1] == from->axis) /* the other has size 1 */
        return increment_squeeze(g, value, other);
    return ml_rename(g, value, other, (ml_axis)args[2]);
}

ml_ref increment_move(increment *inc, ml_ref n, const ml_ref *sources, const lifting *by) {
    ml_graph *g = inc->g;
    ml_op op = (ml_op)ml_graph_node(g, n)->op;
    if (op == ML_OP_SPLIT || op == ML_OP_MERGE) return split_or_merge(inc, n, sources[0], by);
    if (op == ML_OP_SLICE && by->batch && ml_graph_args(g, n)[0] == by->batch) return sources[0];
    return increment_lift(inc, n, sources, by);
}
