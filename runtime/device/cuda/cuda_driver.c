#ifdef MLUA_CUDA
#include "runtime/device/cuda/cuda_driver.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/dynamic.h"
#include "runtime/device/device.h"

cuda_driver cuda;

static struct {
    pthread_mutex_t mutex;
    bool tried, absent; /* absent: there is no driver, or no GPU */
    int devices;
    ml_status status;
    ml_error error;
} opened = {.mutex = PTHREAD_MUTEX_INITIALIZER};

static _Thread_local const char *doing;

void cuda_doing(const char *what) {
    doing = what;
}
const char *cuda_doing_now(void) {
    return doing ? doing : "";
}

/* cuda.h defines cuMemAlloc as cuMemAlloc_v2: the macro is expanded before it becomes text, so that
 * the symbol looked up is the one whose prototype the header declares. */
#define TEXT(name) TEXT_(name)
#define TEXT_(name) #name

static const char *resolve(void *library) {
    static const struct {
        const char *symbol;
        size_t at;
        bool optional;
    } calls[] = {
#define ENTRY(name) {TEXT(name), offsetof(cuda_driver, name), false},
        CUDA_CALLS(ENTRY)
#undef ENTRY
#define ENTRY(name) {TEXT(name), offsetof(cuda_driver, name), true},
            CUDA_OPTIONAL_CALLS(ENTRY)
#undef ENTRY
    };
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        void *address = dlsym(library, calls[i].symbol);
        /* Older drivers have this one under its first name only, with the same prototype. */
        if (!address && !strncmp(calls[i].symbol, "cuEventElapsedTime", 18))
            address = dlsym(library, "cuEventElapsedTime");
        if (!address && !calls[i].optional) return calls[i].symbol;
        memcpy((char *)&cuda + calls[i].at, &address, sizeof address);
    }
    return NULL;
}

static ml_status open_once(void) {
    void *library = ml_dynamic_open("libcuda.so.1");
    if (!library) {
        opened.absent = true;
        ml_fail(ML_DEVICE, "no NVIDIA GPU found: there is no NVIDIA driver (libcuda.so.1)");
        return ml_help("run with --device cpu, or install the NVIDIA driver");
    }
    const char *missing = resolve(library);
    if (missing) {
        ml_fail(ML_DEVICE, "the NVIDIA driver is too old: it has no %s", missing);
        return ml_help("install driver 525 or newer, or run with --device cpu");
    }
    /* Streams that share a queue of the GPU wait for one another, and what waits for another rank
     * must keep nothing waiting: as many queues as there can be, unless the user says otherwise. */
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
    CUresult result = cuda.cuInit(0);
    if (result == CUDA_SUCCESS) result = cuda.cuDeviceGetCount(&opened.devices);
    if (result == CUDA_ERROR_NO_DEVICE || (result == CUDA_SUCCESS && opened.devices == 0)) {
        opened.absent = true;
        ml_fail(ML_DEVICE, "no NVIDIA GPU found: the driver sees none");
        return ml_help("run with --device cpu, or check CUDA_VISIBLE_DEVICES and `nvidia-smi`");
    }
    if (result != CUDA_SUCCESS) {
        cuda_fail(result, "cuInit");
        return ml_help("run with --device cpu, or see whether `nvidia-smi` works");
    }
    return ML_OK;
}

ml_status cuda_driver_open(int *device_count) {
    pthread_mutex_lock(&opened.mutex);
    if (!opened.tried) {
        opened.tried = true;
        opened.status = open_once();
        if (opened.status != ML_OK) opened.error = *ml_error_last();
    } else if (opened.status != ML_OK) {
        *ml_error_last() = opened.error;
    }
    if (device_count) *device_count = opened.devices;
    pthread_mutex_unlock(&opened.mutex);
    return opened.status;
}

bool cuda_driver_shares(void) {
    return cuda.cuIpcGetMemHandle && cuda.cuIpcOpenMemHandle && cuda.cuIpcCloseMemHandle &&
           cuda.cuMemGetAddressRange;
}

ml_status ml_cuda_find(void) {
    return cuda_driver_open(NULL);
}

bool ml_cuda_absent(void) {
    ml_cuda_find();
    return opened.absent;
}

int ml_cuda_count(void) {
    int count = 0;
    return cuda_driver_open(&count) == ML_OK ? count : 0;
}

ml_status cuda_fail(CUresult result, const char *call) {
    const char *name = "unknown error", *meaning = "";
    size_t length = strcspn(call, "(");
    if (cuda.cuGetErrorName) cuda.cuGetErrorName(result, &name);
    if (cuda.cuGetErrorString) cuda.cuGetErrorString(result, &meaning);
    const char *what = cuda_doing_now();
    ml_fail(ML_DEVICE, "%.*s failed: %s, error %d (%s)%s%s", (int)length, call, name ? name : "?",
            (int)result, meaning ? meaning : "", *what ? " at " : "", what);
    if (result == CUDA_ERROR_ILLEGAL_ADDRESS || result == CUDA_ERROR_LAUNCH_FAILED ||
        result == CUDA_ERROR_MISALIGNED_ADDRESS || result == CUDA_ERROR_ILLEGAL_INSTRUCTION)
        return ml_help("a kernel failed: MLUA_DEBUG=2 runs step by step and names it");
    return ML_DEVICE;
}
#endif
