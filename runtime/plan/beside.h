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

typedef struct {
    int64_t bytes, kind_bytes[ML_MEMORY_KINDS]; /* of all; by kind */
    int64_t later; /* that the program which sets the parameters will add, after microbatches, and
                      what is `reserved` */
    int64_t arena; /* of the arena that all share, what the others need */
    int64_t reserved; /* beyond what the plan reserves for that program, what others of the same
                         microbatches do; less inputs of theirs that both count */
} ml_beside;

/* Beside the plan of a program, or of its retry. Raises. */
ml_beside ml_plan_beside(const ml_plan *plan, const ml_rank_programs *programs);
/* The arena that the program takes: of its steps, or of the rebuild of its cache. */
int64_t ml_plan_arena(const ml_plan *plan);

#endif
