#ifdef MLUA_CUDA
/* Reading memory of the GPU from a thread of one's own, beside the runs: a stream and pinned
 * buffers that nothing else uses. */
#include <string.h>
#include <time.h>

#include "runtime/device/cuda/cuda_internal.h"

enum { BUFFERS = 2 };

struct cuda_fetch {
    CUstream stream;
    CUevent marked; /* on the device's stream */
    char *buffer[BUFFERS];
    CUevent filled[BUFFERS];
};

static ml_status fetch_open(cuda_device *d) {
    struct cuda_fetch *f = d->fetch = ml_alloc(sizeof *f);
    if (!f) return ml_fail(ML_NO_MEMORY, "no memory for reading the GPU's");
    CUDA_TRY(cuStreamCreate(&f->stream, CU_STREAM_NON_BLOCKING));
    CUDA_TRY(cuEventCreate(&f->marked, CU_EVENT_DISABLE_TIMING));
    for (int i = 0; i < BUFFERS; i++) {
        CUDA_TRY(cuMemAllocHost((void **)&f->buffer[i], CUDA_PINNED_BYTES));
        CUDA_TRY(cuEventCreate(&f->filled[i], CU_EVENT_DISABLE_TIMING));
    }
    return ML_OK;
}

void cuda_fetch_close(cuda_device *d) {
    struct cuda_fetch *f = d->fetch;
    if (!f) return;
    for (int i = 0; i < BUFFERS; i++) {
        if (f->filled[i]) CUDA_OK(cuEventDestroy(f->filled[i]));
        if (f->buffer[i]) CUDA_OK(cuMemFreeHost(f->buffer[i]));
    }
    if (f->marked) CUDA_OK(cuEventDestroy(f->marked));
    if (f->stream) CUDA_OK(cuStreamDestroy(f->stream));
    ml_free(f);
    d->fetch = NULL;
}

ml_status cuda_mark(ml_device *device) {
    cuda_device *d = (cuda_device *)device;
    ml_status status = d->fetch ? ML_OK : fetch_open(d);
    if (status != ML_OK) {
        ml_error error = *ml_error_last();
        cuda_fetch_close(d);
        *ml_error_last() = error;
        return status;
    }
    return CUDA_OK(cuEventRecord(d->fetch->marked, d->stream));
}

/* What is on the device's stream before the mark may wait for a rank that has failed. */
static ml_status await(const cuda_device *d, CUevent event) {
    ml_comm *comm = d->others ? d->base.ranks->comm : NULL;
    CUresult result;
    for (int64_t turn = 1; (result = cuda.cuEventQuery(event)) == CUDA_ERROR_NOT_READY; turn++) {
        if (comm && turn % 1000 == 0) ML_TRY(ml_comm_check(comm));
        nanosleep(&(struct timespec){.tv_nsec = 50000}, NULL);
    }
    return result == CUDA_SUCCESS ? ML_OK : cuda_fail(result, "cuEventQuery");
}

/* One buffer is copied out while the other one is filled. */
ml_status cuda_fetch_memory(ml_device *device, void *to, const void *from, int64_t bytes) {
    cuda_device *d = (cuda_device *)device;
    struct cuda_fetch *f = d->fetch;
    const CUdeviceptr source = (CUdeviceptr)(uintptr_t)from;
    const int64_t parts = (bytes + CUDA_PINNED_BYTES - 1) / CUDA_PINNED_BYTES;
    CUDA_TRY(cuCtxSetCurrent(d->context));
    CUDA_TRY(cuStreamWaitEvent(f->stream, f->marked, 0));
    for (int64_t part = 0; part <= parts; part++) {
        const int slot = (int)(part % BUFFERS);
        const int64_t at = part * CUDA_PINNED_BYTES, left = bytes - at;
        if (part < parts) {
            const size_t size = (size_t)(left < CUDA_PINNED_BYTES ? left : CUDA_PINNED_BYTES);
            CUDA_TRY(cuMemcpyDtoHAsync(f->buffer[slot], source + (size_t)at, size, f->stream));
            CUDA_TRY(cuEventRecord(f->filled[slot], f->stream));
        }
        if (part == 0) continue;
        const int64_t before = at - CUDA_PINNED_BYTES, size = bytes - before;
        ML_TRY(await(d, f->filled[1 - slot]));
        memcpy((char *)to + before, f->buffer[1 - slot],
               (size_t)(size < CUDA_PINNED_BYTES ? size : CUDA_PINNED_BYTES));
    }
    return ML_OK;
}
#endif
