/* The reference interpreter's loop over the positions of a recurrence. */
#ifndef ML_RECURRENCE_LOOP_H
#define ML_RECURRENCE_LOOP_H

#include "runtime/graph/reference.h"

/* All outputs, in the run's scratch arena; computed once. */
reference_value *recurrence_evaluate(reference_run *r, ml_ref node);
/* The same in pieces, for ranks that proceed from position to position together. enter: the run of
 * the step for its i-th position, whose nodes are to be computed before leave. free keeps the
 * outputs. */
typedef struct reference_loop reference_loop;
reference_loop *reference_loop_new(reference_run *r, ml_ref node, int64_t *length);
reference_run *reference_loop_enter(reference_loop *l, int64_t i);
void reference_loop_leave(reference_loop *l, int64_t i);
void reference_loop_free(reference_loop *l);

#endif
