/* What sequences of a row leave of the work of attention that keeps them apart: its time is
 * proportional to query-key pairs.
 *
 * A sequence is a document as far as it lies in one window of a batch; a row is what a rank, or a
 * group of ranks, computes at once. Rank r of n has blocks r and 2 n - 1 - r of 2 n of a row, so
 * that all have as many pairs of a row that is one causal sequence. */
#ifndef ML_SEQUENCES_H
#define ML_SEQUENCES_H

#include <stdbool.h>
#include <stdint.h>

#include "runtime/base/memory.h"

typedef struct {
    int64_t start, length; /* tokens, of a step's or a sample's rows one after another */
} ml_sequence;

/* Which pairs an attention has of a sequence. */
typedef struct {
    bool causal;
    int64_t window; /* keys that a query sees, itself included; 0: all */
} ml_pair_mask;

/* Pairs of a causal sequence. */
double ml_sequence_pairs(int64_t length);

/* Where the sequence that begins at `from` ends, at `end` at the latest: equal numbers are one. */
int64_t ml_sequence_end(const int32_t *documents, int64_t from, int64_t end);

/* The pairs of the rank that has most of them, of `ranks` that share a row of so many tokens with
 * these sequences, over the mean of the ranks' pairs where the row is one sequence. */
double ml_sequences_share(const ml_sequence *sequence, uint32_t count, int64_t tokens,
                          int64_t ranks, ml_pair_mask mask);

/* Rows of sequences: what a prediction takes a program's rows for. */
typedef struct {
    ml_pair_mask mask;
    int64_t ranks;
    double share;
} ml_known_share;
typedef struct {
    int64_t tokens; /* of a row */
    ML_VEC(ml_sequence) sequence;
    ML_VEC(uint32_t) end; /* of each row: of its sequences */
    ml_known_share known[4];
    int known_count;
} ml_sequence_rows;

/* Of documents[rows][columns]. */
void ml_sequence_rows_read(ml_arena *arena, const int32_t *documents, int64_t rows, int64_t columns,
                           ml_sequence_rows *out);
/* The mean of the rows' shares; 0 where there are none. */
double ml_sequence_rows_share(ml_sequence_rows *rows, int64_t ranks, ml_pair_mask mask);

#endif
