/* Which bytes of a global tensor a rank holds or writes (checkpoint.h). */
#ifndef ML_CHECKPOINT_PARTS_H
#define ML_CHECKPOINT_PARTS_H

#include "runtime/checkpoint/fill.h"

/* A box of a state: rows [row, row + held[0]) of this rank's part, without what fills it up. */
typedef struct {
    int rank;  /* of the tensor; one without axes has one row of one element */
    int width; /* of an element in bytes */
    int64_t row;
    int64_t size[ML_MAX_AXES], local[ML_MAX_AXES]; /* extents of the whole, and of the part */
    int64_t first[ML_MAX_AXES], held[ML_MAX_AXES]; /* the box, in the whole; held 0: empty */
} checkpoint_box;

/* What this rank holds of a state, or (`owned`) what it writes: disjoint over the ranks. The state
 * is assigned to a stage (session_assign_state). */
ml_status checkpoint_box_of(const ml_session *session, uint32_t state, bool owned,
                            checkpoint_box *box);
int64_t checkpoint_box_bytes(const checkpoint_box *box);
int64_t checkpoint_row_bytes(const checkpoint_box *box); /* of the part's rows, as they lie there */
/* Rows [begin, end) of a box. */
checkpoint_box checkpoint_box_rows(const checkpoint_box *box, int64_t begin, int64_t end);
/* From the whole tensor to the part. */
fill_box checkpoint_box_whole(const checkpoint_box *box);
/* Call `run` for each run of bytes that is contiguous in both: where it is in the whole, and from
 * the part's row box->row on. */
typedef ml_status checkpoint_run(void *context, int64_t whole, int64_t part, int64_t bytes);
ml_status checkpoint_runs(const checkpoint_box *box, checkpoint_run *run, void *context);

/* A box's rows are done in pieces, by the threads of a pool. */
typedef struct {
    int item; /* whose box */
    int64_t begin, end;
} checkpoint_piece;
int64_t checkpoint_pieces(const checkpoint_box *box, int item, checkpoint_piece *pieces);

/* All ranks at once: `status` if it is ML_OK everywhere, else a failure on every rank. */
ml_status checkpoint_together(const ml_session *session, ml_status status, const char *what);
/* Assign to stages, allocate and initialize all states of a list, in its order. */
ml_status checkpoint_prepare(ml_session *session, const uint32_t *states, int count);
/* Sums over all ranks, of numbers that are not negative and small enough. */
ml_status checkpoint_sum(ml_session *session, int64_t *values, int64_t count);

#endif
