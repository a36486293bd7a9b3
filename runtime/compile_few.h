/* Estimates of plans of many layers. What a plan needs is, but for the layers at the ends, the same
 * for each layer, so plans of two programs that have few of the layers that repeat say what that of
 * the whole program would need: each figure on the line through theirs. They take a tenth of the
 * time. An estimate is not a plan: what is to run is compiled. Of a program that is not, the second
 * plan stands for that of the whole (ml_plan's `fewer`). */
#ifndef ML_COMPILE_FEW_H
#define ML_COMPILE_FEW_H

#include "runtime/compile_update.h"
#include "runtime/plan/fit_memory.h"
#include "runtime/plan/plan.h"

typedef struct {
    ml_graph *graph;
    ml_roots roots;
    double layers;
} few_program;

typedef struct {
    few_program at[2]; /* ascending; graphs that the caller frees */
    double layers;     /* of the whole */
} few_layers;

enum { FEW_MARGIN = 28 }; /* layers that stay at each end of the second program */

/* Two programs with few layers of `g`, whose roots are of the arena; false, and no graphs, where
 * there are not many times as many that repeat. `left_out`: so many layers were left out of `g`,
 * which is the second program; 0: it is the whole. */
bool few_layers_make(const ml_graph *g, const ml_roots *roots, int64_t left_out, ml_arena *arena,
                     few_layers *few);
void few_layers_free(few_layers *few);

/* How many times the layers that the second program has beyond the first are those that the whole
 * has beyond the second. */
double few_beyond(const few_layers *few);
/* Of the whole program: the value on the line through those of the two. */
double few_extended(const few_layers *few, double first, double second);
update_memory few_extended_update(const few_layers *few, const update_memory *of);
plan_size few_extended_size(const few_layers *few, const plan_size *of);
/* Arenas and peaks of both plans become what they are with temporaries of the whole program, and
 * states of their own. */
void few_extend_temporaries(const few_layers *few, ml_plan *const *plans);
/* What the second plan computes, and copies to the host, becomes what the whole program does. */
void few_extend_work(const few_layers *few, const ml_plan *fewer, ml_plan *plan);

#endif
