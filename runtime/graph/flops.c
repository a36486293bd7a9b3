/* FLOPs of one node (analysis.h). */
#include "runtime/graph/analysis.h"
#include "runtime/ops/cached_attention/cached_attention.h"
#include "runtime/ops/conv/conv.h"
#include "runtime/ops/linear_scan/linear_scan.h"
#include "runtime/ops/ragged/ragged.h"
#include "runtime/ops/recurrence/recurrence.h"

/* Query-key pairs that a mask leaves, for one head of one batch element. Plain causal attention
 * counts as one half by convention, so that figures compare with other programs' MFU; so does what
 * is placed, whose places are known to the ranks alone: on average over them it is one half. */
static double unmasked_pairs(const ml_attention_args *args, int64_t seq, int64_t kv_seq) {
    if (!args->causal && !args->window) return (double)seq * (double)kv_seq;
    if (args->placed) {
        double keys = args->causal ? (double)kv_seq / 2 : (double)kv_seq;
        if (args->window && (double)args->window < keys) keys = (double)args->window;
        return (double)seq * keys;
    }
    if (args->causal && !args->window && seq == kv_seq) return (double)seq * (double)kv_seq / 2;
    return ml_attention_pairs(seq, kv_seq, kv_seq - seq, args->causal, args->window);
}

/* Forward: two products (q k, p v). Backward: four (dp, dv, dq, dk); the scores that kernels
 * compute again are not work that the model asks for. */
static double attention_flops(const ml_graph *g, ml_ref n, bool gradient) {
    ml_attention_args args;
    ml_attention_read(g, n, &args);
    const ml_type *q = ml_graph_type(g, ml_graph_source(g, n, 0));
    const ml_type *k = ml_graph_type(g, ml_graph_source(g, n, 1));
    const ml_type *v = ml_graph_type(g, ml_graph_source(g, n, 2));
    int64_t seq = ml_type_size(q, args.seq);
    int64_t kv_seq = ml_type_size(k, args.kv_seq);
    int64_t dim = ml_type_size(q, args.head_dim);
    int64_t value_dim = ml_type_size(v, args.head_dim);
    double rows = (double)ml_type_elements(q) / (double)(seq * dim); /* batch x heads */
    double forward = 2 * rows * unmasked_pairs(&args, seq, kv_seq) * (double)(dim + value_dim);
    return gradient ? 2 * forward : forward;
}

/* As if all that the table lists were seen. */
static double cached_attention_flops(const ml_graph *g, ml_ref n) {
    ml_cached_attention_args args;
    ml_cached_attention_read(g, n, &args);
    const ml_type *q = ml_graph_type(g, ml_graph_source(g, n, CACHED_Q));
    const ml_type *table = ml_graph_type(g, ml_graph_source(g, n, CACHED_TABLE));
    int64_t keys = args.block * ml_type_size(table, args.columns);
    int64_t elements = ml_type_elements(q) + ml_type_elements(ml_graph_type(g, n));
    return 2 * (double)keys * (double)elements;
}

static double recurrence_flops(const ml_graph *g, ml_ref n) {
    ml_recurrence r;
    ml_roots roots;
    double flops = 0;
    ml_recurrence_read(g, n, &r);
    ml_graph *body = ml_recurrence_body(g, n, NULL, &roots);
    for (ml_ref i = 1; i < ml_graph_count(body); i++)
        if (!(ml_graph_node(body, i)->flags & ML_NODE_FUNCTION)) flops += ml_flops(body, i);
    ml_graph_free(body);
    return flops * (double)r.length;
}

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
    if (node->op == ML_OP_CACHED_ATTENTION) return cached_attention_flops(g, n);
    if (node->op == ML_OP_ATTENTION) return attention_flops(g, n, false);
    if (node->op == ML_OP_ATTENTION_GRAD) return attention_flops(g, n, true);
    if (node->op == ML_OP_CONV) return conv_flops(g, n);
    if (ml_op_is_ragged(node->op)) return ragged_flops(g, n);
    if (ml_op_is_linear_scan(node->op)) return linear_scan_flops(g, n);
    if (node->op == ML_OP_RECURRENCE) return recurrence_flops(g, n);
    if (info->op_class == ML_CLASS_REDUCE || info->op_class == ML_CLASS_SCAN)
        elements = (double)ml_type_elements(ml_graph_type(g, ml_graph_source(g, n, 0)));
    if (node->op == ML_OP_SCATTER_ADD)
        elements = (double)ml_type_elements(ml_graph_type(g, ml_graph_source(g, n, 1)));
    return elements * info->flops;
}
