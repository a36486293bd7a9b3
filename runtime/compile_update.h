/* What the optimizer's program, which sets the parameters after all microbatches, needs beside the
 * plan of a microbatch. */
#ifndef ML_COMPILE_UPDATE_H
#define ML_COMPILE_UPDATE_H

#include "runtime/plan/plan.h"

typedef struct {
    int64_t states;      /* bytes that it adds */
    int64_t inputs;      /* of these, for inputs of other programs of groups */
    int64_t temporaries; /* bytes of the arena that are alive at once */
    int64_t copies;      /* bytes of the arena for copies of what is sent */
} update_memory;

/* Nothing where there are no microbatches. */
update_memory compile_update_needs(const ml_plan *plan);
/* Whether collectives run beside computation, as far as options and target say. */
bool compile_overlaps(const ml_layout *layout, const ml_target *target,
                      const ml_compile_options *options);

#endif
