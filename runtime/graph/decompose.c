/* Ops by their definitions where that is cheaper, or where no kernel serves (analysis.h);
 * placements dropped where there is one rank. */
#include "runtime/graph/op_interface.h"
#include "runtime/graph/rewrite.h"

static bool decomposes(const ml_graph *g, ml_ref node, int64_t longest) {
    const ml_op_interface *own = ml_op_interfaces[ml_graph_node(g, node)->op];
    return own && own->decomposes && own->decomposes(g, node, longest);
}

bool ml_decompose_applies(const ml_graph *g, int64_t longest) {
    for (ml_ref node = 1; node < ml_graph_count(g); node++)
        if (decomposes(g, node, longest)) return true;
    return false;
}

static ml_ref replace(rewrite *r, ml_ref node, const ml_ref *sources) {
    const int64_t *longest = r->context;
    const ml_op_interface *own = ml_op_interfaces[ml_graph_node(r->from, node)->op];
    ml_ref copy = rewrite_copy(r, node, sources);
    if (!decomposes(r->to, copy, *longest)) return copy;
    ml_ref *outputs = r->outputs[node] = ML_NEW_ARRAY(r->scratch, ml_ref, ML_MAX_OUTPUTS);
    own->define(r->to, copy, outputs);
    return outputs[0];
}

ml_graph *ml_decompose(const ml_graph *from, ml_roots *roots, int64_t longest) {
    return rewrite_run(from, roots, NULL, replace, &longest);
}

static ml_ref drop_place(rewrite *r, ml_ref node, const ml_ref *sources) {
    bool place = ml_graph_node(r->from, node)->op == ML_OP_PLACE;
    return place ? sources[0] : rewrite_copy(r, node, sources);
}

ml_graph *ml_drop_placements(const ml_graph *from, ml_roots *roots) {
    return rewrite_run(from, roots, NULL, drop_place, NULL);
}
