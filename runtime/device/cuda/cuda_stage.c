#ifdef MLUA_CUDA
/* Writing memory of the GPU from several threads: each has a pinned buffer and a stream. */
#include "runtime/device/cuda/cuda_internal.h"

struct cuda_stage {
    int slots;
    char *buffers;
    CUstream stream[];
};

static ml_status stage_open(cuda_device *d, int slots, int64_t bytes) {
    struct cuda_stage *s = d->stage = ml_alloc(sizeof *s + sizeof *s->stream * (size_t)slots);
    if (!s) return ml_fail(ML_NO_MEMORY, "no memory for writing the GPU's");
    CUDA_TRY(cuMemAllocHost((void **)&s->buffers, (size_t)(slots * bytes)));
    for (; s->slots < slots; s->slots++)
        CUDA_TRY(cuStreamCreate(&s->stream[s->slots], CU_STREAM_NON_BLOCKING));
    return ML_OK;
}

ml_status cuda_stage(ml_device *device, int slots, int64_t bytes, char **buffers) {
    cuda_device *d = (cuda_device *)device;
    ml_status status = stage_open(d, slots, bytes);
    if (status == ML_OK) {
        *buffers = d->stage->buffers;
        return ML_OK;
    }
    ml_error error = *ml_error_last();
    cuda_unstage(device);
    *ml_error_last() = error;
    return status;
}

ml_status cuda_put(ml_device *device, int slot, const void *from, void *to, int64_t width,
                   int64_t height, int64_t pitch) {
    cuda_device *d = (cuda_device *)device;
    CUstream stream = d->stage->stream[slot];
    CUDA_TRY(cuCtxSetCurrent(d->context));
    if (height == 1 || pitch == width) {
        CUDA_TRY(
            cuMemcpyHtoDAsync((CUdeviceptr)(uintptr_t)to, from, (size_t)(width * height), stream));
    } else {
        const CUDA_MEMCPY2D copy = {.srcMemoryType = CU_MEMORYTYPE_HOST,
                                    .srcHost = from,
                                    .srcPitch = (size_t)width,
                                    .dstMemoryType = CU_MEMORYTYPE_DEVICE,
                                    .dstDevice = (CUdeviceptr)(uintptr_t)to,
                                    .dstPitch = (size_t)pitch,
                                    .WidthInBytes = (size_t)width,
                                    .Height = (size_t)height};
        CUDA_TRY(cuMemcpy2DAsync(&copy, stream));
    }
    return CUDA_OK(cuStreamSynchronize(stream));
}

void cuda_unstage(ml_device *device) {
    cuda_device *d = (cuda_device *)device;
    struct cuda_stage *s = d->stage;
    if (!s) return;
    for (int i = 0; i < s->slots; i++) CUDA_OK(cuStreamDestroy(s->stream[i]));
    if (s->buffers) CUDA_OK(cuMemFreeHost(s->buffers));
    ml_free(s);
    d->stage = NULL;
}
#endif
