/* Which ranks compute which sequences of a step (layout cp = "dynamic").
 *
 * A sequence is a document as far as it lies in one window of the batch. The ranks form groups of
 * neighbours: of 1, 2, 4, ... A microbatch is a row of tokens that one group computes, each of its
 * ranks a part of the row (under expert parallelism: `batch` rows, one for each rank of that mesh
 * axis); a row is as long as one of a few programs, and filled up at its end. A sequence gets the
 * smallest group whose longest row holds it, with at most `most` tokens of it for each rank, and
 * without slots whose ranks take no longer for it than an even share of the step; or a larger one,
 * where whole plans show that this evens out the ranks. Sequences of larger groups come first, as
 * many on a row as it holds, each row in the group that is free first, with short sequences in what
 * is left of it; where there are several of them for each group, they are a microbatch of several
 * rows, which reads the weights once. Then come the others, longest first, to the rank with the
 * least work, which are exchanged in the end while that makes the busiest rank faster. Work is the
 * time of the row's program, of its attention that of the query-key pairs of its sequences.
 *
 * The result follows from the lengths and the costs alone. The microbatches of a rank are in the
 * order of the plan, and so are those of each group: ranks never wait in a circle.
 *
 * Pipeline stages take the microbatches of a step in one order on all ranks (`slots`,
 * placement_slots.c): then each rank has one microbatch in each slot, and the rows of a slot take
 * about as long as one another. Where parameters are split over the ranks (`together`), all run the
 * same program at once: a microbatch then has the rows of all groups of one size. */
#ifndef ML_PLACEMENT_H
#define ML_PLACEMENT_H

#include <stdbool.h>

#include "runtime/base/memory.h"
#include "runtime/base/sequences.h"

enum { ML_GROUP_SIZES = 8, ML_ROW_SIZES = 24 };

/* A program of a group: tokens of each rank of a row, seconds of a run where each row is one causal
 * sequence, and those of them that follow query-key pairs (base/sequences.h). */
typedef struct {
    int64_t tokens;
    double seconds, attention;
    int rows; /* of a microbatch, times `batch`; 0 is 1 */
} ml_row_cost;
typedef struct {
    int64_t ranks;
    int count;   /* of programs of one row, shortest first */
    int several; /* behind them: of more rows, the fewest first, each as long as the longest one */
    ml_row_cost row[ML_ROW_SIZES];
} ml_group_cost;
typedef struct {
    int64_t ranks;
    int64_t most; /* a sequence of more tokens for each rank is for a larger group; 0: a row's */
    int count;    /* of group sizes, ascending from 1; each divides the next, and all the ranks */
    ml_group_cost group[ML_GROUP_SIZES];
    int batch;     /* rows of a microbatch; 0 is 1 */
    int slots;     /* the number of slots is a multiple of this; 0: there are none */
    bool together; /* all groups compute a microbatch at once, each `batch` rows of it */
} ml_placement_costs;

typedef struct {
    uint32_t first, sequences; /* in ml_step_placement.sequence */
} ml_placed_row;
typedef struct {
    int group, row;     /* positions in the costs */
    int slot;           /* where there are slots */
    int64_t rank;       /* the first of the group */
    uint32_t first_row; /* of ml_placement_rows in ml_step_placement.rows */
    double seconds;
} ml_microbatch;

/* All of it lives in the arena. */
typedef struct {
    ml_sequence *sequence; /* in the order of microbatches */
    uint32_t sequences;
    ML_VEC(ml_placed_row) rows;
    ML_VEC(ml_microbatch) microbatches; /* where there are slots, by slot and rank */
    double *seconds;                    /* of each rank */
    int64_t tokens, computed; /* of the step; with what fills rows up, summed over ranks */
    int slots;
} ml_step_placement;

/* documents[row][column]: equal numbers in a row are one document. Raises where a sequence fits on
 * no row. */
void ml_placement_make(ml_arena *arena, const ml_placement_costs *costs, const int32_t *documents,
                       int64_t rows, int64_t columns, ml_step_placement *out);

/* The rows of a microbatch by program number `row` of groups of size number g. */
int64_t ml_placement_rows(const ml_placement_costs *costs, int g, int row);

/* Of a step's tokens and of a microbatch's row alike. */
typedef struct {
    int32_t *tokens, *targets, *documents, *positions;
    int64_t length; /* of a row: of the step's, a window */
} ml_token_rows;
/* Write a microbatch's rows, so many of them. What fills them up counts in no loss: documents of
 * their own with negative numbers, as short as attention skips at once and no longer than a window,
 * whose positions a table may have rows for. m: the microbatch, or NULL; then all is filled up. */
void ml_placement_fill(const ml_step_placement *p, const ml_microbatch *m,
                       const ml_token_rows *from, int64_t rows, const ml_token_rows *to);

#endif
