/* Regions of a graph that repeat: a model's layers, which come one after another in each part of a
 * program (its parameters, the forward pass, the backward pass in reverse order, the gradient norm,
 * the updates). A region is periods of equally many nodes. Node i of a period and node i of the
 * next have equal ops, types and arguments (states: equal kinds), by a hash of 64 bits, and each
 * operand is either the same node for both or lies one period of a region further: of this one, or
 * of another, up or down. So regions that are linked by operands step through the same layers, in
 * one direction or the other. A function that arguments name is in no region: one serves all
 * periods. */
#ifndef ML_REPEATS_H
#define ML_REPEATS_H

#include "runtime/graph/graph.h"

typedef struct {
    ml_ref first;           /* node of the first period */
    uint32_t period, count; /* nodes of a period; periods */
    int direction;          /* of layers from one period to the next: 1 or -1 */
    int64_t layer; /* of the first period; only differences between regions mean anything */
} repeat;
typedef ML_VEC(repeat) repeats;

enum { REPEATS_NEAR = 2 }; /* layers, at most, between a node and the operands of its own layer */

/* The regions of at least `least` periods that are linked to the largest one, ascending; none
 * where an operand does not step as above. The graph has no dead nodes. */
void repeats_find(const ml_graph *g, uint32_t least, ml_arena *arena, repeats *out);
/* The region that has node n; -1: none. */
int repeats_of(const repeats *all, ml_ref n);

static inline uint32_t repeats_time(const repeat *r, ml_ref n) {
    return (n - r->first) / r->period;
}
static inline int64_t repeats_layer(const repeat *r, int64_t time) {
    return r->layer + r->direction * time;
}

#endif
