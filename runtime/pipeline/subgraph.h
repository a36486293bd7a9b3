/* A part of a graph while it is built: a stage's program, or a task's. Nodes are copied from the
 * whole graph; values that cross the boundary become inputs on one side and numbered outputs on the
 * other. */
#ifndef ML_SUBGRAPH_H
#define ML_SUBGRAPH_H

#include "runtime/graph/graph.h"

typedef struct {
    ml_arena *arena; /* of the lists, and of the roots in the end */
    ml_graph *graph; /* shares tables with the whole graph */
    ML_VEC(ml_ref) exports;
    ML_VEC(ml_update) updates;
} subgraph;

/* The node of the part that stands for a source of the copied node. */
typedef ml_ref subgraph_source(void *context, ml_ref source);

/* Copy node n; its sources are there already. */
ml_ref subgraph_copy(subgraph *part, const ml_graph *whole, ml_ref n, subgraph_source *source_of,
                     void *context);
/* Node n is computed by another part: an INPUT with this id stands for it. */
ml_ref subgraph_import(subgraph *part, const ml_graph *whole, ml_ref n, int64_t id);
/* Another part reads x: the number of the export. */
int subgraph_export(subgraph *part, ml_ref x);
void subgraph_update(subgraph *part, uint32_t state, ml_ref value);
/* The part's roots: `count` outputs of its own, then the exports, which other parts wait for. */
ml_roots subgraph_roots(const subgraph *part, const char *name, const ml_ref *outputs, int count);

#endif
