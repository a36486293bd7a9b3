/* The interfaces of RAGGED_DOT and RAGGED_OUTER. */
#include "runtime/graph/gradient.h"
#include "runtime/graph/op_interface.h"
#include "runtime/ops/ragged/ragged.h"
#include "runtime/ops/ragged/shard_rows.h"

/* The last argument asks for a second one. */
static int outputs(const ml_graph *g, ml_ref n) {
    return ml_graph_args(g, n)[ml_graph_node(g, n)->arg_count - 1] ? 2 : 1;
}

static void gradient(tape *t, ml_ref n, const ml_ref *cotangents) {
    ml_graph *g = gradient_graph(t);
    for (int i = 0; i < 2; i++) {
        if (!gradient_wants(t, n, i)) continue;
        const ml_ref made = ragged_gradient(g, n, cotangents[0], i);
        ml_graph_mark(g, made, ml_graph_node(g, n)->flags & ML_NODE_FP8);
        gradient_give(t, n, i, made);
    }
}

static bool has_function(const ml_graph *g, ml_ref n, int64_t longest) {
    (void)longest;
    return ml_graph_args(g, n)[3] != 0;
}

const ml_op_interface ml_interface_RAGGED_DOT = {
    .infer = ragged_infer,
    .outputs = outputs,
    .output_type = ragged_gated_type,
    .gradient = gradient,
    .define = ragged_gated_define,
    .decomposes = has_function,
    .evaluate = ragged_evaluate,
    .flops = ragged_flops,
    .recomputes = 1,
    .propose = ragged_propose,
    .local = ragged_local,
    .feasible = ragged_feasible,
    .placed = ragged_placed,
    .row_bounds = ragged_row_bounds,
};

const ml_op_interface ml_interface_RAGGED_OUTER = {
    .infer = ragged_infer,
    .outputs = outputs,
    .output_type = ragged_squares_type,
    .gradient = gradient,
    .evaluate = ragged_evaluate,
    .flops = ragged_flops,
    .propose = ragged_propose,
    .local = ragged_local,
    .feasible = ragged_feasible,
    .row_bounds = ragged_row_bounds,
};
