/* The interfaces of ATTENTION and ATTENTION_GRAD. */
#include "runtime/graph/gradient.h"
#include "runtime/graph/op_interface.h"
#include "runtime/ops/attention/attention.h"
#include "runtime/ops/attention/attention_internal.h"

static void logsumexp_type(const ml_graph *g, ml_ref n, int i, ml_type *out) {
    ml_attention_args args;
    (void)i;
    ml_attention_read(g, n, &args);
    ml_attention_score_type(g, ml_graph_source(g, n, 0), ml_graph_source(g, n, 1), &args, out);
    out->rank--; /* kv_seq is last */
}

/* Of dk and dv. */
static void gradient_type(const ml_graph *g, ml_ref n, int i, ml_type *out) {
    *out = *ml_graph_type(g, ml_graph_source(g, n, i));
}

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

static bool decomposes(const ml_graph *g, ml_ref n, int64_t longest) {
    ml_attention_args args;
    ml_attention_read(g, n, &args);
    int64_t keys = ml_type_size(ml_graph_type(g, ml_graph_source(g, n, 1)), args.kv_seq);
    return keys <= longest || !served(g, n, &args);
}

/* Query-key pairs that a mask leaves, for one head of one batch element. Plain causal attention
 * counts as one half by convention, so that figures compare with other programs' MFU; so does what
 * is placed, whose places are known to the ranks alone: on average over them it is one half. */
static double unmasked_pairs(const ml_attention_args *args, int64_t seq, int64_t kv_seq) {
    if (!args->causal && !args->window) return (double)seq * (double)kv_seq;
    if (args->pieces) {
        double keys = args->causal ? (double)kv_seq / 2 : (double)kv_seq;
        if (args->window && (double)args->window < keys) keys = (double)args->window;
        return (double)seq * keys;
    }
    if (args->causal && !args->window && seq == kv_seq) return (double)seq * (double)kv_seq / 2;
    return ml_attention_pairs(seq, kv_seq, kv_seq - seq, args->causal, args->window);
}

/* Forward: two products (q k, p v). Backward: four (dp, dv, dq, dk); the scores that kernels
 * compute again are not work that the model asks for. */
static double flops(const ml_graph *g, ml_ref n) {
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
    return ml_graph_node(g, n)->op == ML_OP_ATTENTION_GRAD ? 2 * forward : forward;
}

/* Key/value heads of a program with gradients, where queries have others. */
static ml_axis shared_axis(const ml_graph *g, ml_ref n) {
    ml_attention_args args;
    ml_attention_read(g, n, &args);
    return args.heads != args.kv_heads ? args.kv_heads : 0;
}

const ml_op_interface ml_interface_ATTENTION = {
    .infer = attention_infer,
    .output_type = logsumexp_type,
    .gradient = attention_gradient,
    .define = ml_attention_decompose,
    .decomposes = decomposes,
    .flops = flops,
    .recomputes = 1,
    .propose = attention_propose,
    .local = attention_local,
};

const ml_op_interface ml_interface_ATTENTION_GRAD = {
    .infer = attention_infer,
    .output_type = gradient_type,
    .gradient = gradient_of_definition,
    .define = ml_attention_decompose,
    .decomposes = decomposes,
    .flops = flops,
    .propose = attention_propose,
    .local = attention_local,
    .shared_axis = shared_axis,
};
