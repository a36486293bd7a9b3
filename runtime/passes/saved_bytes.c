/* What a program takes at least where nothing is computed again (passes.h): its states, and the
 * results of products, routines and collectives, and the other operands of products, that lie
 * between the forward phase, which makes them, and the backward phase, which reads them. Other
 * values may share a kernel with what reads them. Those that are made behind the first node of the
 * backward phase, as the parts of a loss in chunks are, need not be there at one time. */
#include "runtime/graph/ops.h"
#include "runtime/passes/passes.h"

/* What n is a view of: the memory is that one's. */
static ml_ref viewed(const ml_graph *g, ml_ref n) {
    while (ml_op_is(ml_graph_node(g, n)->op, ML_VIEW)) n = ml_graph_source(g, n, 0);
    return n;
}

/* Whether `source` lies in memory until its user of the backward phase reads it. */
static bool is_stored(const ml_graph *g, ml_ref source, ml_op user) {
    int op_class = ml_ops[ml_graph_node(g, source)->op].op_class;
    return op_class == ML_CLASS_CONTRACT || op_class == ML_CLASS_ROUTINE ||
           op_class == ML_CLASS_COLLECTIVE || ml_op_is(user, ML_PRODUCT);
}

int64_t ml_saved_bytes(const ml_graph *g, ml_arena *arena) {
    ml_ref count = ml_graph_count(g), first = 1;
    int64_t bytes = 0;
    bool *counted = ML_NEW_ARRAY(arena, bool, count); /* or there once for the whole step */
    while (first < count && !(ml_graph_node(g, first)->flags & ML_NODE_BACKWARD)) first++;
    for (ml_ref n = 1; n < count; n++) {
        const ml_node *node = ml_graph_node(g, n);
        int op_class = ml_ops[node->op].op_class;
        bool moves =
            node->op == ML_OP_CAST || op_class == ML_CLASS_MOVE || op_class == ML_CLASS_COLLECTIVE;
        counted[n] = op_class == ML_CLASS_LEAF || (moves && node->source_count > 0);
        for (int i = 0; i < node->source_count && op_class != ML_CLASS_LEAF; i++)
            counted[n] = counted[n] && counted[ml_graph_source(g, n, i)];
        if (node->op == ML_OP_STATE) bytes += ml_type_bytes(ml_graph_type(g, n));
        for (int i = 0; i < node->source_count && node->flags & ML_NODE_BACKWARD; i++) {
            ml_ref source = viewed(g, ml_graph_source(g, n, i));
            if (source >= first || counted[source] || !is_stored(g, source, node->op)) continue;
            bytes += ml_type_bytes(ml_graph_type(g, source));
            counted[source] = true;
        }
    }
    return bytes;
}
