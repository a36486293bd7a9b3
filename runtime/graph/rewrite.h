/* The frame of every pass: copy a program's live nodes into a new graph, sources first, letting a
 * rule put something else in a node's place.
 *
 * Invariant: what replaces a node has the same type (dtype, axes, order) and value. The rule may
 * leave dead nodes behind; the graph that a pass returns holds live ones only. Graph, scratch
 * memory and roots are released or left as they were when a rule raises. */
#ifndef ML_GRAPH_REWRITE_H
#define ML_GRAPH_REWRITE_H

#include "runtime/graph/analysis.h"

typedef struct {
    const ml_graph *from;
    ml_graph *to;          /* the new graph: shares axes, states, inputs and origins with `from` */
    ml_arena *scratch;     /* for the length of the pass */
    const ml_roots *roots; /* in `from` */
    uint32_t count;        /* of nodes in `from` */
    uint32_t *users;       /* by node of `from`: live users and roots; 0 is dead */
    ml_ref *map;           /* by node of `from`: what stands for it in `to` */
    ml_ref **outputs;      /* by node of `from`: its outputs in `to` where a rule replaced a node
                              that has several; NULL otherwise */
    const ml_ref *order;   /* the live nodes in the order to visit them; NULL is ascending. `begin`
                              may set it: sources before users */
    uint32_t order_count;
    void *context; /* the pass's own */
} rewrite;

/* The node of `to` that stands for `node`, whose sources are `sources`; rewrite_copy is the least
 * that a rule can do. Nodes that it makes carry the node's origin and flags. */
typedef ml_ref rewrite_rule(rewrite *r, ml_ref node, const ml_ref *sources);
ml_ref rewrite_copy(rewrite *r, ml_ref node, const ml_ref *sources);
/* A second one, which the backward pass computes again. */
ml_ref rewrite_copy_again(rewrite *r, ml_ref node, const ml_ref *sources);

/* Set r->order, for `begin`: ascending, except for what extra edges make wait (rewrite_order.c).
 * `extra` calls edge(edges, source, user) for each, twice over. false where they form a cycle. */
typedef void rewrite_edge(void *edges, ml_ref source, ml_ref user);
bool rewrite_order(rewrite *r, void (*extra)(void *context, rewrite_edge *edge, void *edges),
                   void *context);

/* Whether each part of n's result along `axis` takes the same part of its sources alone, of those
 * that have the axis (rewrite_splittable.c). False for routines and scans of more than one output.
 */
bool rewrite_splits(const ml_graph *g, ml_ref n, ml_axis axis);

/* Run a pass: `begin` (may be NULL) once users are counted, then `rule` for every live node. */
ml_graph *rewrite_run(const ml_graph *from, ml_roots *roots, void (*begin)(rewrite *r),
                      rewrite_rule *rule, void *context);

#endif
