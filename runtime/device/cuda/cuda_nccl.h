/* NCCL: collectives between the GPUs of a job, one process a GPU; opened with dlopen on first use.
 *
 * One communicator serves each mesh axis, created by splitting that of all ranks. cuda_nccl_join
 * starts to connect and returns; what needs the communicators waits in cuda_nccl_ready. Every
 * communicator has its stream for what runs beside the device's own stream. All ranks
 * put the same collectives on the same streams in the same order. Where several communicators are,
 * NCCL is set to preserve the order of calls between communicators (NCCL_LAUNCH_ORDER_IMPLICIT), or
 * two of them could wait for one another; where it cannot, and under pipeline stages, whose
 * messages must not delay others, one stream serves all.
 *
 * Sums of bf16 round at every rank they pass; MAX and MIN leave NaN out where another rank has a
 * number (between CPU ranks it stays: comm.h). A SUM of booleans is "any".
 *
 * A failure of another rank or of NCCL itself aborts the communicators: their kernels end, and all
 * that follows fails. */
#ifndef ML_CUDA_NCCL_H
#define ML_CUDA_NCCL_H
#ifdef MLUA_CUDA

#include "runtime/device/cuda/cuda_internal.h"

/* All ranks at once, with device->ranks set. */
ml_status cuda_nccl_join(ml_device *device);
/* Until the communicators are there. */
ml_status cuda_nccl_ready(cuda_device *device);
/* For cuda_ranks.c. Whether the communicators are there; whether they can be aborted now. */
bool cuda_nccl_connected(const cuda_device *device);
bool cuda_nccl_aborts(const cuda_device *device);
void cuda_nccl_abort(cuda_device *device);
/* Errors of running collectives, and the failure of another rank. */
ml_status cuda_nccl_errors(cuda_device *device);
/* Ends the thread that connects. False where it does not end, as where another rank has ended: it
 * uses the device and its context, which must stay until the process ends. */
bool cuda_nccl_end_connecting(cuda_device *device);
void cuda_nccl_destroy(cuda_device *device); /* the communicators; graphs are destroyed before */
void cuda_nccl_close(cuda_device *device);
ml_status cuda_nccl_stream(CUstream *stream); /* of its own: for what others wait for */
CUstream cuda_nccl_axis_stream(cuda_device *device, int mesh_axis);

/* A collective on a stream, between begin and end: those of one group become one launch. */
ml_status cuda_nccl_begin(void);
ml_status cuda_nccl_enqueue(cuda_device *device, const ml_collective_step *step, const void *from,
                            void *to, CUstream stream);
ml_status cuda_nccl_end(void);

/* A communicator of two ranks. It is valid until cuda_nccl_close. */
typedef struct cuda_pair {
    struct cuda_pair *next;
    struct ncclComm *comm; /* NULL once aborted */
    int end;               /* 0 or 1 */
} cuda_pair;
/* All ranks at once, each for one pair at most: the two ends give the same color, end 0 will send
 * and end 1 receive; pair is NULL on ranks that are no end. Both ends are connected then. */
ml_status cuda_pair_new(cuda_device *device, int color, int end, CUstream stream, cuda_pair *pair);
ml_status cuda_pair_send(const cuda_pair *pair, const void *memory, int64_t bytes, CUstream stream);
ml_status cuda_pair_receive(const cuda_pair *pair, void *memory, int64_t bytes, CUstream stream);

/* An all-gather or all-reduce of host memory; waits. */
ml_status cuda_nccl_collect(ml_device *device, const ml_collective_step *step, const void *from,
                            void *to);

#endif
#endif
