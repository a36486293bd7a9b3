/* Inside of recurrences: what a step's nodes depend on, and how they are computed for all positions
 * at once (recurrence_hoist.c). */
#ifndef ML_GRAPH_RECURRENCE_INTERNAL_H
#define ML_GRAPH_RECURRENCE_INTERNAL_H

#include "runtime/graph/infer.h"
#include "runtime/graph/recurrence.h"

typedef enum { RECURRENCE_OUTSIDE, RECURRENCE_BY_INPUTS, RECURRENCE_BY_STATES } recurrence_depends;

typedef struct {
    ml_graph *g;
    const ml_recurrence_step *step;
    ml_ref floor;     /* nodes before it depend on no parameter of the step */
    ml_refs body;     /* what the roots reach from there on, ascending */
    ml_index places;  /* of nodes in body */
    uint8_t *depends; /* by place: recurrence_depends */
    uint32_t *states; /* by place: which states it depends on, a bit each */
    bool *vectorizes; /* by place: it can be computed for all positions at once */
    ml_ref *full;     /* by place: that, the axis first where it depends on inputs; 0 not yet */
} recurrence_body;

/* Of what these nodes reach. */
void recurrence_body_find(recurrence_body *b, ml_graph *g, const ml_recurrence_step *step,
                          const ml_ref *roots, int count);
/* Position in b->body; ML_INDEX_NONE for nodes before the floor. */
uint32_t recurrence_place(const recurrence_body *b, ml_ref n);
/* n at all positions, where it vectorizes. */
ml_ref recurrence_vectorized(recurrence_body *b, ml_ref n);

/* The outputs but for the histories, by products over chunks of positions, where each state is a
 * sum of outer products that decays by a number (recurrence_chunks.c); false where it is not so. */
bool recurrence_chunks(ml_graph *g, const ml_recurrence_step *step, ml_ref *outputs);

#endif
