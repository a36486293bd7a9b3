/* Passes over few layers in place of many. What passes do to a layer of a model depends on what is
 * near it in the graph, so it is the same for all layers that repeat but those at the ends. Here
 * most of the layers that repeat (repeats.h) are left out of a program, passes run over the rest,
 * and what they made of a layer is repeated for those that were left out.
 *
 * Whether that is what the passes would have made of all layers is checked, not assumed: in the
 * graph that the passes leave, the layers must repeat again, node by node, from few layers after
 * the first to few before the last, and each node must name the state and the line of the script of
 * its own layer. Else the program is not unfolded, and the passes run over the whole one. Passes
 * that compare sums over the whole program weigh its nodes (fold_times). */
#ifndef ML_FOLD_LAYERS_H
#define ML_FOLD_LAYERS_H

#include "runtime/passes/repeats.h"

/* What a state or the origin of a node says: of which layer the node is. */
typedef struct {
    ml_ref node; /* of `from`: where it is in the first period of its region; 0: of no layer */
    int region;
    int64_t layer;
} fold_anchor;

/* Where the new value of an update of `from` is after folding. */
typedef struct {
    int update;    /* of the folded program: itself, or the same one of layer low - 1 */
    int64_t layer; /* of the value; of none: outside of all regions */
    bool inside;   /* of a region */
} fold_update;

typedef struct fold {
    const ml_graph *from;
    ml_roots roots; /* in `from` */
    repeats regions;
    int margin;                    /* layers that stay before and after those that are left out */
    int64_t low, high;             /* layers low .. high-1 are left out */
    fold_anchor *states, *origins; /* by state, by origin: of those that there were */
    uint32_t state_count, origin_count;
    fold_update *updates;
    ml_arena *arena;
} fold;

enum { FOLD_MARGIN = 8 }; /* for passes: layers at the ends that they treat otherwise than others */

/* `from` without most of the layers that repeat, and its roots, whose arrays are of the arena; NULL
 * where there are few. *f refers to `from`. */
ml_graph *fold_layers(const ml_graph *from, ml_roots *roots, int margin, ml_arena *arena, fold *f);
/* How many nodes of the whole program each node of the folded one stands for. NULL where the layers
 * do not repeat: then fold_unfold fails, too. */
const uint32_t *fold_times(const fold *f, const ml_graph *g, ml_arena *arena);
/* g, made of the folded program, with all layers; NULL where its layers do not repeat. */
ml_graph *fold_unfold(const fold *f, const ml_graph *g, ml_roots *roots, ml_arena *arena);

#endif
