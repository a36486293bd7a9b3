/* Passes over a program's graph. Each builds a new graph from an old one and rewrites the roots;
 * none changes its input. All raise. */
#ifndef ML_PASSES_H
#define ML_PASSES_H

#include "runtime/graph/graph.h"

/* Reverse-mode derivatives: appends to g the gradient of the scalar float `loss` with respect to
 * each of wrt[0..count) (any nodes) and stores them in gradients[]; 0 where loss does not depend
 * on it. A gradient has the dtype, axes and axis order of its node. */
void ml_autodiff(ml_graph *g, ml_ref loss, const ml_ref *wrt, int count, ml_ref *gradients);

/* Constant folding, algebra, cancelling movements, common subexpressions, dead nodes; a dot that
 * becomes the f32 gradient of a state through a cast produces f32. */
ml_graph *ml_simplify(const ml_graph *from, ml_roots *roots);
/* Replace attention over at most `longest` keys, and what no kernel supports, by its definition. */
ml_graph *ml_decompose(const ml_graph *from, ml_roots *roots, int64_t longest);
/* Without PLACE: for one rank. */
ml_graph *ml_drop_places(const ml_graph *from, ml_roots *roots);
/* Scatter-adds at the indices of a sort (or those divided by a number) become sums of gathers. */
ml_graph *ml_gather_sorted(const ml_graph *from, ml_roots *roots);
bool ml_gather_sorted_applies(const ml_graph *g); /* whether there is one */
/* Sums over an axis of terms that are scaled by what does not change along it: scaled sums. */
ml_graph *ml_split_sums(const ml_graph *from, ml_roots *roots);
bool ml_split_sums_applies(const ml_graph *g); /* whether there is one */
/* Narrow products of f32 with bf16 values, or of few elements and rounded to bf16 afterwards, in
 * terms of products of bf16. */
ml_graph *ml_split_dots(const ml_graph *from, ml_roots *roots);
bool ml_split_dots_applies(const ml_graph *g); /* whether there may be one */
/* Sums of squares of products by groups come from the products' kernels. Last: other passes do not
 * know this second output. */
ml_graph *ml_ragged_squares(const ml_graph *from, ml_roots *roots);
bool ml_ragged_squares_apply(const ml_graph *g); /* whether there is one */
/* What follows the halves of a product by groups elementwise comes from the product's kernel. Last,
 * too. */
ml_graph *ml_ragged_gated(const ml_graph *from, ml_roots *roots);
bool ml_ragged_gated_applies(const ml_graph *g); /* whether there is one */
/* Merge dots that share an operand into one over a CONCAT (q,k,v; gate,up and their gradients). */
ml_graph *ml_merge_dots(const ml_graph *from, ml_roots *roots);
/* Products of gradients that lie side by side in a CONCAT, all of which other products read too,
 * read their parts of it: where they are kept for later, they are kept once. input_level says of
 * each INPUT at which level of a pipeline it is received; nothing comes to a higher level. */
ml_graph *ml_read_joined(const ml_graph *from, ml_roots *roots, const int *input_level);
/* Compute what lies between a product of more than `most_bytes` bytes (logits) and the sums and
 * products that use it up (the loss, gradients) in chunks of the product's outer axes, each with a
 * product of at most that size, so that none of it is ever whole. Sums in f32 of a chunk's parts in
 * the order of the chunks. Products whose whole result is needed stay as they are, and so do those
 * that no loss follows (layers' hidden tensors). Time in proportion to the nodes, but for losses
 * whose nodes lie inside one another's: a run for each. */
ml_graph *ml_chunk(const ml_graph *from, ml_roots *roots, int64_t most_bytes);
/* Whether there is a product of that size at all. */
bool ml_chunk_applies(const ml_graph *g, int64_t most_bytes);
/* Permutations move from operands to results, until they cancel: those around collectives, whose
 * parts lie along the outermost axis, would be copies otherwise. */
ml_graph *ml_sink_orders(const ml_graph *from, ml_roots *roots);
int64_t ml_permuted_bytes(const ml_graph *g); /* of the results of all permutations */
/* After sharding: compute what depends on the inputs' `axis`, of `size` elements (even), by halves
 * of it, which take turns from one collective to the next: those of one half can go on beside the
 * work of the other. Sums over the axis are those of the halves, added; those of bf16 are rounded
 * once. What cannot be done by halves is done as before. Time in proportion to the nodes. */
ml_graph *ml_halves(const ml_graph *from, ml_roots *roots, ml_axis axis, int64_t size);
/* Terms of sums over microbatches, where those of one microbatch are several products (such as
 * those of chunks), are added to the state one after the other. After sharding: one by one they
 * would be reduced over ranks one by one too. */
ml_graph *ml_open_sums(const ml_graph *from, ml_roots *roots);
/* Recompute cheap forward values (norm outputs, activations) in the backward pass instead of
 * keeping them, where what they are computed from is kept anyway. */
ml_graph *ml_recompute(const ml_graph *from, ml_roots *roots);
/* Only those that cost little: up to `bytes` bytes of memory traffic in all. */
ml_graph *ml_recompute_thrifty(const ml_graph *from, ml_roots *roots, int64_t bytes);

/* Where n compares values with the largest or smallest of them: mark the nodes that compute them,
 * which must be computed once (compared.c). */
void ml_mark_compared(const ml_graph *g, ml_ref n, bool *marked);

/* The reference interpreter: every op by its definition, one at a time, in float64 (integers in
 * int64), in no hurry. states[id] and inputs[id] hold elements as doubles in type order;
 * results[i] (for nodes[i]) are allocated in `arena`. bf16 and f32 values are not rounded unless
 * `round` is set. */
void ml_reference(const ml_graph *g, const double *const *states, const double *const *inputs,
                  const ml_ref *nodes, int count, double **results, bool round, ml_arena *arena);

/* How far rounding may take each element of a node, on a device that computes it from these inputs,
 * from what ml_reference gives without rounding: an absolute bound, infinite where any value is
 * possible. unrounded[id]: the device may have had input id, of bf16, before it was rounded. */
void ml_reference_bounds(const ml_graph *g, const double *const *inputs, const bool *unrounded,
                         ml_ref node, double **bounds, ml_arena *arena);

/* FLOPs of one node (2 m n k for a dot; attention by unmasked pairs, causal at one half). */
double ml_flops(const ml_graph *g, ml_ref n);

/* The counter generator: uniform in [0, 1) from a key and a global element index (the linear index
 * in the RANDOM node's own type, axes in its order). The kernels' preludes compute the same bits,
 * all in unsigned 64-bit arithmetic that wraps around:
 *   mix(z): z ^= z >> 30; z *= 0xbf58476d1ce4e5b9; z ^= z >> 27; z *= 0x94d049bb133111eb;
 *           z ^= z >> 31
 *   u = mix(mix(key + G) + (index + 1) * G) with G = 0x9e3779b97f4a7c15
 *   result = (u >> 40) * 2^-24, exact in f32; mix(key + G) is the same for a whole tensor.
 * (The finalizer of SplitMix64; the inner mix makes neighbouring keys unrelated streams.) */
double ml_random_uniform(int64_t key, int64_t index);

#endif
