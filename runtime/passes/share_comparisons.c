/* Values that are compared with their largest or smallest, as in the gradient of MAX or in a mask.
 * They are computed once and read from memory: a compiler may fuse a product and a sum into one
 * rounding in one kernel and not in another, and then no element would equal the largest. */
#include "runtime/passes/passes.h"

enum { MOST_STEPS = 64 }; /* from a comparison to what it compares */

typedef struct {
    const ml_graph *g;
    bool *marked; /* NULL: only looks */
    int left;     /* of the steps */
} search;

static bool widens(const ml_graph *g, ml_ref n) {
    if (ml_graph_node(g, n)->op != ML_OP_CAST) return false;
    const ml_type *from = ml_graph_type(g, ml_graph_source(g, n, 0)), *to = ml_graph_type(g, n);
    return ml_dtypes[from->dtype].bytes < ml_dtypes[to->dtype].bytes;
}

/* Mark what computes the elements of n: movements and wider dtypes change none. */
static void mark_value(search *s, ml_ref n) {
    const ml_node *node = ml_graph_node(s->g, n);
    if (s->left-- <= 0) return;
    if (ml_ops[node->op].op_class != ML_CLASS_MOVE && !widens(s->g, n)) {
        s->marked[n] = true;
        return;
    }
    for (int i = 0; i < node->source_count; i++) mark_value(s, ml_graph_source(s->g, n, i));
}

/* Whether n is the largest or smallest of some values, or several such behind movements,
 * collectives and each other; with `marked`, those values are marked. */
static bool find_extreme(search *s, ml_ref n) {
    const ml_node *node = ml_graph_node(s->g, n);
    ml_op_class op_class = ml_ops[node->op].op_class;
    bool found = false;
    if (s->left-- <= 0) return false;
    if (node->op == ML_OP_MAX || node->op == ML_OP_MIN) {
        if (s->marked) mark_value(s, ml_graph_source(s->g, n, 0));
        return true;
    }
    if (op_class != ML_CLASS_MOVE && op_class != ML_CLASS_COLLECTIVE && node->op != ML_OP_CAST &&
        node->op != ML_OP_MAXIMUM && node->op != ML_OP_MINIMUM)
        return false;
    for (int i = 0; i < node->source_count; i++)
        found = find_extreme(s, ml_graph_source(s->g, n, i)) || found;
    return found;
}

void ml_mark_compared(const ml_graph *g, ml_ref n, bool *marked) {
    if (!ml_op_compares((ml_op)ml_graph_node(g, n)->op)) return;
    for (int side = 0; side < 2; side++) {
        ml_ref extreme = ml_graph_source(g, n, side);
        if (!find_extreme(&(search){g, NULL, MOST_STEPS}, extreme)) continue;
        find_extreme(&(search){g, marked, MOST_STEPS}, extreme);
        mark_value(&(search){g, marked, MOST_STEPS}, ml_graph_source(g, n, 1 - side));
    }
}
