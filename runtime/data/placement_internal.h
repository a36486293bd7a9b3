/* What placement_make.c, placement_rows.c, placement_alone.c and placement_slots.c share: a step's
 * plan in the making. */
#ifndef ML_PLACEMENT_INTERNAL_H
#define ML_PLACEMENT_INTERNAL_H

#include "runtime/data/placement.h"

/* A sequence: in descending order of lengths. */
typedef struct {
    ml_sequence sequence;
    int group;     /* the size of groups that it needs */
    uint32_t next; /* of those that need groups, on its row: 1 + its number; 0: none */
} candidate;

typedef struct {
    int halved;  /* a rank computes at most half, a quarter ... of its longest row of a sequence */
    int longer;  /* rows of larger groups may be so many lengths longer than they need to be */
    bool apart;  /* each of them has one sequence that needs the group, else as many as it holds */
    bool single; /* a microbatch of larger groups has one row */
} choices;

typedef struct {
    ml_arena *arena;
    const ml_placement_costs *costs;
    ml_step_placement *out;
    candidate *all;
    uint32_t count;
    uint32_t end[ML_GROUP_SIZES + 1]; /* of the sequences that need groups of this size or larger */
    /* By sequence: the next one that may be free, itself while it is free. Of those of one rank;
     * of those that need larger groups. */
    uint32_t *alone, *grouped;
    choices choices;
    bool even; /* even the ranks out in the end */
} planner;

/* Ranks or groups, the least loaded one first. */
typedef struct {
    int64_t *heap, count;
    double *seconds; /* by number */
} loads;
void loads_sift(loads *l, int64_t at);
/* Of groups of so many ranks. */
loads loads_of(planner *p, int64_t ranks);

/* Seconds of a sequence on a row of one rank: those by its tokens, and by its query-key pairs. */
typedef struct {
    double linear, quadratic;
} work_rate;
work_rate work_rate_of(const ml_placement_costs *costs);
double work_of(work_rate rate, int64_t length);

/* A row's seconds where its sequences have this share of the pairs of one that fills it. */
double row_seconds(const ml_row_cost *row, double share);

/* How many rows a microbatch by program number `row` has for each rank of ep, and each group where
 * all run it at once. */
int64_t rows_side_by_side(const ml_placement_costs *costs, int g, int row);

const ml_row_cost *longest_row(const ml_group_cost *group);
/* The shortest row of a group with room for so many tokens. */
int row_for(const ml_group_cost *group, int64_t tokens);
/* A microbatch is made row by row: begin, then for each of its rows row_begin and the sequences of
 * that row, then its seconds. Its row length is raised to what the longest row needs. */
ml_microbatch *microbatch_begin(planner *p, int group, int64_t rank);
void row_begin(planner *p);
void row_append(planner *p, ml_microbatch *m, uint32_t sequence);
void microbatch_end(planner *p, ml_microbatch *m);
/* A microbatch of up to `rows` rows (times those of ep) of sequences that need groups of size
 * number g and are in none yet, with free short ones behind them; NULL where there are none. */
ml_microbatch *long_rows(planner *p, int g, int64_t rows);
void ranks_load(planner *p, const ml_microbatch *m);

/* ---- placement_alone.c */
/* Each sequence that is in no microbatch yet to one rank. */
void place_alone(planner *p);
/* The sequences, longest first, on rows of this rank. */
void pack_alone(planner *p, int64_t rank, const uint32_t *list, uint32_t count);

/* ---- placement_slots.c */
void place_in_slots(planner *p);

#endif
