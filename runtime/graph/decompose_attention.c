/* Attention by its definition where that is cheaper, or where no kernel serves (analysis.h);
 * placements dropped where there is one rank. */
#include "runtime/graph/rewrite.h"
#include "runtime/ops/cached_attention/cached_attention.h"
#include "runtime/ops/ragged/ragged.h"

/* What the attention kernels serve (codegen/lower/lower.h: ml_attention_step). */
enum { KERNEL_BATCH_AXES = 3, KERNEL_HEAD_DIM = 256 };

static bool served(const ml_graph *g, ml_ref node, const ml_attention_args *args) {
    const ml_type *q = ml_graph_type(g, ml_graph_source(g, node, 0));
    const ml_type *v = ml_graph_type(g, ml_graph_source(g, node, 2));
    int64_t dim = ml_type_size(q, args->head_dim);
    int64_t value_dim = ml_type_size(v, args->head_dim);
    int batch_axes = q->rank - 2 - (ml_type_find(q, args->heads) >= 0);
    return q->dtype != ML_F64 && batch_axes <= KERNEL_BATCH_AXES && dim <= KERNEL_HEAD_DIM &&
           value_dim <= KERNEL_HEAD_DIM;
}

static bool served_cached(const ml_graph *g, ml_ref node) {
    enum { LARGEST_DIM = 1024 };
    for (int i = CACHED_Q; i <= CACHED_V; i++)
        if (ml_graph_type(g, ml_graph_source(g, node, i))->dtype == ML_F64) return false;
    ml_cached_attention_args args;
    ml_cached_attention_read(g, node, &args);
    return ml_type_size(ml_graph_type(g, ml_graph_source(g, node, CACHED_K)), args.head_dim) <=
               LARGEST_DIM &&
           ml_type_size(ml_graph_type(g, node), args.head_dim) <= LARGEST_DIM;
}

static ml_ref replace(rewrite *r, ml_ref node, const ml_ref *sources) {
    ml_op op = ml_graph_node(r->from, node)->op;
    ml_ref copy = rewrite_copy(r, node, sources);
    if (op == ML_OP_RAGGED_DOT && ml_graph_args(r->to, copy)[3]) {
        ml_ref *both = r->outputs[node] = ML_NEW_ARRAY(r->scratch, ml_ref, ML_MAX_OUTPUTS);
        ragged_gated_decompose(r->to, copy, both);
        return both[0];
    }
    if (op == ML_OP_CACHED_ATTENTION)
        return *(const int64_t *)r->context < INT64_MAX && served_cached(r->to, copy)
                   ? copy
                   : ml_cached_attention_decompose(r->to, copy);
    if (!ml_op_attends(op)) return copy;
    ml_attention_args args;
    ml_attention_read(r->to, copy, &args);
    const ml_type *k = ml_graph_type(r->to, sources[1]);
    int64_t keys = ml_type_size(k, args.kv_seq);
    if (keys > *(const int64_t *)r->context && served(r->to, copy, &args)) return copy;
    ml_ref *outputs = r->outputs[node] = ML_NEW_ARRAY(r->scratch, ml_ref, ML_MAX_OUTPUTS);
    ml_attention_decompose(r->to, copy, outputs);
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
