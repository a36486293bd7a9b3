/* Passes over a program's graph. Each builds a new graph from an old one and rewrites the roots;
 * none changes its input. All raise. */
#ifndef ML_PASSES_H
#define ML_PASSES_H

#include "runtime/graph/analysis.h"

/* Constant folding, algebra, cancelling movements, common subexpressions, dead nodes; a dot that
 * becomes the f32 gradient of a state through a cast produces f32. */
ml_graph *ml_simplify(const ml_graph *from, ml_roots *roots);
/* Remove PLACE: for one rank. */
ml_graph *ml_drop_placements(const ml_graph *from, ml_roots *roots);
/* The backward pass computes forward values again instead of saving them. First values whose
 * copies add little memory traffic, `bytes` bytes in all at most (selective recomputation). Where
 * `kept` is below 1, any values: of the bytes of saved values between the most and the least that
 * can be, this share is saved, so that computing the others again takes the least time; what ranks
 * gathered from one another is gathered again where that takes less. `speeds`: bytes a second that
 * a rank sends, by mesh axis; NULL where there are no collectives. `curves`: of attempts at the
 * same program (recompute_choose.h); NULL: there are none. */
struct recompute_curves;
ml_graph *ml_recompute(const ml_graph *from, ml_roots *roots, int64_t bytes, double kept,
                       const double *speeds, struct recompute_curves *curves);

/* Bytes, at least, of a program of which nothing is computed again: its states and what the
 * backward pass reads of the forward pass. */
int64_t ml_saved_bytes(const ml_graph *g, ml_arena *arena);

/* Where n compares values with the largest or smallest of them: mark the nodes that compute them,
 * which must be computed once (share_comparisons.c). */
void ml_mark_compared(const ml_graph *g, ml_ref n, bool *marked);

#endif
