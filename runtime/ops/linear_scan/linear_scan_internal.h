/* Inside of linear scans by products over chunks of positions. */
#ifndef ML_GRAPH_LINEAR_SCAN_INTERNAL_H
#define ML_GRAPH_LINEAR_SCAN_INTERNAL_H

#include "runtime/ops/linear_scan/linear_scan.h"

typedef struct {
    ml_graph *g;
    const ml_ref *sources;
    ml_linear_scan s;
    ml_dtype dtype; /* of the state */
    int64_t chunk, chunks;
    ml_axis chunk_axis, p, j; /* chunks; positions of one; the same of keys */
    ml_ref decay;             /* of all chunks */
    ml_ref none, one; /* zeros over j (and keys, where these decay each by its own) and ones,
                         for each chunk: where products of decays begin */
    ml_ref diagonal;  /* 1 where p = j, else 0 */
} chunk_form;

/* a op b, where neither may have all axes; in the order of the union. */
ml_ref chunk_join(chunk_form *f, ml_op op, ml_ref a, ml_ref b);
/* Operand i as {chunks, positions, its axes}; behind the last position `beyond`. */
ml_ref chunk_operand(chunk_form *f, int i, double beyond);
ml_ref chunk_contract(chunk_form *f, ml_ref a, ml_ref b, ml_axis over);
/* Products of decays after position j, at which they are 1, up to p or up to the one before: times
 * the keys (over j) where each decays by its own. Gives {p, ...}; *final: after the last position.
 */
ml_ref chunk_decays(chunk_form *f, ml_ref keys, bool after, ml_ref *final);
/* The same from the chunk's begin on. */
ml_ref chunk_decays_since(chunk_form *f, bool after, ml_ref *final);
/* The states before each chunk and after the last, where step makes one from what was before it,
 * a slice of `total` and one of `sums`. */
typedef ml_ref chunk_step(chunk_form *f, ml_ref state, ml_ref total, ml_ref sums);
ml_ref chunk_states(chunk_form *f, ml_ref total, ml_ref sums, chunk_step *step, ml_ref *final);
/* {chunks, positions, ...} as y. */
ml_ref chunk_merge(chunk_form *f, ml_ref y);
/* With transitions of rank 1 and more (linear_scan/triangular.c). */
void chunk_triangular(chunk_form *f, ml_ref outputs[2]);

#endif
