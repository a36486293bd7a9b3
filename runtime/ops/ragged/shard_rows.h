/* Inside of sharding products by groups: rows of groups, and how they are sent to the groups'
 * ranks. */
#ifndef ML_RAGGED_SHARD_ROWS_H
#define ML_RAGGED_SHARD_ROWS_H

#include "runtime/shard/shard_internal.h"

/* How rows of groups are sent over one mesh axis, in nodes of the local graph. */
typedef struct {
    ml_ref owner[2];
    int mesh;
    ml_placements bounds; /* of the owner, before */
    ml_ref index;         /* i32 {peer, slot}: which of this rank's rows is sent there; -1: none */
    ml_ref slot;          /* i32 {batch, rows}: to which place of all it went; -1: none was left */
    ml_ref starts, ends;  /* i32 {batch, groups}: of this rank's groups among what is received */
} shard_exchange;

/* ---- moe_dispatch.c ---- */
/* Proposes ML_SENT rows over s->mesh: for products by groups, and for what elementwise ops, sums
 * and maxima make of them. */
void rows_propose_sent(sharder *s, ml_ref n);
/* The exchange of values of this owner that are placed so, with ML_SENT over mesh axis i. */
const shard_exchange *rows_exchange(sharder *s, ml_ref n, const ml_placements *at, int i);
ml_ref rows_send(sharder *s, ml_ref n, ml_ref node, const ml_placements *at);
ml_ref rows_bring_back(sharder *s, ml_ref n, ml_ref node, const ml_placements *at);
ml_ref rows_own(sharder *s, ml_ref n, ml_ref node, const ml_placements *at);
ml_ref rows_overflows(sharder *s);
ml_ref rows_unless(sharder *s, ml_ref overflows, const ml_update *update, ml_ref value);

/* ---- shard.c: more of the interfaces ---- */
bool ragged_feasible(const sharder *s, ml_ref n, const shard_strategy *strategy,
                     const ml_placements *need);
void ragged_placed(sharder *s, ml_ref n, const ml_placements *need, const ml_placements *out,
                   ml_ref local);
const ml_ref *ragged_row_bounds(const ml_graph *g, ml_ref n);

#endif
