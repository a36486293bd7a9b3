/* Weights of 8 bits: from a graph that computes logits, the graph in which products read states of
 * a narrow dtype, each output of a product with a scale of its own:
 *
 *     x dot w   ->   (x dot cast(q)) * s      s = max |w| / (largest of the dtype), q = w / s
 * rounded
 *
 * over the axes that the product sums. q and s are states like w is one: of w's kind, axes and so
 * its place in every layout; they get their values from w's, as initial values do.
 *
 * A weight is a parameter of floats that products alone read, all summed over the same axes. What
 * is looked up in (embeddings), what the logits are a product of (the head), what choices are made
 * of (routers: products before a sort or top-k) and sums of fewer than ML_WEIGHT_TERMS terms stay
 * as they are, as do weights of experts (products by groups) and of recurrences' steps. */
#ifndef ML_GRAPH_WEIGHTS_H
#define ML_GRAPH_WEIGHTS_H

#include "runtime/graph/graph.h"

enum { ML_WEIGHT_TERMS = 16 };

typedef struct {
    uint32_t parameter, values, scales; /* states: w, q, s */
} ml_weight;

/* Of one dtype, I8 or E4M3. Fields of an ML_VEC, in an arena of its own. */
typedef struct {
    ml_arena *arena;
    ml_dtype dtype;
    ml_weight *at;
    uint32_t count, capacity;
} ml_weight_list;

/* The logits by such weights, appended to g. `weights` is read, and gets those that are new. */
ml_ref ml_weights_narrow(ml_graph *g, ml_ref logits, ml_weight_list *weights, ml_arena *scratch);

#endif
