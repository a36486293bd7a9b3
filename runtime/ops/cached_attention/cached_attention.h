/* CACHED_ATTENTION: attention of a few queries of each sequence to keys and values that lie in
 * pools, as a decoding server keeps them (paged attention, arXiv:2309.06180).
 *
 * A row is a sequence. Its positions are cut into blocks of `block`; position p lies in row
 * table[row, (p / block) % columns] * block + p % block of the pools. With window, a table of few
 * columns is a ring: it holds the last columns * block positions before length[row], and earlier
 * ones are not seen.
 *
 * Sources, in this order, axes in any order:
 *   q       {row, seq, heads, head_dim}
 *   k, v    {pool, kv_heads, head_dim}: of one dtype; v may have another size of head_dim. kv_heads
 *           0: they lack that axis, and all heads share them. Query head h reads head
 *           h / (heads / kv_heads)
 *   table   i32 {row, columns}; entries of blocks that hold no position below length are not read
 *   start   i32 {row}: the position of the row's first query; query i stands at start[row] + i
 *   length  i32 {row}: keys at positions below it are valid
 *   what the score function captures
 * A query sees the valid keys, where causal none after its own position, with a window none that
 * is `window` or more before it. The result has q's axes, with v's size of head_dim, and q's dtype;
 * what sees nothing gives 0. Rows of the pools that no position below length lies in are not read.
 *
 * Kernels read a pool fastest where the rows of one head lie side by side: {kv_heads, pool,
 * head_dim}.
 *
 * The score function is that of an attention (graph.h) whose scores are {row, heads, seq, kv_seq},
 * kv_seq being the `keys` positions that a table over all of them has: IOTA along seq is a query's
 * position, IOTA along kv_seq that of a key. PARAM(1 + i) is captured source i: one with the axis
 * `pool` is of all positions' keys and PARAM(1 + i) has row and kv_seq in its place. */
#ifndef ML_GRAPH_CACHED_ATTENTION_H
#define ML_GRAPH_CACHED_ATTENTION_H

#include "runtime/graph/graph.h"

enum { CACHED_Q, CACHED_K, CACHED_V, CACHED_TABLE, CACHED_START, CACHED_LENGTH, CACHED_CAPTURED };

typedef struct {
    ml_axis seq, pool, columns, heads, kv_heads, head_dim, kv_seq;
    int64_t keys; /* 0: columns * block */
    bool causal;
    int64_t window, block; /* window 0: none */
    double scale;
    ml_ref score; /* 0: none */
} ml_cached_attention_args;

/* q, k, v, table, start, length, captured...: raises ML_INVALID for bad operands. */
ml_ref ml_cached_attention(ml_graph *g, const ml_ref *sources, int count,
                           const ml_cached_attention_args *args);
void ml_cached_attention_read(const ml_graph *g, ml_ref n, ml_cached_attention_args *args);
/* The axis of `start`. */
ml_axis ml_cached_attention_row(const ml_graph *g, const ml_ref *sources);
/* The type of PARAM(0): f32 (f64 for f64 operands) [row, heads, seq, kv_seq]. */
void ml_cached_attention_score_type(const ml_graph *g, const ml_ref *sources,
                                    const ml_cached_attention_args *args, ml_type *out);
/* That of PARAM(1 + i), of captured source i. */
void ml_cached_attention_param_type(const ml_graph *g, const ml_ref *sources,
                                    const ml_cached_attention_args *args, ml_ref captured,
                                    ml_type *out);
/* ---- For its interface (interface.c) ---- */

struct infer;
struct ml_placements;
struct sharder;

void cached_attention_infer(struct infer *in, ml_type *out);
/* Its definition: the pools gathered by the table, then attention's. */
void cached_attention_define(ml_graph *g, ml_ref n, ml_ref *outputs);
void cached_attention_propose(struct sharder *s, ml_ref n);
void cached_attention_local(struct sharder *s, ml_ref n, const ml_ref *sources,
                            const struct ml_placements *need, const struct ml_placements *out,
                            ml_ref *outputs);

#endif
