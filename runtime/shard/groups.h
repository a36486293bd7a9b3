/* Groups of ranks, each of which runs a program by itself (layout cp = "dynamic").
 *
 * The ranks along one mesh axis, `of` (dp), form groups of neighbours: of each size of a few. A
 * program of groups of s ranks is the same on all ranks; a group runs it on a microbatch of its
 * own, with no message to another group, while those may run programs of other sizes. Its layout is
 * the session's with 1 rank along `of` and s along a mesh axis that exists for that size alone
 * ("cp2"), over which sequences are split. In the session's layout these axes have the size 1 and
 * come last. A state has the same part on each rank under all these layouts: of a sum of gradients
 * each rank holds a term, which a program of all ranks adds up (layout.h), and parameters are whole
 * along all axes concerned, but for those that ZeRO-1 leaves in parts: a program of groups is
 * sharded as if they were whole, and all ranks gather them for it (optimize/gather_sharded.c).
 *
 * Where parameters are split over `of`, all groups run programs of one size together, as they
 * gather parameters from one another: then there is a mesh axis too for the groups of each size
 * ("dp/2"), which splits what `of` does. Ranks are numbered alike, so that a state that is split
 * over both has the part on each rank that it has over `of`. */
#ifndef ML_SHARD_GROUPS_H
#define ML_SHARD_GROUPS_H

#include "runtime/shard/layout.h"

typedef struct {
    int of;        /* the mesh axis whose ranks form groups */
    bool together; /* all groups run a program at once */
    int first;     /* the first of the mesh axes that are of groups; others follow */
    int count;     /* of these axes; 0: no groups */
    /* Of each: its ranks in programs of groups of `group` ranks, and the step along `of` from one
     * to the next. */
    int64_t group[ML_MAX_MESH], size[ML_MAX_MESH], step[ML_MAX_MESH];
} ml_groups;

/* Ranks in a row: how many, which of them one is, and the step from a rank to the next. */
typedef struct {
    int64_t size, at, step;
} ml_row;

/* The ranks that share a collective with `rank` over mesh axis i: those that differ from it along i
 * alone, or, where i is of groups, those of its group. groups: NULL, or those of the layout. */
ml_row ml_groups_row(const ml_layout *layout, const ml_groups *groups, int64_t rank, int i);
/* The layout of programs of groups of `size` ranks; false where there are no such groups. Size 1 is
 * always one. */
bool ml_groups_layout(const ml_layout *layout, const ml_groups *groups, int64_t size,
                      ml_layout *out);
/* The number that `rank` has among the ranks of that layout. */
int64_t ml_groups_rank(const ml_layout *layout, const ml_groups *groups, int64_t rank,
                       const ml_layout *of_group);

#endif
