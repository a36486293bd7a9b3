/* What placement_rows.c, placement_make.c and placement_slots.c share: a step's plan in the making.
 */
#ifndef ML_PLACEMENT_INTERNAL_H
#define ML_PLACEMENT_INTERNAL_H

#include "runtime/data/placement.h"

/* A sequence: in descending order of lengths. */
typedef struct {
    ml_sequence sequence;
    int group;        /* the least that it needs */
    uint32_t shorter; /* the next one that may be free; itself while it is free */
} candidate;

typedef struct {
    ml_arena *arena;
    const ml_placement_costs *costs;
    ml_step_placement *out;
    candidate *all;
    uint32_t count;
    int longer; /* rows of larger groups may be so many lengths longer than they need to be */
} planner;

/* Ranks or groups, the least loaded one first. */
typedef struct {
    int64_t *heap, count;
    double *seconds; /* by number */
} loads;
void loads_sift(loads *l, int64_t at);

/* The shortest row of a group with room for so many tokens. */
int row_for(const ml_group_cost *group, int64_t tokens);
/* A microbatch is made row by row: begin, then for each of its rows row_begin and the sequences of
 * that row, then its seconds. Its row length is raised to what the longest row needs. */
ml_microbatch *microbatch_begin(planner *p, int group, int64_t rank);
void row_begin(planner *p);
void row_append(planner *p, ml_microbatch *m, uint32_t sequence);
void microbatch_end(planner *p, ml_microbatch *m);
/* A microbatch of the next sequences from `i` on that need groups of size number g, each on a row
 * with free short ones behind it; *made: NULL where there are none. Returns where to go on. */
uint32_t long_rows(planner *p, int g, uint32_t i, ml_microbatch **made);
void ranks_load(planner *p, const ml_microbatch *m);

/* ---- placement_slots.c */
void place_in_slots(planner *p);

#endif
