/* Insides of simplify: peepholes over nodes of the new graph.
 *
 * A rule looks at a node whose sources are already as simple as they get and returns an equal
 * node, or 0 where it has nothing to say. Nodes that a rule makes through simplify_make are
 * simplified in turn, so rules can be short. */
#ifndef ML_GRAPH_SIMPLIFY_H
#define ML_GRAPH_SIMPLIFY_H

#include "runtime/graph/reference.h"
#include "runtime/graph/rewrite.h"

typedef struct {
    ml_graph *graph;
    ml_arena *scratch;
    ML_VEC(ml_ref) better; /* by node: its simplest form; 0 unknown */
    /* By node of the old graph: */
    bool *gradient;  /* becomes the gradient of a state */
    bool *wide;      /* bf16, and only cast to f32: made in f32 */
    ml_ref *widened; /* the f32 form of a wide one */
} simplifier;

ml_ref simplify_map(simplifier *s, ml_ref n);    /* simplify_elementwise.c */
ml_ref simplify_move(simplifier *s, ml_ref n);   /* simplify_movement.c, SCATTER_ADD too */
ml_ref simplify_reduce(simplifier *s, ml_ref n); /* simplify_movement.c */

ml_ref simplify_make(simplifier *s, ml_op op, const ml_ref *sources, int source_count,
                     const int64_t *args, int arg_count, const ml_type *type);
ml_ref simplify_map1(simplifier *s, ml_op op, ml_ref a);
ml_ref simplify_map2(simplifier *s, ml_op op, ml_ref a, ml_ref b);
ml_ref simplify_cast(simplifier *s, ml_ref a, ml_dtype dtype);
/* x itself, permuted or broadcast, so that it has the axes and order of `as`. */
ml_ref simplify_fit(simplifier *s, ml_ref x, const ml_type *as);
/* x with its axes, in order, under the names of `as` (same sizes in the same order). */
ml_ref simplify_rename(simplifier *s, ml_ref x, const ml_type *as);
/* Whether n is one number everywhere, and which. */
bool simplify_constant(const ml_graph *g, ml_ref n, reference_cell *value);
/* That number with the axes of `as` and its dtype. */
ml_ref simplify_full(simplifier *s, const ml_type *as, reference_cell value);

#endif
