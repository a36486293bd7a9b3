/* The compiler: from the session's graph to a plan that a device can load.
 *
 * It stands on plan, pipeline, shard, passes and codegen/lower, and calls them in the order in
 * which compile.c reads. Nothing below includes this header. */
#ifndef ML_COMPILE_H
#define ML_COMPILE_H

#include "runtime/compile_input.h"

/* The first step, which the bindings take when the script asks for gradients: append to `g` the
 * gradients of the scalar `loss` with respect to wrt[0 .. count-1]. Raises. */
void ml_compile_gradients(ml_graph *g, ml_ref loss, const ml_ref *wrt, int count,
                          ml_ref *gradients);

/* The plan of each rank, or, where the layout has stages, of the ranks at one coordinate. With what
 * is beside it, it fits target->memory_bytes where any way of saving memory makes it fit; else it
 * is the smallest that was found. Raises; ml_plan_free is safe on what a failed call left in *plan
 * (NULL or partial). */
void ml_compile(const ml_compile_input *input, ml_plan **plan);
void ml_plan_free(ml_plan *plan);
/* Steps with values, offsets and kernels, of every part. */
void ml_plan_print(const ml_plan *plan, ml_text *out);

#endif
