#ifdef MLUA_CUDA
/* Temporaries in host memory: copies out and back, each direction on a stream of its own beside the
 * device's stream, between two events. In a captured step they are nodes of the graph. */
#include "runtime/device/cuda/cuda_internal.h"

/* Events of a copy: it may begin; it is done. */
struct cuda_host_ticket {
    CUevent ready, done;
};

ml_status cuda_pin(ml_device *device, int64_t bytes, void **memory) {
    (void)device;
    *memory = NULL;
    if (cuda.cuMemAllocHost(memory, (size_t)bytes) == CUDA_SUCCESS) return ML_OK;
    ml_fail(ML_NO_MEMORY, "no host memory for offloaded values: %.2f GiB are to be pinned",
            (double)bytes / (1 << 30));
    return ml_help("MLUA_HOST_LINK=0 computes values again instead");
}

void cuda_unpin(ml_device *device, void *memory) {
    (void)device;
    CUDA_OK(cuMemFreeHost(memory));
}

/* Of the two directions. */
static ml_status streams_make(cuda_device *d) {
    for (int i = 0; i < 2 && !d->host_streams[i]; i++)
        CUDA_TRY(cuStreamCreate(&d->host_streams[i], CU_STREAM_NON_BLOCKING));
    return ML_OK;
}

typedef struct {
    void *host[2], *device[2]; /* out, back */
    CUevent begin, end[2];
} timed_copies;

static ml_status copies_allocate(ml_device *device, int64_t bytes, timed_copies *t) {
    for (int i = 0; i < 2; i++) {
        ML_TRY(cuda_pin(device, bytes, &t->host[i]));
        ML_TRY(device->ops->allocate(device, bytes, &t->device[i]));
        CUDA_TRY(cuEventCreate(&t->end[i], 0));
    }
    CUDA_TRY(cuEventCreate(&t->begin, 0));
    return ML_OK;
}

static void copies_release(ml_device *device, timed_copies *t) {
    for (int i = 0; i < 2; i++) {
        if (t->host[i] != NULL) cuda_unpin(device, t->host[i]);
        if (t->device[i] != NULL) device->ops->release(device, t->device[i]);
        if (t->end[i] != NULL) CUDA_OK(cuEventDestroy(t->end[i]));
    }
    if (t->begin != NULL) CUDA_OK(cuEventDestroy(t->begin));
}

/* Copies in the directions of `mask` at once: until the last one has ended. */
static ml_status copies_run(cuda_device *d, const timed_copies *t, int64_t bytes, int mask,
                            double *seconds) {
    *seconds = 0;
    CUDA_TRY(cuEventRecord(t->begin, d->stream));
    for (int i = 0; i < 2; i++) {
        CUdeviceptr memory = (CUdeviceptr)(uintptr_t)t->device[i];
        CUstream stream = d->host_streams[i];
        if (!(mask >> i & 1)) continue;
        CUDA_TRY(cuStreamWaitEvent(stream, t->begin, 0));
        if (i == 0) CUDA_TRY(cuMemcpyDtoHAsync(t->host[i], memory, (size_t)bytes, stream));
        if (i == 1) CUDA_TRY(cuMemcpyHtoDAsync(memory, t->host[i], (size_t)bytes, stream));
        CUDA_TRY(cuEventRecord(t->end[i], stream));
    }
    for (int i = 0; i < 2; i++) {
        float ms = 0;
        if (!(mask >> i & 1)) continue;
        CUDA_TRY(cuEventSynchronize(t->end[i]));
        CUDA_TRY(cuEventElapsedTime(&ms, t->begin, t->end[i]));
        if (ms * 1e-3 > *seconds) *seconds = ms * 1e-3;
    }
    return ML_OK;
}

ml_status cuda_time_host_copies(ml_device *device, int64_t bytes, double seconds[3]) {
    enum { TIMES = 4 };
    cuda_device *d = (cuda_device *)device;
    timed_copies t = {{NULL}};
    ml_status status = streams_make(d);
    if (status == ML_OK) status = copies_allocate(device, bytes, &t);
    for (int mask = 1; mask < 4; mask++) {
        double one, *best = &seconds[mask - 1];
        for (int i = 0; i < TIMES && status == ML_OK; i++) {
            status = copies_run(d, &t, bytes, mask, &one);
            if (i == 0 || one < *best) *best = one;
        }
    }
    copies_release(device, &t);
    return status;
}

void cuda_host_copy_load(ml_executable *e) {
    uint32_t copies = 0;
    cuda_device *d = e->device;
    for (uint32_t i = 0; i < e->step_count; i++)
        copies += e->steps[i].step->kind == ML_STEP_HOST_COPY;
    if (copies == 0) return;
    ML_CHECK(streams_make(d));
    e->host_tickets = ML_NEW_ARRAY(e->arena, struct cuda_host_ticket, (size_t)copies + 1);
    e->host_ticket_count = copies;
    for (uint32_t i = 1; i <= copies; i++) {
        struct cuda_host_ticket *ticket = &e->host_tickets[i];
        ML_CHECK(CUDA_OK(cuEventCreate(&ticket->ready, CU_EVENT_DISABLE_TIMING)));
        ML_CHECK(CUDA_OK(cuEventCreate(&ticket->done, CU_EVENT_DISABLE_TIMING)));
    }
}

void cuda_host_copy_unload(ml_executable *e) {
    for (uint32_t i = 1; i <= e->host_ticket_count; i++) {
        if (e->host_tickets[i].ready) CUDA_OK(cuEventDestroy(e->host_tickets[i].ready));
        if (e->host_tickets[i].done) CUDA_OK(cuEventDestroy(e->host_tickets[i].done));
    }
}

void cuda_host_copy_close(cuda_device *d) {
    for (int i = 0; i < 2; i++)
        if (d->host_streams[i]) CUDA_OK(cuStreamDestroy(d->host_streams[i]));
}

ml_status cuda_host_copy_here(const cuda_step *step, CUstream stream) {
    const ml_host_copy *c = step->step->host_copy;
    void *from = step->pointers[0], *to = step->pointers[1];
    if (c->back)
        CUDA_TRY(cuMemcpyHtoDAsync((CUdeviceptr)(uintptr_t)to, from, (size_t)c->bytes, stream));
    else
        CUDA_TRY(cuMemcpyDtoHAsync(to, (CUdeviceptr)(uintptr_t)from, (size_t)c->bytes, stream));
    return ML_OK;
}

ml_status cuda_host_copy_start(ml_executable *e, const cuda_step *step) {
    const ml_host_copy *c = step->step->host_copy;
    CUstream stream = e->device->host_streams[c->back];
    struct cuda_host_ticket *ticket = &e->host_tickets[c->ticket];
    cuda_doing(step->what);
    CUDA_TRY(cuEventRecord(ticket->ready, e->device->stream));
    CUDA_TRY(cuStreamWaitEvent(stream, ticket->ready, 0));
    ML_TRY(cuda_time_begins(e, step, stream));
    ML_TRY(cuda_host_copy_here(step, stream));
    ML_TRY(cuda_time_ends(e, step, stream));
    CUDA_TRY(cuEventRecord(ticket->done, stream));
    return ML_OK;
}

ml_status cuda_host_copy_wait(ml_executable *e, const cuda_step *step) {
    const ml_host_copy *c = step->step->host_copy;
    CUDA_TRY(cuStreamWaitEvent(e->device->stream, e->host_tickets[c->ticket].done, 0));
    return ML_OK;
}
#endif
