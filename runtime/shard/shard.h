/* Sharding: from a program's global graph (gradients included) to the graph of one rank.
 *
 * The result is the same for every rank (its collectives and COORDINATE leaves make the ranks
 * differ), so one plan serves all. States and inputs are placed by the rule; for each other
 * node, in order, and each mesh axis the pass chooses along which axis of the op's index space (all
 * axes of operands and result) the work is cut:
 *   - candidates are the axes that acts lists (for what becomes a gradient or a state, params too),
 *     those along which an operand is split, and "not cut";
 *   - an operand that lacks the chosen axis is needed whole; one that has it is needed split along
 *     it; a result that has it is split, one that sums over it is partial;
 *   - what is split along a listed axis X is gathered only in favour of an axis listed before X, or
 *     of one along which parameters are split; it is exchanged for a split along another listed
 *     axis where no parameter is split along X;
 *   - the cheapest in bytes wins, what it then takes to bring the result to where the rule puts it
 *     included; ties go to the axis listed first.
 * Redistribution between placements: split -> whole all-gather, partial -> whole all-reduce,
 * partial -> split reduce-scatter, split -> other split all-to-all, whole -> split a local slice.
 * Each is made once for a node and placement, except that parameters which the forward pass
 * gathered are gathered again for the backward pass where the layout asks for it. Linear ops
 * keep partial sums partial while nothing else needs them. Products by groups of rows (experts) are
 * followed by elementwise ops on the rows of a rank's own groups (ML_OWNED) until they are summed;
 * where the layout has an `exchange`, the rows of a split batch are sent to their groups' ranks
 * instead (ML_SENT, ragged/moe_dispatch.c). Attention whose queries are cut shares causal work
 * evenly among the ranks (shard_context.c). Results of a program are made whole (the last
 * roots->kept of them stay where the rule puts them); updates get their state's placement. A value
 * that nothing of the above can cut is computed whole on every rank. */
#ifndef ML_SHARD_H
#define ML_SHARD_H

#include "runtime/graph/collectives.h"
#include "runtime/shard/layout.h"

typedef struct {
    int64_t count, bytes; /* of one step; bytes that leave one rank */
} ml_traffic;

/* The local program (roots->outputs may be a new array, of the graph). States and inputs keep
 * their ids; their nodes have local types. Placements can be asked for afterwards through
 * ml_layout_place: of states, of inputs, and of the last roots->kept outputs (as an activation,
 * without a name: what does not divide is whole); other outputs are whole. Raises ML_INVALID for
 * impossible layouts, naming the tensor. */
ml_graph *ml_shard(const ml_graph *from, ml_roots *roots, const ml_layout *layout);
/* times[n]: so many nodes of the program are like node n of `from`, which counts as all of them. */
ml_graph *ml_shard_times(const ml_graph *from, ml_roots *roots, const ml_layout *layout,
                         const uint32_t *times);
/* For people: called for every node of `from` that has a placement of its own, as its op gives it;
 * the outputs of the graph stay there. */
typedef void ml_shard_visitor(void *context, const ml_graph *from, ml_ref n,
                              const ml_placements *at);
ml_graph *ml_shard_report(const ml_graph *from, ml_roots *roots, const ml_layout *layout,
                          ml_shard_visitor *visit, void *context);
/* Bytes that leave one rank for collective n. */
int64_t ml_shard_sent(const ml_graph *g, ml_ref n);
/* What the collectives of a sharded graph move, by mesh axis and kind. */
void ml_shard_traffic(const ml_graph *g, const ml_layout *layout,
                      ml_traffic traffic[ML_MAX_MESH][ML_COLLECTIVE_KINDS]);
/* Cut a rank's part out of a global tensor, and put it back. Elements of `width` bytes. */
void ml_shard_cut(const ml_layout *layout, const ml_type *global, const ml_placements *p,
                  int64_t rank, int width, const void *whole, void *part);
void ml_shard_paste(const ml_layout *layout, const ml_type *global, const ml_placements *p,
                    int64_t rank, int width, const void *part, void *whole);
/* Where the part begins in the whole, and how much of each axis it holds, by axis. */
void ml_shard_range(const ml_layout *layout, const ml_type *global, const ml_placements *p,
                    int64_t rank, int64_t *first, int64_t *held);

#endif
