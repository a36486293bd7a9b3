/* What a report says of a program's scans: at which lines, over what, in which form. */
#ifndef ML_CHECK_SCANS_H
#define ML_CHECK_SCANS_H

#include <jansson.h>

#include "runtime/base/rates.h"
#include "vm/vm.h"

enum { CHECK_SCANS = 16 };
typedef struct {
    const ml_origin *origin;
    const char *axis;
    int64_t length;
    int count;           /* scans of the line: of layers, forward and backward */
    bool loop;           /* a position at a time; else one kernel */
    bool resident;       /* one kernel whose blocks meet at each position */
    const char *algebra; /* of one kernel: in which positions compose; NULL: in none */
    const char *why;     /* it is a loop, on a GPU */
    const char *op;      /* whose result is not linear in the states; NULL: none is */
    const ml_origin *at; /* its line */
    const char *refusal; /* what a linear step has that no linear scan has; NULL: nothing */
    bool linear;         /* LINEAR_SCAN or its gradient, of this rank */
    int rank;
    int kernels, products; /* of a loop: at a position, of the one that has most */
    int64_t segment;       /* positions of a segment of those that length counts; 0: none */
    int64_t stored, all;   /* bytes: of states before segments and within one; at all positions */
    int64_t turns;         /* ranks that follow their parts one after the other; 0: none */
    double seconds;        /* predicted, of all */
} check_scan;
typedef struct {
    check_scan list[CHECK_SCANS];
    int count;
} check_scans;

/* rates: NULL, unknown. */
void scans_add(check_scans *scans, const ml_plan *part, const ml_rates *rates);
void scans_print(const check_scans *scans);
void scans_json(const check_scans *scans, json_t *object);

#endif
