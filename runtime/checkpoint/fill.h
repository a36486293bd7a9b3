/* Elements of files into states, by threads.
 *
 * What a tensor of a file gives to this rank's part of a state is a box: extents, with strides in
 * the tensor and in the part, in elements. Boxes are cut into pieces of a few MiB along their
 * largest strides in the tensor, so that a piece is read from as few places as can be. Each thread
 * makes pieces right in the state's memory where the host can write that, else in a buffer of its
 * own from which the device copies: host memory is bounded by the number of threads. Ranges of
 * files are announced to the system some pieces before they are read. */
#ifndef ML_CHECKPOINT_FILL_H
#define ML_CHECKPOINT_FILL_H

#include "runtime/exec/session.h"
#include "runtime/io/file.h"

typedef struct {
    int rank;
    int64_t n[ML_MAX_AXES], s[ML_MAX_AXES], d[ML_MAX_AXES]; /* extents; strides in both */
    int64_t source, target;                                 /* of the first element */
} fill_box;

/* Axes are added in any order; those of the largest stride in the tensor come first. */
void fill_box_add(fill_box *box, int64_t n, int64_t s, int64_t d);
void fill_box_join(fill_box *box); /* axes that are one in both */
int64_t fill_box_elements(const fill_box *box);
int64_t fill_box_span(const fill_box *box, int axis); /* in the tensor, from that axis on */
/* The next index of `rank` axes; false after the last. */
bool fill_next(int rank, const int64_t *n, int64_t *at);

typedef struct {
    uint32_t state;
    int id, width;  /* of the caller; bytes of the state's elements */
    ml_dtype dtype; /* of the caller */
    fill_box box;
    const ml_file *file; /* the tensor: its first byte, and bytes of its elements */
    int64_t at;
    int read_width;
} fill_item;

enum { FILL_READ, FILL_HASH, FILL_CONVERT, FILL_COPY, FILL_KINDS };
typedef struct {
    char *scratch;
    double seconds[FILL_KINDS], since;
} fill_thread;
/* The time since the last lap was of this kind. */
void fill_lap(fill_thread *thread, int kind);

/* Put the elements of a piece to `to`, where strides are piece->d; piece->target says nothing. On
 * any thread. */
typedef ml_status fill_make(void *context, const fill_item *item, const fill_box *piece, char *to,
                            fill_thread *thread);
enum { FILL_PIECE = 4 << 20 }; /* bytes of a piece at most */

typedef struct {
    int threads;
    int64_t bytes, placed, buffers;    /* read; in states; of all threads' buffers */
    int64_t resident;                  /* the process's peak before */
    double began, seconds[FILL_KINDS]; /* of all threads together */
} fill_times;

/* The states of the list have memory and no value from begin to end; what reads one meanwhile, or
 * after a failure, fails. What no item fills is 0. */
ml_status fill_begin(ml_session *session, const uint32_t *states, int count, const fill_item *items,
                     int item_count);
ml_status fill_run(ml_session *session, const fill_item *items, int count, int64_t scratch,
                   fill_make *make, void *context, fill_times *times);
void fill_end(ml_session *session, const uint32_t *states, int count);
/* At MLUA_DEBUG=1 a line that says where the time went. */
void fill_report(const ml_session *session, const char *path, const fill_times *times);

#endif
