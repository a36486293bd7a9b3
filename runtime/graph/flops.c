/* FLOPs of one node (analysis.h). */
#include "runtime/graph/analysis.h"
#include "runtime/graph/op_interface.h"

double ml_flops(const ml_graph *g, ml_ref n) {
    const ml_node *node = ml_graph_node(g, n);
    const ml_op_info *info = &ml_ops[node->op];
    double elements = (double)ml_type_elements(ml_graph_type(g, n));
    if (node->op == ML_OP_DOT) {
        const ml_type *a = ml_graph_type(g, ml_graph_source(g, n, 0));
        for (int i = 0; i < node->arg_count; i++)
            elements *= (double)ml_type_size(a, (ml_axis)ml_graph_args(g, n)[i]);
        return 2 * elements;
    }
    if (ml_op_interfaces[node->op]) return ml_op_interfaces[node->op]->flops(g, n);
    if (info->op_class == ML_CLASS_REDUCE || info->op_class == ML_CLASS_SCAN)
        elements = (double)ml_type_elements(ml_graph_type(g, ml_graph_source(g, n, 0)));
    if (node->op == ML_OP_SCATTER_ADD)
        elements = (double)ml_type_elements(ml_graph_type(g, ml_graph_source(g, n, 1)));
    return elements * info->flops;
}
