/* Which ops a pass may compute a part at a time. */
#include "runtime/graph/collectives.h"
#include "runtime/graph/rewrite.h"

/* From the traits and arguments: an op with BY_PARTS treats all axes alike that no argument names.
 * The collectives do so with all but the outermost axis. */
bool rewrite_splits(const ml_graph *g, ml_ref n, ml_axis axis) {
    const ml_node *node = ml_graph_node(g, n);
    const int64_t *args = ml_graph_args(g, n);
    const ml_type *type = ml_graph_type(g, n);
    if (ml_type_find(type, axis) < 0 || ml_ops[node->op].outputs != 1) return false;
    if (ml_ops[node->op].op_class == ML_CLASS_COLLECTIVE)
        return ml_collectives[ml_collective_of(node->op)].result == ML_RESULT_SAME ||
               type->axis[0] != axis;
    if (!ml_op_is(node->op, ML_BY_PARTS)) return false;
    for (int i = 0; i < node->arg_count; i++)
        if (ml_arg_is_axis(ml_op_arg_of(node->op, i)->kind) && args[i] == axis) return false;
    return true;
}
