#include "runtime/graph/wide.h"

enum { DEEPEST = 8, SOURCES = 3 };

static bool is_narrow(const ml_graph *g, ml_ref n) {
    return ml_is_narrow((ml_dtype)ml_graph_type(g, n)->dtype);
}

static ml_ref product(ml_graph *g, ml_ref n) {
    const ml_type type = *ml_graph_type(g, n);
    const int count = ml_graph_node(g, n)->arg_count;
    ml_axis axes[ML_MAX_AXES];
    for (int i = 0; i < count; i++) axes[i] = (ml_axis)ml_graph_args(g, n)[i];
    ml_ref wide =
        ml_dot(g, ml_graph_source(g, n, 0), ml_graph_source(g, n, 1), axes, count, ML_F32);
    return ml_permute(g, wide, &type);
}

/* Whether a wide n holds more than n: there is a product below. */
static bool gains(const ml_graph *g, ml_ref n, int depth) {
    const ml_node *node = ml_graph_node(g, n);
    const ml_op_class op_class = ml_ops[node->op].op_class;
    if (!is_narrow(g, n) || depth == DEEPEST || node->source_count > SOURCES) return false;
    if (node->op == ML_OP_DOT) return node->source_count == 2 && node->arg_count > 0;
    if (node->op == ML_OP_CAST) return ml_graph_type(g, ml_graph_source(g, n, 0))->dtype == ML_F32;
    if ((op_class != ML_CLASS_MAP || node->arg_count > 0) && node->op != ML_OP_RENAME) return false;
    for (int i = 0; i < node->source_count; i++)
        if (gains(g, ml_graph_source(g, n, i), depth + 1)) return true;
    return false;
}

static ml_ref wide(ml_graph *g, ml_ref n, int depth) {
    const ml_node node = *ml_graph_node(g, n);
    ml_ref sources[SOURCES];
    if (!gains(g, n, depth)) return is_narrow(g, n) ? ml_cast(g, n, ML_F32) : n;
    if (node.op == ML_OP_DOT) return product(g, n);
    if (node.op == ML_OP_CAST) return ml_graph_source(g, n, 0);
    for (int i = 0; i < node.source_count; i++)
        sources[i] = wide(g, ml_graph_source(g, n, i), depth + 1);
    if (node.op == ML_OP_RENAME)
        return ml_rename(g, sources[0], (ml_axis)ml_graph_args(g, n)[0],
                         (ml_axis)ml_graph_args(g, n)[1]);
    return ml_graph_add(g, node.op, sources, node.source_count, NULL, 0, NULL);
}

ml_ref ml_wide(ml_graph *g, ml_ref n) {
    return wide(g, n, 0);
}
