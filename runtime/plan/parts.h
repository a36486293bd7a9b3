/* What the files of plan/ share: a plan is made by plan_compile (passes.c), plan_overlap
 * (overlap.c), plan_assign (assign.c), ml_memory_place and memory_account (memory.c), in this
 * order. All raise. */
#ifndef ML_PLAN_PARTS_H
#define ML_PLAN_PARTS_H

#include "runtime/plan/plan.h"

/* Run the passes over the roots and lower the result: sets plan->graph, roots, traffic and
 * schedule. plan->layout is set. */
void plan_compile(ml_plan *plan, const ml_graph *from, const ml_roots *roots,
                  const ml_target *target, bool recompute_all);
/* Put the steps in an order in which collectives go on beside computation (lower.h: tickets). */
void plan_overlap(ml_plan *plan);
/* The type that a state has on this rank. */
ml_type plan_state(const ml_plan *plan, uint32_t state);
/* Let every update end up in its state: in place where that is safe, else by a copy at the end. */
void plan_assign(ml_plan *plan);
/* Fill in the byte counts of the plan once the temporaries are placed. */
void memory_account(ml_plan *plan);

/* Whether write `write` of the step may use the very memory of `storage`, as far as the step's own
 * reads of that storage are concerned. */
bool memory_may_overwrite(const ml_schedule *schedule, const ml_step *step, int write,
                          uint32_t storage);

#endif
