/* Pipeline stages: a program's global graph divided where layers meet.
 *
 * The layers of a model are the members of one list of modules: module paths "blocks.1",
 * "blocks.2", ... with whatever prefix; layout->stages.list names the list ("blocks"), "layers" is
 * the longest that the program has. They are assigned in order to virtual stages 0 .. count-1
 * (ranks of the mesh axis times chunks), in runs of nearly equal cost. A stage may also begin
 * within a layer, with one of its members ("blocks.3.mlp"), where no more is transferred there than
 * between layers: then positions are those of members, in the order in which the forward pass of
 * the first program uses them. Layers that use their members in another order are not split, and
 * none is where states were assigned by their names before any program. What comes before the first
 * layer is of the first virtual stage, what comes after the last one of the last. Virtual stage v
 * runs at coordinate v % ranks of the mesh axis.
 *
 * Each node has one home: the stage of its layer, forward or backward; for nodes of no layer, the
 * last of their operands' stages forward, the first backward. A state resides on the virtual stages
 * that read it in the first program that uses it (a tied embedding: the first and the last); to
 * later programs that need it elsewhere it is sent. Its home is the first of them. The optimizer's
 * states reside where the gradient is: the new value is computed there and sent to other holders. A
 * gradient state that is a sum of parts of several stages has one part on each of their ranks; a
 * reader gets the sum. Before it is first assigned, the part at home is its initial value and the
 * others are 0. Sums over stages (norms) are added up at the first of their stages, in order, and
 * sent from there.
 *
 * Each stage gets a graph and roots of its own, still global over all other mesh axes. A value that
 * one stage computes and another uses is a transfer: an output of the first stage's graph (one of
 * the last roots.kept outputs, which are placed by the layout's rule instead of replicated) and an
 * INPUT of the second stage's graph. Inputs of the program, constants and what cheap ops compute
 * from them are available everywhere and never sent.
 *
 * Waves order the work: the wave of a value is the most transfers on any path to it, so a stage's
 * forward pass has a lower wave than its backward pass; what needs no transfer has wave 0. */
#ifndef ML_STAGE_H
#define ML_STAGE_H

#include "runtime/shard/layout.h"

/* Which layers are of which stage, and where states reside: one for a session, grown by each
 * program. Zero before the first. */
typedef struct {
    ml_arena *arena;
    const char *list;     /* path of the list: "blocks" */
    int layers;           /* of the model */
    int members;          /* of a layer; 1 where layers are not split */
    const char **member;  /* [members]: their names, "attention"; NULL: stages begin with layers */
    int count;            /* virtual stages; 0: before any program */
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
    int from_wave, to_wave; /* of the value, and of what first uses it: higher */
    int output;             /* in the roots of stage `from` */
    uint32_t input;         /* id of the INPUT of stage `to` */
    ml_ref node;            /* in the program's graph, for origins */
} ml_transfer;

typedef struct {
    ml_graph *graph; /* shares tables with the program's graph */
    ml_roots roots;
    int *output_of; /* by output of the program: its index in roots.outputs, or -1. Every rank has
                       each output on exactly one of its virtual stages */
    int waves;      /* 1 + the highest wave of a value of this stage */
    double *flops;  /* [waves]: work by which stages are balanced and scheduled (stage_flops) */
} ml_stage;

typedef struct {
    int count, transfer_count;
    ml_stage *stages;
    ml_transfer *transfers; /* in an order that all ranks share, ascending by from_wave */
} ml_stage_graphs;

/* Divide a program. The map gets its layers with the first program that has any, and the holders of
 * the states that this one uses; it is unchanged when this raises: ML_INVALID with fewer layers
 * than stages (the help says how many there are), or no list of that name. Graphs are freed by
 * ml_stage_graphs_free; the rest is in `arena`. */
void ml_stage_cut(const ml_graph *g, const ml_roots *roots, const ml_layout *layout,
                  ml_stage_map *map, ml_arena *arena, ml_stage_graphs *out);
void ml_stage_graphs_free(ml_stage_graphs *pipeline);
/* The holder of a state that no program uses yet: by its name ("blocks.3.wq"), else stage 0. Adds
 * it to the map. */
void ml_stage_assign_state(const ml_graph *g, const ml_layout *layout, ml_stage_map *map,
                           uint32_t state);

#endif
