/* Recurrences (m.scan): one step, applied at each position of an axis, as one node.
 *
 * Sources of the node: inputs (the axis first), initial states, captured tensors. The step is a set
 * of functions over PARAM(i) = source i, of an input the slice at the position: its roots are the
 * next states, then stacked results, then summed ones. Outputs of the node, in this order:
 *   stacked    the step's result at every position, the axis first
 *   summed     the sum of the step's results over the positions
 *   final      the states after the last position
 *   histories  the states before each position, the axis first: a gradient recomputes the step
 *              from them
 * Positions are visited from 0 up, or down to 0 where it is reversed; slices stay where they are.
 * A state keeps its dtype, axes and order. Results that no node takes are not computed. */
#ifndef ML_GRAPH_RECURRENCE_H
#define ML_GRAPH_RECURRENCE_H

#include "runtime/graph/graph.h"

typedef struct {
    ml_axis axis;
    bool reverse;
    int64_t length;
    int inputs, states, captured; /* sources, in this order */
    int stacked, summed;          /* results of the step beside the states */
} ml_recurrence;

void ml_recurrence_read(const ml_graph *g, ml_ref n, ml_recurrence *out);
/* Root i of the step: the states' next values, stacked results, summed ones. */
ml_ref ml_recurrence_root(const ml_graph *g, ml_ref n, int i);
int ml_recurrence_roots(const ml_recurrence *r);
/* Which output of the node the first of each kind is. */
static inline int ml_recurrence_summed(const ml_recurrence *r) {
    return r->stacked;
}
static inline int ml_recurrence_final(const ml_recurrence *r) {
    return r->stacked + r->summed;
}
static inline int ml_recurrence_history(const ml_recurrence *r) {
    return r->stacked + r->summed + r->states;
}
/* The type of output i. */
void ml_recurrence_type(const ml_graph *g, ml_ref n, int i, ml_type *out);

/* Whether the step is elementwise: each element of the states is a recurrence of its own, and what
 * it gives has their axes. */
bool ml_recurrence_elementwise(const ml_graph *g, ml_ref n);

/* The first op of the step whose result is not linear in the states that it depends on; 0: none. */
ml_ref ml_recurrence_nonlinear(const ml_graph *g, ml_ref n);
/* Why a step that is linear in its states is no linear scan, in words; NULL: for no reason known.
 */
const char *ml_recurrence_refusal(const ml_graph *g, ml_ref n);
/* A node of this op among those that a root of the step reaches; 0: none. */
ml_ref ml_recurrence_find(const ml_graph *g, ml_ref root, ml_op op);
/* The narrow float with the fewest digits among what the step computes; ML_F64: none. */
ml_dtype ml_recurrence_roughest(const ml_graph *g, ml_ref n);

/* Whether it is elementwise over rows (recurrence/rows.c): as above, but for sums over `axis`, a
 * short one of the states (0: none), and stacked results that are sums over the last axis of the
 * rows. */
typedef struct {
    ml_axis axis;
    int64_t size; /* of `axis`; 1 where there is none */
    ml_type type; /* the rows: axes of the largest state but for `axis` */
} ml_recurrence_rows;
bool ml_recurrence_by_rows(const ml_graph *g, ml_ref n, ml_recurrence_rows *out);
/* What a stacked result sums over the rows' last axis; 0 where it is no such sum. */
ml_ref ml_recurrence_row_sum(const ml_graph *g, const ml_recurrence_rows *rows, ml_ref root);

/* A node that stands for a value of one step while the step is made: different from all others.
 * ml_recurrence_new puts a PARAM of the node in its place. */
ml_ref ml_recurrence_parameter(ml_graph *g, const ml_type *type);
/* The type of an input's slice: without the axis. Raises where it has none, or of another size. */
void ml_recurrence_slice(const ml_graph *g, ml_ref input, ml_axis axis, int64_t length,
                         ml_type *out);

/* What stands for a tensor in a step. */
typedef struct {
    ml_ref parameter, value;
} ml_recurrence_pair;
typedef struct {
    ml_axis axis;
    bool reverse, sums_stay; /* sums of inputs are not taken before, for all positions */
    int64_t length;
    const ml_recurrence_pair *inputs;   /* those that the step does not read are left out */
    const ml_recurrence_pair *states;   /* their initial values */
    const ml_ref *next;                 /* of the states */
    const char *const *names;           /* of the states, for messages; may be NULL */
    const ml_recurrence_pair *captured; /* beside those that are found */
    const ml_ref *stacked, *summed;
    int input_count, state_count, captured_count, stacked_count, summed_count;
} ml_recurrence_step;
/* The node. Tensors of the step that depend on none of its parameters are captured: they are
 * computed once, outside. Raises ML_INVALID for a state whose next value has another type and for
 * a captured tensor that has the axis. */
ml_ref ml_recurrence_new(ml_graph *g, const ml_recurrence_step *step);

/* Its outputs but for the histories: by another form where one is known for such a step. */
void ml_recurrence_apply(ml_graph *g, const ml_recurrence_step *step, ml_ref *outputs);

/* Its outputs but for the histories, by segments of `size` positions: the states before each are
 * what a gradient stores (recurrence/segments.c). */
void ml_recurrence_segments(ml_graph *g, const ml_recurrence_step *step, int64_t size,
                            ml_ref *outputs);

/* Whether there are scans by segments; those with segments of about `positions` positions (0: of
 * all), which divide the length. *longest: positions of the longest scan, on this rank. */
bool ml_resize_segments_applies(const ml_graph *g);
ml_graph *ml_resize_segments(const ml_graph *from, ml_roots *roots, int64_t positions,
                             int64_t *longest);
/* Before sharding: so many that ranks that share a scan's axis have equally many. */
struct ml_layout;
ml_graph *ml_share_segments(const ml_graph *from, ml_roots *roots, const struct ml_layout *layout);
/* Positions of a segment, of a scan over segments; 0 of other scans. */
int64_t ml_recurrence_segment(const ml_graph *g, ml_ref n);
/* n where scans have one segment: nodes of the same graph. */
ml_ref ml_recurrence_whole(ml_graph *g, ml_ref n);

/* Of a step by elements: each state's next value as slope times the state plus offset, or, where it
 * has a bit in *max_plus, as the maximum of the state plus slope and offset; both of its type and
 * of no state. False where one is no such function: of a state that is not f32 or f64, of other
 * states too, or of neither algebra. */
bool ml_recurrence_slopes(ml_graph *g, const ml_recurrence_step *step, ml_ref *slopes,
                          ml_ref *offsets, uint32_t *max_plus);
/* Whether the node's step is one by elements that has them: parts of its positions compose. */
bool ml_recurrence_composes(const ml_graph *g, ml_ref n);

/* Moves what the step computes of its inputs alone out of it (recurrence/hoist.c). */
void recurrence_hoist(ml_graph *g, ml_recurrence_step *step);

/* The ranks along the scan's axis that take turns at it, n being a turn; 0 where states pass by
 * maps of parts, or not at all. */
int64_t ml_recurrence_turns(const ml_graph *g, ml_ref n);

/* The step as a graph of its own, whose outputs are the roots with `wanted` set (all where NULL),
 * and whose leaves are PARAM nodes. Shares tables with g. */
ml_graph *ml_recurrence_body(const ml_graph *g, ml_ref n, const bool *wanted, ml_roots *roots);

#endif
