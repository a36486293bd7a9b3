/* The null device: plans as for an H200 (ordinal 0) or as for this machine's CPU (ordinal 1), and
 * runs nothing. Its memory is host memory that only uploads and zero() change, so programs give
 * zeros. */
#include <string.h>

#include "runtime/base/machine.h"
#include "runtime/base/pool.h"
#include "runtime/device/device.h"

struct ml_executable {
    ml_device *device;
};

static ml_status null_open(ml_device **device, int ordinal, const ml_device_options *options) {
    (void)options;
    ml_device *opened = ml_alloc(sizeof *opened);
    if (opened == NULL) return ml_fail(ML_NO_MEMORY, "out of memory while opening device null");
    opened->ops = &ml_device_null;
    opened->target = (ml_target){.kind = ML_TARGET_CUDA,
                                 .threads = 1,
                                 .vector_bytes = 64,
                                 .arch = ml_gpus[0].arch,
                                 .multiprocessors = ml_gpus[0].multiprocessors,
                                 .memory_bytes = 140LL << 30,
                                 .longest_materialized = ML_CUDA_MATERIALIZED};
    strcpy(opened->description, "nothing, planned as NVIDIA H200");
    if (ordinal == 1) {
        opened->target.kind = ML_TARGET_C;
        opened->target.threads = ml_cpu_count();
        opened->target.memory_bytes = 0;
        strcpy(opened->description, "nothing, planned as CPU");
    }
    *device = opened;
    return ML_OK;
}

static void null_close(ml_device *device) {
    ml_free(device);
}

static ml_status null_allocate(ml_device *device, int64_t bytes, void **memory) {
    (void)device;
    *memory = ml_alloc((size_t)(bytes > 0 ? bytes : 1));
    if (*memory != NULL) return ML_OK;
    return ml_fail(ML_NO_MEMORY, "out of memory: %lld bytes on device null", (long long)bytes);
}

static void null_release(ml_device *device, void *memory) {
    (void)device;
    ml_free(memory);
}

static ml_status null_copy(ml_device *device, void *to, const void *from, int64_t bytes) {
    (void)device;
    if (bytes > 0) memcpy(to, from, (size_t)bytes);
    return ML_OK;
}

static ml_status null_zero(ml_device *device, void *memory, int64_t bytes) {
    (void)device;
    if (bytes > 0) memset(memory, 0, (size_t)bytes);
    return ML_OK;
}

static ml_status null_wait(ml_device *device) {
    (void)device;
    return ML_OK;
}

static ml_status null_load(ml_device *device, const ml_plan *plan, ml_executable **executable) {
    (void)plan;
    *executable = ml_alloc(sizeof **executable);
    if (*executable == NULL) return ml_fail(ML_NO_MEMORY, "out of memory while loading a program");
    (*executable)->device = device;
    return ML_OK;
}

static ml_status null_bind(ml_executable *executable, void *const *addresses) {
    (void)executable, (void)addresses;
    return ML_OK;
}

static ml_status null_run(ml_executable *executable) {
    (void)executable;
    return ML_OK;
}

static void null_unload(ml_executable *executable) {
    ml_free(executable);
}

/* Messages stay away like all else that is computed. */
static ml_status null_send(ml_device *device, ml_channel *channel, const void *memory,
                           int64_t bytes) {
    (void)device, (void)channel, (void)memory, (void)bytes;
    return ML_OK;
}

static ml_status null_wait_sent(ml_device *device, ml_channel *channel, const void *memory) {
    (void)device, (void)channel, (void)memory;
    return ML_OK;
}

static ml_status null_expect(ml_device *device, ml_channel *channel, void *memory, int64_t bytes) {
    (void)device, (void)channel, (void)memory, (void)bytes;
    return ML_OK;
}

static ml_status null_arrive(ml_device *device, ml_channel *channel, void *memory) {
    (void)device, (void)channel, (void)memory;
    return ML_OK;
}

const ml_device_ops ml_device_null = {
    .name = "null",
    .open = null_open,
    .close = null_close,
    .allocate = null_allocate,
    .release = null_release,
    .upload = null_copy,
    .download = null_copy,
    .copy = null_copy,
    .zero = null_zero,
    .wait = null_wait,
    .load = null_load,
    .bind = null_bind,
    .run = null_run,
    .unload = null_unload,
    .send = null_send,
    .wait_sent = null_wait_sent,
    .expect = null_expect,
    .arrive = null_arrive,
};
