/* Inside of sharding: attention of one rank's part.
 *
 * A call is one local attention, between some rows of the queries and some rows of the keys. Where
 * these are in the whole is given by positions (ml_attention_args), so masks and score functions
 * need nothing more. attention/shard_local.c builds calls; shard_context.c decides which, where the
 * queries are cut (context parallelism). */
#ifndef ML_SHARD_ATTENTION_H
#define ML_SHARD_ATTENTION_H

#include "runtime/ops/attention/attention.h"
#include "runtime/shard/shard_internal.h"

enum { ATTENTION_Q, ATTENTION_K, ATTENTION_V, ATTENTION_O, ATTENTION_LSE };

typedef struct {
    sharder *s;
    ml_graph *g;
    ml_ref n;
    ml_attention_args args; /* of the whole attention */
    ml_axis kv_heads;       /* of the local k and v */
    const ml_placements *need;
    bool grad;
    int count, captured; /* sources; the first captured one */
    ml_ref *sources;     /* on this rank; k and v with the heads that its queries read */
    ml_type score;       /* of the whole attention */
    int ring;            /* the mesh axis over which queries and keys are cut alike, or -1 */
    int queries;         /* the mesh axis that cuts the queries where it is just one, or -1 */
    bool seq_cut;        /* by any number of them */
    bool indexed;        /* its functions use the indices of queries or keys */
    /* Indices along other axes of the scores that are cut: captured behind the other sources. */
    int index_count;
    ml_axis index_axis[ML_MAX_AXES];
    ml_ref index[ML_MAX_AXES];
} shard_attention;

/* Rows of queries or of keys. */
typedef struct {
    ml_ref *of;    /* by source: these rows of it; 0 where it does not have such rows */
    ml_ref start;  /* i32: the first one's index in the whole; no node: it is 0 */
    ml_ref second; /* i32: that of the second half of queries in two pieces; no node: in one */
    ml_ref block;  /* i32: which of the blocks of `size` rows of the whole; no node: keys are all */
    int64_t size;
} shard_rows;

/* Whether source k has an axis of queries (of keys): its rows are cut with theirs. */
bool shard_attention_along(const shard_attention *x, int k, ml_axis axis);
/* One call: outputs as the op has them. `causal`: some key may come after some query. `aligned`:
 * both are the same rows of the whole, which need no places. */
void shard_attention_call(shard_attention *x, const shard_rows *q, const shard_rows *k, bool causal,
                          bool aligned, ml_ref *outputs);

/* A score function in s->to: its elementwise nodes over what leaf(context, n) gives for each PARAM
 * and IOTA n of s->from; 0 for 0. */
typedef ml_ref shard_copy_leaf(void *context, ml_ref n);
ml_ref shard_copy_function(sharder *s, ml_ref root, shard_copy_leaf *leaf, void *context);

/* ---- shard_context.c ---- */
void shard_attention_rows(shard_attention *x, ml_ref *outputs);

#endif
