/* The interfaces of LINEAR_SCAN and LINEAR_SCAN_GRAD. */
#include <string.h>

#include "runtime/graph/gradient.h"
#include "runtime/graph/op_interface.h"
#include "runtime/ops/linear_scan/linear_scan.h"

static void gradient(tape *t, ml_ref n, const ml_ref *cotangents) {
    ml_graph *G = gradient_graph(t);
    ml_linear_scan scan;
    ml_linear_scan_read(G, n, &scan);
    int count = ml_graph_node(G, n)->source_count;
    ml_ref sources[LINEAR_SCAN_MOST_SOURCES + 2];
    memcpy(sources, ml_graph_sources(G, n), sizeof(ml_ref) * (size_t)count);
    for (int i = 0; i < 2; i++) {
        ml_type type;
        ml_linear_scan_type(G, n, i, &type);
        ml_ref none = ml_broadcast(G, ml_const(G, (ml_dtype)type.dtype, 0), &type);
        sources[count + i] = cotangents[i] ? cotangents[i] : none;
    }
    ml_ref grad = ml_linear_scan_grad(G, sources, &scan);
    for (int i = 0; i < count; i++) gradient_give(t, n, i, ml_out(G, grad, i));
}

/* As many as sources but dy and dS. */
static int gradient_outputs(const ml_graph *g, ml_ref n) {
    return ml_graph_node(g, n)->source_count - 2;
}

const ml_op_interface ml_interface_LINEAR_SCAN = {
    .infer = linear_scan_infer,
    .output_type = ml_linear_scan_type,
    .gradient = gradient,
    .define = ml_linear_scan_decompose,
    .evaluate_all = linear_scan_evaluate,
    .flops = linear_scan_flops,
    .recomputes = 4,
    .propose = linear_scan_propose,
    .local = linear_scan_local,
};

const ml_op_interface ml_interface_LINEAR_SCAN_GRAD = {
    .infer = linear_scan_infer,
    .outputs = gradient_outputs,
    .output_type = ml_linear_scan_type,
    .gradient = gradient_of_definition,
    .define = ml_linear_scan_decompose,
    .evaluate_all = linear_scan_evaluate,
    .flops = linear_scan_flops,
    .propose = linear_scan_propose,
    .local = linear_scan_local,
};
