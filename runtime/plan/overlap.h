/* From overlap.c, which finds a new order of the steps, to overlap_waits.c, which gives the
 * schedule that order: each collective that runs beside computation gets a ticket, and a WAIT
 * before the first step that needs its result. */
#ifndef ML_OVERLAP_H
#define ML_OVERLAP_H

#include "runtime/plan/dependencies.h"

typedef struct {
    ml_schedule *s;
    ml_arena *scratch;
    uint32_t count;        /* of steps */
    const uint32_t *order; /* the steps as they will run */
    const uint32_t
        *group; /* of a collective: those of a launch have the same number, below count */
    const step_edges *after; /* the steps that come after each */
} overlap_order;
void overlap_rewrite(const overlap_order *o, const ml_roots *roots);

#endif
