/* Which ops a pass may compute a part at a time. */
#include "runtime/graph/collectives.h"
#include "runtime/graph/rewrite.h"

bool rewrite_keeps(const ml_graph *g, ml_ref n, ml_axis axis) {
    const ml_node *node = ml_graph_node(g, n);
    const int64_t *args = ml_graph_args(g, n);
    int axis_args = 0; /* leading arguments that are axes which it does not treat alike */
    if (ml_type_find(ml_graph_type(g, n), axis) < 0) return false;
    if (ml_ops[node->op].op_class == ML_CLASS_COLLECTIVE)
        return ml_collectives[ml_collective_of(node->op)].result == ML_RESULT_SAME ||
               ml_graph_type(g, n)->axis[0] != axis;
    switch (node->op) {
    case ML_OP_BROADCAST:
    case ML_OP_PERMUTE: return true;
    case ML_OP_SLICE:
    case ML_OP_PAD:
    case ML_OP_SPLIT:
    case ML_OP_CONCAT:
    case ML_OP_GATHER:
    case ML_OP_SCATTER_ADD:
    case ML_OP_CUMSUM: axis_args = 1; break;
    case ML_OP_MERGE: axis_args = 2; break;
    case ML_OP_RENAME:
    case ML_OP_SUM:
    case ML_OP_MAX:
    case ML_OP_MIN:
    case ML_OP_ARGMAX:
    case ML_OP_DOT: axis_args = node->arg_count; break;
    default: return ml_ops[node->op].op_class == ML_CLASS_MAP && node->op != ML_OP_RANDOM;
    }
    for (int i = 0; i < axis_args; i++)
        if (args[i] == axis) return false;
    return true;
}
