#ifdef MLUA_CUDA
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "runtime/base/cgroup.h"
#include "runtime/base/machine.h"
#include "runtime/device/cuda/cuda_ce_collectives.h"
#include "runtime/device/cuda/cuda_ranks.h"

static cuda_device *cuda_of(ml_device *device) {
    return (cuda_device *)device;
}

/* ---- Opening and closing --------------------------------------------------------------------- */
/* Atomics on another GPU's memory go over NVLink alone. Where no other GPU is in sight, as where a
 * launcher shows each rank its own, those of data centers are taken to have it. */
static int64_t read_link(const cuda_device *d, int arch) {
    int count = 0, atomics = arch == 80 || arch == 90 || arch == 100 || arch == 103;
    if (cuda.cuDeviceGetP2PAttribute && cuda.cuDeviceGetCount(&count) == CUDA_SUCCESS &&
        count > 1) {
        CUdevice other = d->device;
        for (int i = 0; i < count && other == d->device; i++) cuda.cuDeviceGet(&other, i);
        if (cuda.cuDeviceGetP2PAttribute(&atomics, CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED,
                                         d->device, other) != CUDA_SUCCESS)
            atomics = 0;
    }
    return ml_machine_link(arch, atomics != 0);
}

static ml_status read_target(cuda_device *d) {
    int major = 0, minor = 0, driver = 0;
    size_t free_bytes = 0, total = 0;
    char name[128] = "";
    ml_target *target = &d->base.target;
    CUDA_TRY(cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, d->device));
    CUDA_TRY(cuDeviceGetAttribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, d->device));
    CUDA_TRY(cuDeviceGetAttribute(&target->multiprocessors,
                                  CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, d->device));
    CUDA_TRY(cuDeviceGetName(name, sizeof name, d->device));
    CUDA_TRY(cuMemGetInfo(&free_bytes, &total));
    CUDA_TRY(cuDriverGetVersion(&driver));
    d->base.total_bytes = (int64_t)total;
    target->kind = ML_TARGET_CUDA;
    target->arch = 10 * major + minor;
    target->threads = 1;
    target->vector_bytes = 64;
    target->longest_materialized = ML_CUDA_MATERIALIZED;
    target->link_bytes = read_link(d, target->arch);
    target->host_bytes = ml_machine_host(target->arch);
    target->host_memory = ml_memory_here() / 2;
    /* Library code, the context's own memory and workspace take some of what is free now. */
    const int64_t reserve = ml_gpu_outside.libraries;
    target->memory_bytes =
        (int64_t)free_bytes > 2 * reserve ? (int64_t)free_bytes - reserve : (int64_t)free_bytes / 2;
    snprintf(d->base.description, sizeof d->base.description,
             "%s, %.0f GiB (%.0f free), sm_%d, CUDA driver %d.%d", name, (double)total / (1 << 30),
             (double)free_bytes / (1 << 30), target->arch, driver / 1000, driver % 1000 / 10);
    if (target->arch < 80) {
        ml_fail(ML_DEVICE, "%s is too old: sm_%d, and mlua's kernels need sm_80 or newer", name,
                target->arch);
        return ml_help("run with --device cpu");
    }
    return ML_OK;
}

static ml_status open_pinned(cuda_device *d) {
    for (int i = 0; i < CUDA_PINNED; i++) {
        CUDA_TRY(cuMemAllocHost((void **)&d->pinned[i], CUDA_PINNED_BYTES));
        CUDA_TRY(cuEventCreate(&d->pinned_event[i], CU_EVENT_DISABLE_TIMING));
    }
    return ML_OK;
}

static ml_status open_device(cuda_device *d, int ordinal) {
    const ml_device_options *options = &d->base.options;
    int count = 0;
    ML_TRY(cuda_driver_open(&count));
    if (options->hosts > 1 && count > 0) ordinal %= count; /* those hosts share this one's */
    /* Slurm may show each task of a host its own GPU alone. */
    if (count == 1 && getenv("SLURM_PROCID")) ordinal = 0;
    if (ordinal < 0 || ordinal >= count) {
        ml_fail(ML_DEVICE, "there is no GPU %d: the driver sees %d", ordinal, count);
        return ml_help("GPUs are numbered from 0; CUDA_VISIBLE_DEVICES restricts them");
    }
    CUDA_TRY(cuDeviceGet(&d->device, ordinal));
    CUDA_TRY(cuDevicePrimaryCtxRetain(&d->context, d->device));
    if (options->runs > 1) { /* the next run finds the context: the process ends it */
        CUcontext second;
        CUDA_TRY(cuDevicePrimaryCtxRetain(&second, d->device));
    }
    CUDA_TRY(cuCtxSetCurrent(d->context));
    ML_TRY(read_target(d));
    CUDA_TRY(cuStreamCreate(&d->stream, CU_STREAM_NON_BLOCKING));
    return open_pinned(d);
}

static void cuda_close(ml_device *device) {
    cuda_device *d = cuda_of(device);
    if (d->stream) cuda_wait_for(d, NULL);
    if (!cuda_ranks_close(d)) return;
    cuda_ce_close(d);
    cuda_prefetch_close(d);
    cuda_fetch_close(d);
    cuda_host_copy_close(d);
    cuda_unstage(device);
    cuda_dnn_close(d);
    cuda_attention_tunings_close(d);
    cuda_gemm_close(d);
    cuda_times_close(d);
    for (uint32_t i = 0; i < d->functions.count; i++)
        if (d->functions.at[i].module) CUDA_OK(cuModuleUnload(d->functions.at[i].module));
    for (uint32_t i = 0; i < d->block_count; i++)
        CUDA_OK(cuMemFree((CUdeviceptr)(uintptr_t)d->blocks[i].memory));
    cuda_reclaim(d);
    if (d->workspace) CUDA_OK(cuMemFree(d->workspace));
    for (int i = 0; i < CUDA_PINNED; i++) {
        if (d->pinned_event[i]) CUDA_OK(cuEventDestroy(d->pinned_event[i]));
        if (d->pinned[i]) CUDA_OK(cuMemFreeHost(d->pinned[i]));
    }
    if (d->stream) CUDA_OK(cuStreamDestroy(d->stream));
    if (d->context) CUDA_OK(cuDevicePrimaryCtxRelease(d->device));
    ml_free(d->blocks);
    ml_arena_free(d->arena);
    ml_free(d);
}

static ml_status cuda_open(ml_device **device, int ordinal, const ml_device_options *options) {
    cuda_device *d = ml_alloc(sizeof *d);
    *device = NULL;
    if (!d) return ml_fail(ML_NO_MEMORY, "no memory for the CUDA device");
    d->base.ops = &ml_device_cuda;
    d->base.options = *options;
    d->arena = ml_arena_new();
    d->function_index.arena = d->arena;
    ml_status status =
        d->arena ? open_device(d, ordinal) : ml_fail(ML_NO_MEMORY, "no memory for the CUDA device");
    if (status != ML_OK) {
        ml_error error = *ml_error_last(); /* closing may store errors of its own */
        cuda_close(&d->base);
        *ml_error_last() = error;
        return status;
    }
    *device = &d->base;
    return ML_OK;
}

static ml_status cuda_wait(ml_device *device) {
    ML_TRY(cuda_wait_for(cuda_of(device), NULL));
    return cuda_times_collect(cuda_of(device));
}

const ml_device_ops ml_device_cuda = {
    .name = "cuda",
    .open = cuda_open,
    .close = cuda_close,
    .allocate = cuda_allocate,
    .release = cuda_release,
    .copy = cuda_copy,
    .upload = cuda_upload,
    .download = cuda_download,
    .download_parts = cuda_download_parts,
    .zero = cuda_zero,
    .mark = cuda_mark,
    .fetch = cuda_fetch_memory,
    .set_aside = cuda_set_aside,
    .stage = cuda_stage,
    .put = cuda_put,
    .unstage = cuda_unstage,
    .pin = cuda_pin,
    .unpin = cuda_unpin,
    .time_host_copies = cuda_time_host_copies,
    .wait = cuda_wait,
    .compile = cuda_compile,
    .load = cuda_load,
    .bind = cuda_bind,
    .run = cuda_run,
    .ready = cuda_ready,
    .unload = cuda_unload,
    .join = cuda_ranks_join,
    .collect = cuda_nccl_collect,
    .forget = cuda_ce_forget,
    .part = cuda_ranks_part,
    .connect = cuda_channel_connect,
    .patient = cuda_channel_patient,
    .send = cuda_channel_send,
    .wait_sent = cuda_channel_wait_sent,
    .expect = cuda_channel_expect,
    .arrive = cuda_channel_arrive,
};
#endif
