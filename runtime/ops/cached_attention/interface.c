/* The interface of CACHED_ATTENTION. */
#include "runtime/graph/gradient.h"
#include "runtime/graph/op_interface.h"
#include "runtime/ops/cached_attention/cached_attention.h"

static bool served(const ml_graph *g, ml_ref node) {
    enum { LARGEST_DIM = 1024 };
    for (int i = CACHED_Q; i <= CACHED_V; i++)
        if (ml_graph_type(g, ml_graph_source(g, node, i))->dtype == ML_F64) return false;
    ml_cached_attention_args args;
    ml_cached_attention_read(g, node, &args);
    return ml_type_size(ml_graph_type(g, ml_graph_source(g, node, CACHED_K)), args.head_dim) <=
               LARGEST_DIM &&
           ml_type_size(ml_graph_type(g, node), args.head_dim) <= LARGEST_DIM;
}

static bool decomposes(const ml_graph *g, ml_ref n, int64_t longest) {
    return longest == INT64_MAX || !served(g, n);
}

/* As if all that the table lists were seen. */
static double flops(const ml_graph *g, ml_ref n) {
    ml_cached_attention_args args;
    ml_cached_attention_read(g, n, &args);
    const ml_type *q = ml_graph_type(g, ml_graph_source(g, n, CACHED_Q));
    const ml_type *table = ml_graph_type(g, ml_graph_source(g, n, CACHED_TABLE));
    int64_t keys = args.block * ml_type_size(table, args.columns);
    int64_t elements = ml_type_elements(q) + ml_type_elements(ml_graph_type(g, n));
    return 2 * (double)keys * (double)elements;
}

const ml_op_interface ml_interface_CACHED_ATTENTION = {
    .infer = cached_attention_infer,
    .gradient = gradient_of_definition,
    .define = cached_attention_define,
    .decomposes = decomposes,
    .flops = flops,
    .propose = cached_attention_propose,
    .local = cached_attention_local,
};
