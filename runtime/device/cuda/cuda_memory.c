#ifdef MLUA_CUDA
/* Memory of the GPU, transfers, and waiting for what is on its streams. */
#include <string.h>
#include <time.h>

#include "runtime/base/clock.h"
#include "runtime/device/cuda/cuda_internal.h"

static cuda_device *cuda_of(ml_device *device) {
    return (cuda_device *)device;
}

/* ---- Waiting --------------------------------------------------------------------------------- */
static CUresult query(const cuda_device *d, CUevent event) {
    return event ? cuda.cuEventQuery(event) : cuda.cuStreamQuery(d->stream);
}

/* Collectives on the stream do not end when another rank has failed. Short waits spin. */
static ml_status wait_with_others(cuda_device *d, CUevent event) {
    static const double SPIN = 1e-4, LOOK = 0.1; /* seconds */
    const struct timespec nap = {.tv_nsec = 50000};
    ml_comm *comm = d->base.ranks->comm;
    double start = ml_clock_now(), looked = 0;
    ml_status status = ML_OK;
    CUresult result;
    while ((result = query(d, event)) == CUDA_ERROR_NOT_READY && status == ML_OK) {
        double now = ml_clock_now();
        if (now - start < SPIN) continue;
        if (now - looked >= LOOK) {
            status = ml_comm_waiting(comm, looked == 0 ? 0 : now - looked);
            if (status == ML_OK && looked != 0) status = d->others->check(d);
            looked = now;
        }
        nanosleep(&nap, NULL);
    }
    if (looked != 0) ml_comm_waited(comm);
    if (status != ML_OK) {
        ml_error error = *ml_error_last();
        d->others->give_up(d);
        *ml_error_last() = error;
        return status;
    }
    return result == CUDA_SUCCESS ? ML_OK
                                  : cuda_fail(result, event ? "cuEventQuery" : "cuStreamQuery");
}

ml_status cuda_wait_for(cuda_device *d, CUevent event) {
    if (d->others) return wait_with_others(d, event);
    return event ? CUDA_OK(cuEventSynchronize(event)) : CUDA_OK(cuStreamSynchronize(d->stream));
}

/* ---- Memory ---------------------------------------------------------------------------------- */
static const size_t ASIDE_LEAVES = (size_t)2 << 30; /* free, else memory is not set aside */

static ml_status memory_failed(cuda_device *d, CUresult result, int64_t bytes, const char *what) {
    size_t free_bytes = 0, total = 0;
    if (result != CUDA_ERROR_OUT_OF_MEMORY) return cuda_fail(result, "cuMemAlloc");
    CUDA_OK(cuMemGetInfo(&free_bytes, &total));
    ml_fail(ML_NO_MEMORY, "no GPU memory for %s: %.2f GiB are wanted and %.2f of %.2f GiB are free",
            what, (double)bytes / (1 << 30), (double)free_bytes / (1 << 30),
            (double)total / (1 << 30));
    return ml_help("%.2f GiB are taken by this run; other programs on this GPU may hold the rest",
                   (double)d->base.current_bytes / (1 << 30));
}

static void account(cuda_device *d, int64_t bytes) {
    d->base.current_bytes += bytes;
    if (d->base.peak_bytes < d->base.current_bytes) d->base.peak_bytes = d->base.current_bytes;
}

bool cuda_reclaim(cuda_device *d) {
    if (!d->aside.memory) return false;
    CUDA_OK(cuMemFree((CUdeviceptr)(uintptr_t)d->aside.memory));
    d->aside.memory = NULL;
    return true;
}

CUresult cuda_take(cuda_device *d, CUdeviceptr *address, int64_t bytes) {
    CUresult result = cuda.cuMemAlloc(address, (size_t)bytes);
    if (result == CUDA_ERROR_OUT_OF_MEMORY && cuda_reclaim(d))
        result = cuda.cuMemAlloc(address, (size_t)bytes);
    return result;
}

ml_status cuda_allocate(ml_device *device, int64_t bytes, void **memory) {
    cuda_device *d = cuda_of(device);
    CUdeviceptr address = 0;
    *memory = NULL;
    if (d->block_count == d->block_capacity) {
        uint32_t capacity = 2 * d->block_capacity + 16;
        void *blocks = ml_realloc(d->blocks, d->block_capacity * sizeof *d->blocks,
                                  capacity * sizeof *d->blocks);
        if (!blocks) return ml_fail(ML_NO_MEMORY, "no memory for the CUDA device's accounts");
        d->blocks = blocks;
        d->block_capacity = capacity;
    }
    if (d->aside.memory && d->aside.bytes == bytes) {
        *memory = d->aside.memory;
        d->aside.memory = NULL;
    } else {
        CUresult result = cuda_take(d, &address, bytes > 0 ? bytes : 256);
        if (result != CUDA_SUCCESS) return memory_failed(d, result, bytes, "the program");
        *memory = (void *)(uintptr_t)address;
    }
    d->blocks[d->block_count++] = (struct cuda_block){*memory, bytes, ++d->block_serial};
    account(d, bytes);
    return ML_OK;
}

/* Memory leaves the accounts; its bytes. */
static int64_t forget_block(cuda_device *d, const void *memory) {
    for (uint32_t i = d->block_count; i-- > 0;)
        if (d->blocks[i].memory == memory) {
            const int64_t bytes = d->blocks[i].bytes;
            account(d, -bytes);
            d->blocks[i] = d->blocks[--d->block_count];
            return bytes;
        }
    return 0;
}

void cuda_release(ml_device *device, void *memory) {
    cuda_device *d = cuda_of(device);
    if (!memory) return;
    cuda_wait_for(d, NULL);
    CUDA_OK(cuMemFree((CUdeviceptr)(uintptr_t)memory));
    forget_block(d, memory);
}

/* Modules, communicators and libraries allocate by themselves, and cannot reclaim. */
void cuda_set_aside(ml_device *device, void *memory) {
    cuda_device *d = cuda_of(device);
    size_t free_bytes = 0, total = 0;
    cuda_reclaim(d);
    d->aside = (struct cuda_block){memory, forget_block(d, memory), 0};
    if (cuda.cuMemGetInfo(&free_bytes, &total) != CUDA_SUCCESS || free_bytes < ASIDE_LEAVES)
        cuda_reclaim(d);
}

ml_status cuda_workspace(cuda_device *d, int64_t bytes) {
    if (bytes <= d->workspace_bytes) return ML_OK;
    if (d->workspace) {
        ML_TRY(cuda_wait_for(d, NULL));
        CUDA_TRY(cuMemFree(d->workspace));
        account(d, -d->workspace_bytes);
    }
    d->workspace = 0;
    d->workspace_bytes = 0;
    d->workspace_generation++;
    CUresult result = cuda_take(d, &d->workspace, bytes);
    if (result != CUDA_SUCCESS) return memory_failed(d, result, bytes, "the libraries' workspace");
    d->workspace_bytes = bytes;
    account(d, bytes);
    return ML_OK;
}

/* ---- Transfers ------------------------------------------------------------------------------- */
/* The next pinned buffer, once the transfer that used it last is over. */
static ml_status take_pinned(cuda_device *d, int *slot) {
    *slot = d->pinned_next;
    d->pinned_next = (d->pinned_next + 1) % CUDA_PINNED;
    ML_TRY(cuda_wait_for(d, d->pinned_event[*slot]));
    return ML_OK;
}

ml_status cuda_copy(ml_device *device, void *to, const void *from, int64_t bytes) {
    cuda_device *d = cuda_of(device);
    if (bytes == 0) return ML_OK;
    CUDA_TRY(cuMemcpyDtoDAsync((CUdeviceptr)(uintptr_t)to, (CUdeviceptr)(uintptr_t)from,
                               (size_t)bytes, d->stream));
    return ML_OK;
}

ml_status cuda_upload(ml_device *device, void *to, const void *from, int64_t bytes) {
    cuda_device *d = cuda_of(device);
    for (int64_t at = 0; at < bytes; at += CUDA_PINNED_BYTES) {
        size_t part = (size_t)(bytes - at < CUDA_PINNED_BYTES ? bytes - at : CUDA_PINNED_BYTES);
        int slot;
        ML_TRY(take_pinned(d, &slot));
        memcpy(d->pinned[slot], (const char *)from + at, part);
        CUDA_TRY(cuMemcpyHtoDAsync((CUdeviceptr)(uintptr_t)to + (size_t)at, d->pinned[slot], part,
                                   d->stream));
        CUDA_TRY(cuEventRecord(d->pinned_event[slot], d->stream));
    }
    return ML_OK;
}

/* Two parts are under way at a time: one is copied out while the next one arrives. */
ml_status cuda_download(ml_device *device, void *to, const void *from, int64_t bytes) {
    cuda_device *d = cuda_of(device);
    int pending = -1;
    int64_t pending_at = 0;
    size_t pending_bytes = 0;
    for (int64_t at = 0; at < bytes || pending >= 0; at += CUDA_PINNED_BYTES) {
        int slot = -1;
        size_t part = 0;
        if (at < bytes) {
            part = (size_t)(bytes - at < CUDA_PINNED_BYTES ? bytes - at : CUDA_PINNED_BYTES);
            ML_TRY(take_pinned(d, &slot));
            CUDA_TRY(cuMemcpyDtoHAsync(d->pinned[slot], (CUdeviceptr)(uintptr_t)from + (size_t)at,
                                       part, d->stream));
            CUDA_TRY(cuEventRecord(d->pinned_event[slot], d->stream));
        }
        if (pending >= 0) {
            ML_TRY(cuda_wait_for(d, d->pinned_event[pending]));
            memcpy((char *)to + pending_at, d->pinned[pending], pending_bytes);
        }
        pending = slot;
        pending_at = at;
        pending_bytes = part;
    }
    return ML_OK;
}

ml_status cuda_download_parts(ml_device *device, const ml_copied_part *parts, int count) {
    cuda_device *d = cuda_of(device);
    int64_t at = 0;
    int slot;
    ML_TRY(take_pinned(d, &slot));
    for (int i = 0; i < count; at += parts[i++].bytes)
        CUDA_TRY(cuMemcpyDtoHAsync(d->pinned[slot] + at, (CUdeviceptr)(uintptr_t)parts[i].from,
                                   (size_t)parts[i].bytes, d->stream));
    CUDA_TRY(cuEventRecord(d->pinned_event[slot], d->stream));
    ML_TRY(cuda_wait_for(d, d->pinned_event[slot]));
    at = 0;
    for (int i = 0; i < count; at += parts[i++].bytes)
        memcpy(parts[i].to, d->pinned[slot] + at, (size_t)parts[i].bytes);
    return ML_OK;
}

ml_status cuda_zero(ml_device *device, void *memory, int64_t bytes) {
    cuda_device *d = cuda_of(device);
    if (bytes > 0)
        CUDA_TRY(cuMemsetD8Async((CUdeviceptr)(uintptr_t)memory, 0, (size_t)bytes, d->stream));
    return ML_OK;
}
#endif
