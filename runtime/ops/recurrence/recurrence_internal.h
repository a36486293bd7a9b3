/* Inside of recurrences: what a step's nodes depend on, and how they are computed for all positions
 * at once (recurrence/hoist.c). */
#ifndef ML_GRAPH_RECURRENCE_INTERNAL_H
#define ML_GRAPH_RECURRENCE_INTERNAL_H

#include "runtime/graph/infer.h"
#include "runtime/ops/recurrence/recurrence.h"

struct sharder;
struct tape;

enum { RECURRENCE_HEAD = 6 }; /* arguments before the roots of the step */

/* ---- For its interface (interface.c) ---- */

void recurrence_infer(infer *in, ml_type *out);
/* By a recurrence in the other direction, which recomputes each step from the states before it. */
void recurrence_gradient(struct tape *t, ml_ref n, const ml_ref *cotangents);
void recurrence_shard(struct sharder *s, ml_ref n);

/* ---- What the nodes of a step depend on ---- */

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

/* Whether a product depends on the states. */
bool recurrence_multiplies(const recurrence_body *b);
/* Of what these nodes reach. */
void recurrence_body_find(recurrence_body *b, ml_graph *g, const ml_recurrence_step *step,
                          const ml_ref *roots, int count);
/* Position in b->body; ML_INDEX_NONE for nodes before the floor. */
uint32_t recurrence_place(const recurrence_body *b, ml_ref n);
/* n at all positions, where it vectorizes. */
ml_ref recurrence_vectorized(recurrence_body *b, ml_ref n);

/* What a node of the step is as a function of one state (recurrence/affine.c): decay S + sum of
 * u (w^T S) + rest; where it is a vector, whose keys are summed over, decay^T S + rest. 0 for what
 * it has not. `rounded`: on the way S was cast to a narrower dtype. */
enum { AFFINE_PAIRS = 8, AFFINE_WRITES = 4 };
typedef struct {
    bool vector, rounded;
    ml_ref decay, rest;
    int pairs;
    ml_ref u[AFFINE_PAIRS], w[AFFINE_PAIRS];
} affine_form;
typedef struct {
    const recurrence_body *b;
    int state;        /* which */
    ml_ref parameter; /* its own */
    ml_ref base;      /* S: the parameter, or the state's next value */
    ml_type keys;     /* the axes that products with S sum over */
    int calls;
} affine_state;
/* Sets the keys; rank 0 where none are found. */
void affine_keys(affine_state *x);
bool affine_find(affine_state *x, ml_ref n, affine_form *out);
/* Of u w^T: what of w has no keys becomes a factor of u. */
void affine_move_factors(const affine_state *x, ml_ref *u, ml_ref *w);
/* rest as a sum of outer products of AFFINE_WRITES at most: how many; 0: it is none. A value of 0
 * is 1. */
int affine_outer(const affine_state *x, ml_ref rest, ml_ref *keys, ml_ref *values);
/* a op b, where neither may have all axes. */
ml_ref affine_join(ml_graph *g, ml_op op, ml_ref a, ml_ref b);
/* Without what repeats or reorders elements, and casts to wider floats. */
ml_ref affine_strip(ml_graph *g, ml_ref n);
bool affine_has_any(const ml_type *t, const ml_type *axes);

/* The outputs but for the histories, by linear scans where a state is one and by recurrences of
 * what is left (recurrence/match.c); false where none is. */
bool recurrence_match(ml_graph *g, const ml_recurrence_step *step, ml_ref *outputs);
/* Why not, of the first state; NULL: a state is one, or there is nothing to say. */
const char *recurrence_refusal(ml_graph *g, const ml_recurrence_step *step);

/* The outputs but for the histories, by segments, where histories would be large; else false. */
bool recurrence_segments(ml_graph *g, const ml_recurrence_step *step, ml_ref *outputs);
/* Of an axis of segments: the scan's own, and that of the positions of a segment; else false. */
bool recurrence_segment_axes(const ml_graph *g, ml_axis axis, ml_axis *whole, ml_axis *steps);

/* The same recurrence with inputs computed in the step that cost less than they move; false where
 * there are none (recurrence/sink.c). */
bool recurrence_sink(ml_graph *g, ml_ref n, ml_recurrence_step *out);
/* The recurrence that n was made of by that; 0: none. */
ml_ref recurrence_before(ml_graph *g, ml_ref n);

/* The slope and offset of one state's next value in max-plus (recurrence/max_plus.c). */
bool recurrence_max_plus(ml_graph *g, const ml_recurrence_step *step, int state, ml_ref *slope,
                         ml_ref *offset);

#endif
