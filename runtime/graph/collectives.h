/* The kinds of collectives and what is true of each: the table is collectives.def. */
#ifndef ML_COLLECTIVES_H
#define ML_COLLECTIVES_H

#include "runtime/graph/graph.h"

typedef enum {
#define ML_COLLECTIVE(ident, ...) ML_COLLECTIVE_##ident,
#include "runtime/graph/collectives.def"
#undef ML_COLLECTIVE
    ML_COLLECTIVE_SEND, /* a message between pipeline stages; no op of the graph */
    ML_COLLECTIVE_KINDS
} ml_collective;

/* The outermost axis of the result. */
typedef enum {
    ML_RESULT_SAME,
    ML_RESULT_GATHERED,
    ML_RESULT_SCATTERED,
    ML_RESULT_EXCHANGED
} ml_collective_result;

typedef struct {
    const char *name, *label; /* "all_reduce", the op's; "all-reduce", for people */
    ml_collective_result result;
    bool combines; /* elements of ranks: its op has a third argument, and sums of floats round */
} ml_collective_info;
extern const ml_collective_info ml_collectives[ML_COLLECTIVE_KINDS];

/* Of an op of class COLLECTIVE. */
ml_collective ml_collective_of(ml_op op);
/* Bytes that leave one rank whose operand has `bytes`. */
double ml_collective_sent(ml_collective kind, double bytes, double ranks);

#endif
