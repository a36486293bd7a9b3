/* Nodes that follow from others by their types alone, made again for others of the same types.
 *
 * While a recording is open, the graph notes the nodes that it is asked for, new or found. Closed,
 * the recording knows its leaves (what differs between repetitions) and the nodes that depend on
 * them. A repetition makes these for other leaves, in the same order, as the code would that was
 * recorded, provided that this code asks for nodes by the types of its leaves alone: rules of
 * optimizers, initial values. */
#ifndef ML_GRAPH_RECORDING_H
#define ML_GRAPH_RECORDING_H

#include "runtime/graph/graph.h"

typedef enum {
    ML_RECORDED_NODE,
    ML_RECORDED_STATE,
    ML_RECORDED_NUMBER, /* the value of an i64 CONST, which no other CONST recorded equals: a key */
} ml_leaf_kind;
typedef struct {
    ml_leaf_kind kind;
    int64_t value; /* a node, the id of a state, the number */
} ml_leaf;

typedef struct ml_recording ml_recording;

/* The graph notes nodes from now on; NULL where a recording is open already. Raises. */
ml_recording *ml_recording_open(ml_graph *g);
/* It notes no more of them. */
void ml_recording_end(ml_graph *g, ml_recording *r);
/* Of one that has ended: false where it cannot be repeated, as of nodes that have functions, or
 * where one of its nodes is a leaf as well. */
bool ml_recording_close(ml_graph *g, ml_recording *r, const ml_leaf *leaves, int leaf_count,
                        const ml_ref *results, int result_count); /* raises */
void ml_recording_free(ml_recording *r);

/* Whether leaves have the kinds and types of those recorded. */
bool ml_recording_fits(ml_graph *g, const ml_recording *r, const ml_leaf *leaves, int count);
/* What stands for each result. The leaves fit. Raises. */
const ml_ref *ml_recording_repeat(ml_graph *g, ml_recording *r, const ml_leaf *leaves);
/* Equal for equal lists of kinds and types, and likely for no others. */
uint64_t ml_leaves_key(ml_graph *g, const ml_leaf *leaves, int count);
uint64_t ml_type_key(ml_graph *g, const ml_type *type); /* likewise of types */

#endif
