/* What rules of gradients are made of, for the interfaces of ops (op_interface.h). The rules of
 * other ops are in the column GRADIENT of ops.def. */
#ifndef ML_GRAPH_GRADIENT_H
#define ML_GRAPH_GRADIENT_H

#include "runtime/graph/graph.h"

/* One vector-Jacobian product in the making. */
typedef struct tape tape;

ml_graph *gradient_graph(const tape *t);
ml_arena *gradient_scratch(const tape *t);
/* Whether a gradient of source i of n is wanted. */
bool gradient_wants(const tape *t, ml_ref n, int i);
/* Adds x to the gradient of source i of n where one is wanted; x is summed over the axes that the
 * source lacks, and takes its order and dtype. */
void gradient_give(tape *t, ml_ref n, int i, ml_ref x);
/* ml_pull_back, within. */
void gradient_pull_back(void *tape, const ml_ref *roots, const ml_ref *cotangents, int root_count,
                        const ml_ref *wrt, int wrt_count, ml_ref *gradients);
/* The rule of n by what its interface's `define` gives. */
void gradient_of_definition(tape *t, ml_ref n, const ml_ref *cotangents);
/* The PARAM node with this index among those that `root` reaches; 0: none. */
ml_ref gradient_parameter(tape *t, ml_ref root, int64_t index);

#endif
