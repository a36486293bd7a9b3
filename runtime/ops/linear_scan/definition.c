/* LINEAR_SCAN and LINEAR_SCAN_GRAD by their definitions: products over chunks, and their gradient.
 */
#include "runtime/graph/analysis.h"
#include "runtime/ops/linear_scan/linear_scan.h"

/* All of n, as another node: no builder looks through a slice, as ml_permute does through a
 * permutation, ml_broadcast through a broadcast and ml_cast through a cast. */
static ml_ref whole_slice(ml_graph *g, ml_ref n) {
    const ml_type *t = ml_graph_type(g, n);
    return ml_graph_add(g, ML_OP_SLICE, &n, 1, (int64_t[]){t->axis[0], 0, t->size[0]}, 3, NULL);
}

/* A node for source i that the forward pass reads, and so has a gradient, with all batch axes, so
 * that the gradient has them. */
static ml_ref independent(ml_graph *g, const ml_linear_scan *s, const ml_ref *sources, int i) {
    ml_ref n = sources[i];
    ml_type all;
    if (i != LINEAR_SCAN_STATE) {
        linear_scan_slices(s, ml_graph_type(g, sources[LINEAR_SCAN_STATE]), linear_scan_own(s, i),
                           (ml_dtype)ml_graph_type(g, n)->dtype, &all);
        if (ml_graph_type(g, n)->rank < all.rank) n = ml_broadcast(g, n, &all);
    }
    return whole_slice(g, n);
}

static bool contains(const ml_ref *list, int count, ml_ref n) {
    for (int i = 0; i < count; i++)
        if (list[i] == n) return true;
    return false;
}

static void gradient(ml_graph *g, ml_ref n, const ml_linear_scan *s, ml_ref *outputs) {
    int count = LINEAR_SCAN_FIRST_PAIR + 2 * s->rank;
    ml_ref sources[LINEAR_SCAN_MOST_SOURCES + 2], wrt[LINEAR_SCAN_MOST_SOURCES], roots[2], given[2];
    for (int i = 0; i < count + 2; i++) sources[i] = ml_graph_source(g, n, i);
    for (int i = 0; i < count; i++) {
        wrt[i] = independent(g, s, sources, i);
        while (contains(wrt, i, wrt[i])) wrt[i] = whole_slice(g, wrt[i]); /* of one tensor */
    }
    linear_scan_chunks(g, wrt, s, roots); /* stored or computed again: passes/recompute.c */
    for (int i = 0; i < 2; i++) {
        ml_type type = *ml_graph_type(g, roots[i]);
        given[i] = ml_cast(g, ml_permute(g, sources[count + i], &type), (ml_dtype)type.dtype);
    }
    ml_pull_back(g, roots, given, 2, wrt, count, outputs);
    for (int i = 0; i < count; i++) {
        ml_type type;
        ml_linear_scan_type(g, n, i, &type);
        outputs[i] = outputs[i] ? ml_permute(g, outputs[i], &type)
                                : ml_broadcast(g, ml_const(g, (ml_dtype)type.dtype, 0), &type);
    }
}

void ml_linear_scan_decompose(ml_graph *g, ml_ref n, ml_ref *outputs) {
    ml_linear_scan s;
    ml_linear_scan_read(g, n, &s);
    if (ml_graph_node(g, n)->op == ML_OP_LINEAR_SCAN_GRAD) {
        gradient(g, n, &s, outputs);
        return;
    }
    ml_ref sources[LINEAR_SCAN_MOST_SOURCES];
    int count = ml_graph_node(g, n)->source_count;
    for (int i = 0; i < count; i++) sources[i] = ml_graph_source(g, n, i);
    linear_scan_chunks(g, sources, &s, outputs);
}
