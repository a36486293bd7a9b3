/* Pipeline stages: cutting a program's global graph where layers meet.
 *
 * The layers of a model are the members of one list of modules: module paths "blocks.1",
 * "blocks.2", ... with whatever prefix; layout->stages.list names the list ("blocks"), "layers" is
 * the longest that the program has. They are dealt in order to virtual stages 0 .. count-1 (ranks
 * of the mesh axis times chunks), in runs of nearly equal cost. A stage may begin within a layer,
 * too, with one of its members ("blocks.3.mlp"), where no more is handed on there than where layers
 * meet: then positions are those of members, in the order in which the forward pass of the first
 * program uses them. Layers that go through them in another order are whole, and all are where
 * states were placed by their names before any program. What comes before the first layer is of the
 * first virtual stage, what comes after the last one of the last. Virtual stage v runs at
 * coordinate v % ranks of the mesh axis.
 *
 * Each node has one home: the stage of the layer that it is of, forward or backward; for what is of
 * none, the last of its operands' stages forward, the first backward. A state lives on the virtual
 * stages that read it in the first program that uses it (a tied embedding: the first and the last);
 * later programs that need it elsewhere are sent it. Its home is the first of them; the optimizer's
 * states live where the gradient is: the new value is made there, and copies receive it. A gradient
 * state that is the sum of parts of several stages keeps one on each of their ranks; who reads it
 * gets the sum.
 * Before it is first assigned the part at home is its initial value and the others are 0. Sums over
 * stages (norms) are added up at the first of their stages, in order, and sent from there.
 *
 * Each stage gets a graph and roots of its own, still global over all other mesh axes. What one
 * stage needs of another is a transfer: an output of the one (roots.kept of them, last, which stay
 * where the rule puts them) and an INPUT of the other. Inputs of the program, constants and what
 * cheap ops make of them are had everywhere and never sent.
 *
 * Levels order the work: the level of a value is the most transfers on any path to it, so a stage's
 * forward pass has a lower level than its backward pass; what needs no transfer has level 0. */
#ifndef ML_STAGE_H
#define ML_STAGE_H

#include "runtime/shard/layout.h"

/* Which layers are of which stage, and where states live: one for a session, grown by each program
 * that is cut. Zero before the first. */
typedef struct {
    ml_arena *arena;
    const char *list;     /* path of the list: "blocks" */
    int layers;           /* of the model */
    int members;          /* of a layer; 1 where they do not count */
    const char **member;  /* [members]: their names, "attention"; NULL: stages begin with layers */
    int count;            /* virtual stages; 0: no program was cut yet */
    int *first;           /* [count + 1]: stage v has the positions first[v] .. first[v + 1] - 1;
                             member m of layer l, both counted from 0, is at l x members + m */
    uint32_t state_count; /* entries of `holders` */
    struct ml_holder {
        int stage;
        struct ml_holder *next; /* ascending; the first is the home */
    } * *holders;               /* by state id; NULL where no program used it yet */
} ml_stage_map;

bool ml_stage_holds(const ml_stage_map *map, uint32_t state, int stage);

typedef struct {
    int from, to;           /* virtual stages */
    int from_wave, to_wave; /* of the value, and that of what first needs it: more than from's */
    int output;             /* in the roots of stage `from` */
    uint32_t input;         /* id of the INPUT of stage `to`; a name of its own in messages */
    ml_ref node;            /* in the program's graph, for origins */
} ml_transfer;

typedef struct {
    ml_graph *graph; /* shares tables with the program's graph */
    ml_roots roots;
    int *output_of; /* by output of the program: its place in roots.outputs, or -1. Every rank has
                       each output on exactly one of its virtual stages */
    int waves;      /* 1 + the highest level of a value of this stage */
    double *flops;  /* [levels]: work to deal and to schedule by; a byte written counts as some */
} ml_stage;

typedef struct {
    int count, transfer_count;
    ml_stage *stages;
    ml_transfer *transfers; /* in an order that all ranks share, ascending by from_level */
} ml_stage_graphs;

/* Cut a program. The map gets its layers with the first program that has any, and learns where
 * states live; it is left as it was when this raises: ML_INVALID with fewer layers than stages (the
 * help says how many there are), or no list of that name. Graphs are to be freed by
 * ml_stage_graphs_free; the rest lives in `arena`. */
void ml_stage_cut(const ml_graph *g, const ml_roots *roots, const ml_layout *layout,
                  ml_stage_map *map, ml_arena *arena, ml_stage_graphs *out);
void ml_stage_graphs_free(ml_stage_graphs *pipeline);
/* Where a state would live that no program was cut with: by its name ("blocks.3.wq"), else stage
 * 0. Adds it to the map. */
void ml_stage_assign_state(const ml_graph *g, const ml_layout *layout, ml_stage_map *map,
                           uint32_t state);

#endif
