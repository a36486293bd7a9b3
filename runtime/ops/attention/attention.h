/* ATTENTION and ATTENTION_GRAD. */
#ifndef ML_ATTENTION_H
#define ML_ATTENTION_H

#include "runtime/graph/graph.h"

struct infer;
struct ml_layout;

static inline bool ml_op_attends(ml_op op) {
    return op == ML_OP_ATTENTION || op == ML_OP_ATTENTION_GRAD;
}

/* Sources: q, k, v, places, captured tensors...; for ATTENTION_GRAD: q, k, v, o, lse,
 * do, places, captured.... q has axes {batch..., seq, heads, head_dim}, k {batch..., kv_seq,
 * kv_heads or heads, head_dim}, v {batch..., kv_seq, kv_heads or heads, value_dim (head_dim by
 * name)}, in any order. Query head h reads K/V head h / (heads / kv_heads).
 * s = scale * sum(q k) in f32; s = score(s) where there is one; masked to -infinity where causal
 * (kv > q + offset, offset = kv_size - seq_size) or outside the window (q + offset - kv >= window);
 * o = softmax(s) v. s and lse are f64 for f64 operands. Rows with nothing to attend to give 0 (lse
 * -infinity). The score function is a root in the same graph that only attention nodes refer to:
 * MAP, IOTA and CONST nodes over PARAM(0) = s with type f32[batch..., heads, seq, kv_seq], and
 * PARAM(1 + i) = captured source i. The derivative function has PARAM(0) = s, PARAM(1 + i) =
 * captured, and PARAM(1 + captured count) = the cotangent.
 * Where q and k are rows of something longer, i32 numbers say from which indices on: of q, or of
 * each of two equal `pieces` of it, which need not be neighbours, and of k. Masks and the indices
 * of score functions count from there, and `offset` is the whole attention's. There are no places
 * otherwise. Kernels skip what a mask hides.
 * k, v, dk and dv may be in the order in which `key_ranks` ranks hold them whose second halves of
 * rows are traded with the rank at the other end (ml_attention_key_order). Masks, indices and
 * captured tensors count keys in their own order. */
typedef struct {
    ml_axis seq, kv_seq, heads, kv_heads, head_dim; /* kv_heads == heads when not grouped */
    bool causal;
    int64_t window;    /* 0: none */
    int pieces;        /* 0: whole; else 1 or 2, of which the queries are */
    int64_t offset;    /* 0 where whole */
    int64_t key_ranks; /* 0: k, v, dk and dv are in their own order */
    double scale;
    ml_ref score;      /* 0: none */
    ml_ref derivative; /* ATTENTION_GRAD with a score: d loss / d s before the score function */
} ml_attention_args;
ml_ref ml_attention(ml_graph *g, const ml_ref *sources, int count, const ml_attention_args *args);
ml_ref ml_attention_grad(ml_graph *g, const ml_ref *sources, int count,
                         const ml_attention_args *args);
void ml_attention_read(const ml_graph *g, ml_ref n, ml_attention_args *args);
/* How many pairs of a query and a key the masks leave, where query 0 stands at key `shift`; window
 * 0: none. In closed form: sequences may be too long for a loop over them. Exact to 2^53. */
double ml_attention_pairs(int64_t queries, int64_t keys, int64_t shift, bool causal,
                          int64_t window);
/* How many of the sources are places: those of the queries' pieces, then that of the keys. */
static inline int ml_attention_places(const ml_attention_args *args) {
    return args->pieces ? args->pieces + 1 : 0;
}
/* The rows, by an axis `rows`, of `keys` that `ranks` ranks hold one after another, each with the
 * second half of its rows traded with the rank at the other end: i32 numbers that put them in their
 * own order, and from that back. */
ml_ref ml_attention_key_order(ml_graph *g, ml_axis rows, int64_t keys, int64_t ranks);
/* Kernels read at least so many keys that lie side by side: blocks of traded rows are multiples of
 * that. */
enum { ML_ATTENTION_RUN = 64 };
/* Which source is the first captured one; the places are before it. */
int ml_attention_captured(const ml_graph *g, ml_ref n);
/* The type of PARAM(0): f32 (f64 for f64 operands), q's batch axes, heads, seq, kv_seq. */
void ml_attention_score_type(const ml_graph *g, ml_ref q, ml_ref k, const ml_attention_args *args,
                             ml_type *out);
/* The same values from DOT, MAP and REDUCE nodes: outputs[0..] in the order of ml_op_outputs.
 * Serves as the definition, for the reference interpreter and for short sequences. */
void ml_attention_decompose(ml_graph *g, ml_ref n, ml_ref *outputs);
/* The work of the busiest rank's attentions over the average rank's: 1 is even. Masks count, score
 * functions do not. 1 too where there are more ranks than are worth comparing. Does not raise. */
double ml_shard_balance(const ml_graph *g, const struct ml_layout *layout);

/* ---- For attention to other memory (ops/cached_attention) ---- */

/* The dtype that attention computes scores in. */
ml_dtype attention_dtype(ml_dtype dtype);
/* Raise unless `root` is a marked function of elementwise nodes over PARAMs, params[i] being the
 * type of PARAM i, that gives `score`. */
void attention_check_function(const struct infer *in, ml_ref root, const ml_type *params, int count,
                              const ml_type *score);
/* The function, marked as one, with every axis and the dtype of the scores; 0 for 0. */
ml_ref attention_prepare_function(ml_graph *g, ml_ref root, const ml_type *score);

#endif
