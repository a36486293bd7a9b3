/* Results in f32 where only the last step rounded them to a narrow dtype: the graph's products sum
 * in f32 anyway. Which logit is the largest is then not decided by ties of bf16. */
#ifndef ML_GRAPH_WIDE_H
#define ML_GRAPH_WIDE_H

#include "runtime/graph/graph.h"

/* n in f32: a product whose sum is not rounded, and what is computed element by element of such
 * (soft caps, scales, temperatures), again. What else it is computed of is cast. */
ml_ref ml_wide(ml_graph *g, ml_ref n);

#endif
