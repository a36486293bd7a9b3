/* Collectives between the GPUs of one host by their copy engines, beside computation: what has a
 * ticket, gathers or adds up, and is in memory that each GPU can read. NCCL's kernels
 * would take multiprocessors from the computation, and wait for them behind it.
 *
 * Each rank copies what it needs out of the others' memory, which was opened when the executable
 * was bound (CUDA IPC): the pieces of a gathered tensor to their places; those of its part of a sum
 * to a buffer, where a kernel adds them up in the order of ranks. For a group of collectives, on
 * its axis' stream:
 *   1. report to all others that what they will read is ready (a word in their memory becomes 1);
 *   2. from each other one, once it has reported so too: copy; then report that it was read;
 *   3. wait until all others have read.
 * A word becomes 0 again when it was waited for, before its writer gets a further report, so that a
 * CUDA graph of all this can be run again.
 *
 * Every mesh axis has its own group of ranks, stream, streams, words and buffer, so that groups of
 * several axes go on beside one another. None waits for ever: all ranks put the groups of an
 * executable on their streams in the same order, whatever the axis; on a rank, what is on a stream
 * waits only for what was put there before; and between ranks, only for what the same group has
 * reported before it waits itself. So the first group that is not over can continue on all ranks,
 * even where the GPU works off all streams one after the other. Pieces of pipeline stages are in no
 * such order, and may be bound while messages are under way: their collectives are NCCL's, as those
 * of axes that cross hosts are. All ranks of a program choose alike, step by step, since replicas
 * of a sum must not be added up in two orders.
 *
 *   cuda_ce_collectives.c  which collectives; memory of other ranks: opened, closed, given up
 *   cuda_ce_enqueue.c   groups of collectives, and the kernel that adds up */
#ifndef ML_CUDA_CE_COLLECTIVES_H
#define ML_CUDA_CE_COLLECTIVES_H
#ifdef MLUA_CUDA

#include <pthread.h>

#include "runtime/device/cuda/cuda_ipc.h"
#include "runtime/device/cuda/cuda_nccl.h"

enum {
    CE_RANKS = 16,  /* along an axis, at most */
    CE_STREAMS = 8, /* that copy at the same time, at most */
    CE_WORD_BYTES = 32, /* of what one rank reports to another: apart from the next */
    CE_HALVES = 2,  /* of the buffer: one is filled while the other is added up */
    CE_SEGMENTS = 512
};

/* Where the others' operand of a collective is, by rank along the axis. */
struct cuda_ce_step {
    CUdeviceptr from[CE_RANKS];
};

/* A part of a collective that adds up, in the buffer. */
typedef struct {
    const cuda_step *step;
    int64_t begin, count; /* elements of the result */
    int64_t offset;       /* bytes, in each rank's part of the buffer */
} cuda_segment;

typedef struct {
    bool connected, able;
    int ranks, at;                 /* along the axis, and this one's place */
    CUdeviceptr words[CE_RANKS]; /* each rank's of this axis; this one's at its place */
    void *buffer;
    int64_t buffer_bytes;
    int stream_count;
    CUstream streams[CE_STREAMS];
    CUevent begun, copied[CE_STREAMS], added[CE_HALVES];
} cuda_ce_axis;

typedef struct cuda_ce_state {
    cuda_ce_axis axis[ML_MAX_MESH];
    void *words; /* this rank's, of all axes */
    bool aborted, letting_go;
    _Atomic bool ended; /* nothing waits any more */
    pthread_t thread;  /* that lets go */
    CUstream escape;
    CUmodule module;
    CUfunction sum[ML_DTYPE_COUNT];
    uint32_t segment_count; /* of the round that is put on streams */
    cuda_segment segments[CE_SEGMENTS];
} cuda_ce_state;

/* Bytes of a device with so many that copies take beside the plans' memory. */
int64_t cuda_ce_reserve(const cuda_device *device);
/* All ranks along the axes of the executable's collectives, once its pointers are known: choose the
 * steps that go this way. Exchanges addresses where any may. */
ml_status cuda_ce_bind(ml_executable *executable);
void cuda_ce_unbind(ml_executable *executable); /* closes what no executable uses any more */
/* Those of `count` collectives of a group that have a `ce`. */
ml_status cuda_ce_enqueue(ml_executable *executable, const cuda_step *steps, uint32_t count,
                            CUstream stream);
/* Closes what executables have opened, on all ranks that copy from one another. */
ml_status cuda_ce_forget(ml_device *device);
/* Another rank has failed: from begin on nothing waits for others; end waits until all is over. */
void cuda_ce_abort_begin(cuda_device *device);
void cuda_ce_abort_end(cuda_device *device);
void cuda_ce_close(cuda_device *device);

/* Between the two files. */
ml_status cuda_ce_load(cuda_device *device); /* the kernels */
bool cuda_ce_adds(ml_dtype dtype);           /* there is a kernel for it */

#endif
#endif
