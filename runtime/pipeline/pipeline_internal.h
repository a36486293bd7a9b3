/* What the files that plan a pipeline share. Each calls only those before it:
 *   representatives.c   ranks whose stages have equal plans
 *   slots.c             microbatch buffers of a stage
 *   shared_states.c     states that several stages of a rank use
 *   saved_states.c      states that a repeated step restores
 *   plan_memory.c       memory, work and traffic of a rank
 *   plan_build.c        all of it, as compile.c calls it
 *   retime.c            a better order, once steps ran */
#ifndef ML_PIPELINE_INTERNAL_H
#define ML_PIPELINE_INTERNAL_H

#include "runtime/pipeline/plan.h"

typedef struct ml_pipeline_plan pipeline_plan;

/* By rank: the first rank whose stages have equal plans. */
int *pipeline_representatives(const pipeline_plan *pipeline, const ml_graph *global,
                              ml_arena *arena);
/* The number of a stage's microbatch buffers, and the one of each microbatch: from the schedule. */
void pipeline_slots_assign(pipeline_plan *pipeline, int stage, ml_arena *arena);
/* Raise ML_INVALID where stages of a rank share a state that one of them assigns too early. */
void pipeline_states_check(const ml_plan *plan, int rank);
/* Until when in a step the planned stages may report an overflow: for one microbatch, the end of
 * the last task with overflow flags; for several the step's end (INT64_MAX), since ranks wait for
 * each other to compare flags, which must not delay microbatches. 0: there are no flags. */
int64_t pipeline_overflow_time(const pipeline_plan *pipeline);

#endif
