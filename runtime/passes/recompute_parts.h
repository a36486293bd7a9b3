/* The values of a program's forward pass as parts for recompute_choose.h. */
#ifndef ML_RECOMPUTE_PARTS_H
#define ML_RECOMPUTE_PARTS_H

#include "runtime/graph/rewrite.h"
#include "runtime/passes/recompute_choose.h"

typedef struct {
    const rewrite *r;
    const bool *backward; /* by node: of the backward phase */
    const bool *kept;     /* leaves, weights, tables: there is one for the whole step */
    const bool *fixed;    /* must be the same numbers as before: is not computed again */
    const bool *light;    /* computing it again takes no time that counts */
    const double *speeds; /* of collectives: bytes a second by mesh axis; NULL: there are none */
    double share;         /* to keep: recompute_choose */
    recompute_curves *curves; /* likewise */
} recompute_program;

/* By node: RECOMPUTE_KEPT or RECOMPUTE_AGAIN; RECOMPUTE_UNUSED where the choice is not this one's.
 */
void recompute_program_choose(const recompute_program *p, uint8_t *fates);

#endif
