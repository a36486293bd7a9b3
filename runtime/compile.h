/* The compiler: from the session's graph to a plan that a device can load.
 *
 * It stands on plan, pipeline, shard, passes and codegen/lower, and calls them in the order in
 * which compile.c reads. Nothing below includes this header. */
#ifndef ML_COMPILE_H
#define ML_COMPILE_H

#include "runtime/pipeline/stage.h"
#include "runtime/plan/beside.h"
#include "runtime/plan/plan.h"

/* The first step, which the bindings take when the script asks for gradients: append to `g` the
 * gradients of the scalar `loss` with respect to wrt[0 .. count-1]. Raises. */
void ml_compile_gradients(ml_graph *g, ml_ref loss, const ml_ref *wrt, int count,
                          ml_ref *gradients);

/* How to divide a program into pipeline stages, where the layout has any. */
typedef struct {
    ml_stage_map *map; /* of the session: grown */
    int coordinate;    /* along the stages' mesh axis; -1 plans every stage, for a check */
} ml_cut;

/* target, layout and options outlive the plan. */
typedef struct {
    const ml_graph *graph; /* of the session, global */
    const ml_roots *roots; /* of the program */
    const ml_target *target;
    const ml_layout *layout; /* NULL: one rank */
    const ml_cut *cut;       /* NULL for what runs once, or instead of another: no stages, no cache
                                of parameters */
    const ml_compile_options *options; /* NULL: defaults */
    /* What other programs hold while one with this plan runs; NULL: nothing. May raise. */
    ml_beside (*beside)(void *context, ml_plan *plan);
    void *beside_context;
    const ml_layout *update; /* of the program that applies sums of gradients; NULL: `layout` */
    ml_plan_list applied;    /* of microbatches, where it is that program: it writes their cached
                                parameters too */
} ml_compile_input;

/* The plan of each rank, or, where the layout has stages, of the ranks at one coordinate. With what
 * is beside it, it fits target->memory_bytes where any way of saving memory makes it fit; else it
 * is the smallest that was found. Raises; ml_plan_free is safe on what a failed call left in *plan
 * (NULL or partial). */
void ml_compile(const ml_compile_input *input, ml_plan **plan);
void ml_plan_free(ml_plan *plan);
/* Steps with values, offsets and kernels, of every part. */
void ml_plan_print(const ml_plan *plan, ml_text *out);

#endif
