/* What a graph means and costs: its derivatives, the reference interpreter and the bounds of
 * rounding, FLOPs, and the counter generator of random numbers. All raise. */
#ifndef ML_GRAPH_ANALYSIS_H
#define ML_GRAPH_ANALYSIS_H

#include "runtime/graph/graph.h"

/* Reverse-mode derivatives: appends to g the gradient of the scalar float `loss` with respect to
 * each of wrt[0..count) (any nodes) and stores them in gradients[]; 0 where loss does not depend
 * on it. A gradient has the dtype, axes and axis order of its node. */
void ml_autodiff(ml_graph *g, ml_ref loss, const ml_ref *wrt, int count, ml_ref *gradients);

/* Gradients of wrt, which are independent variables whatever they are computed from, by one
 * product of roots and cotangents; 0 where none of the roots depends on one. */
void ml_pull_back(ml_graph *g, const ml_ref *roots, const ml_ref *cotangents, int root_count,
                  const ml_ref *wrt, int wrt_count, ml_ref *gradients);

/* The reference interpreter: every op by its definition, one at a time, in float64 (integers in
 * int64), in no hurry. states[id] and inputs[id] hold elements as doubles in type order;
 * results[i] (for nodes[i]) are allocated in `arena`. bf16 and f32 values are not rounded unless
 * `round` is set. */
void ml_reference(const ml_graph *g, const double *const *states, const double *const *inputs,
                  const ml_ref *nodes, int count, double **results, bool round, ml_arena *arena);

/* How far rounding may take each element of a node, on a device that computes it from these inputs,
 * from what ml_reference gives without rounding: an absolute bound, infinite where any value is
 * possible. unrounded[id]: the device may have read input id, of bf16, before it was rounded. */
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
uint64_t ml_random_bits(int64_t key, int64_t index); /* all of u */
/* Replace attention over at most `longest` keys, and what no kernel supports, by its definition. */
bool ml_decompose_applies(const ml_graph *g, int64_t longest);
ml_graph *ml_decompose(const ml_graph *from, ml_roots *roots, int64_t longest);

#endif
