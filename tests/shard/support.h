/* What the tests of sharding share: a program, whole by ml_reference and on all ranks of a layout
 * by ml_shard and shard_run_ranks, must give the same. */
#ifndef SHARD_SUPPORT_H
#define SHARD_SUPPORT_H

#include "runtime/shard/shard.h"
#include "tests/passes/support.h"

/* "dp2 acts batch seq params embed flat; tp4 acts heads": mesh axes, outermost first. */
ml_layout shard_layout(fixture *f, const char *text);
/* The same in words, for messages. */
const char *shard_layout_text(fixture *f, const ml_layout *layout);
/* The sharded program (the caller frees it); *roots is rewritten. */
ml_graph *shard_program(fixture *f, const ml_layout *layout, const ml_roots *roots,
                        ml_roots *local);
/* Outputs and updates are the same under this layout, within `tolerance` of the largest element;
 * false where they are not. With `passes`, also after the passes of a plan. */
bool shard_check(fixture *f, const ml_layout *layout, const ml_roots *roots, double tolerance,
                 bool passes);
/* y, its gradients and states that these move, under layouts drawn from these axes (8 at most are
 * drawn from); how many of them were possible. */
int shard_check_drawn(fixture *f, ml_ref y, const char *names, int draws);
/* y, its loss and gradients, sums of gradients, and states that these move; some outputs are kept.
 */
ml_roots shard_roots(fixture *f, ml_ref y);
/* The largest difference, relative to the largest number that is expected. */
double shard_difference(const double *actual, const double *expected, int64_t count);
/* Collectives of one kind over mesh axis i. */
int64_t shard_count(const ml_graph *g, const ml_layout *layout, int i, ml_collective kind);

/* all_ranks.c: the reference interpreter for all ranks of a layout at once, collectives included:
 * checks the pass with no processes. states[rank][id], inputs[rank][id] are local; results[rank][i]
 * for nodes[i]. */
void shard_run_ranks(const ml_graph *g, const ml_layout *layout, double ***states, double ***inputs,
                     const ml_ref *nodes, int count, double ***results, ml_arena *arena);

#endif
