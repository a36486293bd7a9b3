/* What a program is compiled of. */
#ifndef ML_COMPILE_INPUT_H
#define ML_COMPILE_INPUT_H

#include "runtime/pipeline/stage.h"
#include "runtime/plan/beside.h"
#include "runtime/plan/plan.h"

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

#endif
