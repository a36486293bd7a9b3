/* The memory of a rank that has several programs. A program's peak is what it needs by itself; the
 * others hold theirs beside it: states that it does not use, buffers of pipeline stages, inputs,
 * and what they need of the arena and of libraries' workspace, which all programs share, beyond its
 * own. With its peak that is all memory of the rank's device, whichever program runs.
 *
 * Planning and loading (exec/session.c) compare this sum with the budget, and `mlua check` prints
 * it: what a program holds is added up here alone. */
#ifndef ML_BESIDE_H
#define ML_BESIDE_H

#include "runtime/plan/plan.h"

typedef struct {
    const ml_plan *plan;
    const ml_plan *retry; /* repeats its steps, from its inputs and in its buffers; NULL: none */
} ml_rank_program;

typedef struct {
    const ml_rank_program *at; /* the one that is asked about may be among them */
    int count;
    /* What the rank has allocated already, also for programs that were freed since. */
    const ml_held_state *states;
    uint32_t state_count;
    int64_t arena_bytes;
} ml_rank_programs;

/* In bytes of one rank. */
typedef struct {
    /* Beyond the plan's peak_bytes, what the other programs hold and what is allocated already: the
     * sum, and by kind. */
    int64_t bytes, kind_bytes[ML_MEMORY_KINDS];
    /* Beyond both, what the program that sets the parameters will allocate: the plan's
     * update_states, `reserved`, and of update_arena what is above the largest arena. 0 where the
     * plan is not of microbatches. */
    int64_t later;
    /* The size of the largest arena of the other programs, of retries and of what is allocated
     * already, whether or not it is above the plan's own. */
    int64_t arena;
    /* The largest update_states of all programs less the plan's own, less the inputs that are in
     * `bytes` and in update_states, so that it may be negative. 0 where the plan has no
     * update_states. */
    int64_t reserved;
} ml_beside;

/* Beside the plan of a program, or of its retry. Raises. */
ml_beside ml_plan_beside(const ml_plan *plan, const ml_rank_programs *programs);
/* The arena that the program takes: of its steps, or of the rebuild of its cache. */
int64_t ml_plan_arena(const ml_plan *plan);

#endif
