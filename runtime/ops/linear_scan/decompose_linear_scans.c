/* Linear scans that no kernel serves become products over chunks of positions. */
#include "runtime/graph/rewrite.h"
#include "runtime/ops/linear_scan/linear_scan.h"
#include "runtime/passes/passes.h"

typedef struct {
    ml_linear_scan_served *served;
    const void *context;
} choice;

static ml_ref replace(rewrite *r, ml_ref n, const ml_ref *sources) {
    const choice *c = r->context;
    ml_ref copy = rewrite_copy(r, n, sources);
    if (!ml_op_is_linear_scan((ml_op)ml_graph_node(r->from, n)->op)) return copy;
    if (c->served(c->context, r->to, copy)) return copy;
    ml_ref *outputs = r->outputs[n] = ML_NEW_ARRAY(r->scratch, ml_ref, ML_MAX_OUTPUTS);
    ml_linear_scan_decompose(r->to, copy, outputs);
    return outputs[0];
}

ml_graph *ml_decompose_linear_scans(const ml_graph *from, ml_roots *roots,
                                    ml_linear_scan_served *served, const void *context) {
    choice c = {served, context};
    return rewrite_run(from, roots, NULL, replace, &c);
}

bool ml_decompose_linear_scans_applies(const ml_graph *g) {
    for (ml_ref n = 1; n < ml_graph_count(g); n++)
        if (ml_op_is_linear_scan((ml_op)ml_graph_node(g, n)->op)) return true;
    return false;
}
