/* libcuda for the emulator: the driver calls that mlua makes, on the CPU. Device memory is host
 * memory filled with NaN patterns; images are shared objects made by nvrtc.c. */
#include <cuda.h>

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fibers.h"

static int complaints;

void emu_complain(const char *what) {
    if (complaints++ < 20) fprintf(stderr, "emulator: %s\n", what);
}
__attribute__((destructor)) static void finish(void) {
    if (complaints) _exit(9);
}

/* ---- The device ---- */
CUresult cuInit(unsigned flags) {
    (void)flags;
    return CUDA_SUCCESS;
}
CUresult cuDriverGetVersion(int *version) {
    *version = 13000;
    return CUDA_SUCCESS;
}
CUresult cuGetExportTable(const void **table, const CUuuid *id) {
    (void)id;
    *table = NULL;
    return CUDA_ERROR_NOT_FOUND;
}
CUresult cuGetErrorName(CUresult result, const char **name) {
    *name = result == CUDA_ERROR_LAUNCH_FAILED ? "CUDA_ERROR_LAUNCH_FAILED" : "CUDA_ERROR_EMULATED";
    return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult result, const char **text) {
    (void)result;
    *text = "from the emulator";
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetCount(int *count) {
    const char *gpus = getenv("EMULATOR_GPUS");
    *count = gpus ? atoi(gpus) : 8;
    return CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    *device = ordinal;
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetName(char *name, int size, CUdevice device) {
    (void)device;
    snprintf(name, (size_t)size, "emulated H200");
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    (void)device;
    *value = attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR   ? 9
             : attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR ? 0
                                                                         : 132;
    return CUDA_SUCCESS;
}
CUresult cuDeviceTotalMem(size_t *bytes, CUdevice device) {
    (void)device;
    *bytes = (size_t)8 << 30;
    return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    (void)device;
    *context = (CUcontext)1;
    return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
    (void)device;
    return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext context) {
    (void)context;
    return CUDA_SUCCESS;
}

/* ---- Memory ---- */
typedef struct {
    char *to;
    const char *from;
    size_t pitch, width, height;
    unsigned char byte;
} transfer;

static int do_transfer(void *data) {
    const transfer *t = data;
    for (size_t i = 0; i < t->height; i++) {
        if (t->from)
            memmove(t->to + i * t->pitch, t->from + i * t->pitch, t->width);
        else
            memset(t->to + i * t->pitch, t->byte, t->width);
    }
    return 1;
}
static CUresult enqueue_transfer(CUstream stream, transfer t) {
    transfer *kept = malloc(sizeof *kept);
    *kept = t;
    emu_enqueue(stream, do_transfer, kept);
    return CUDA_SUCCESS;
}

CUresult cuMemGetInfo(size_t *free_bytes, size_t *total) {
    *free_bytes = *total = (size_t)8 << 30;
    return CUDA_SUCCESS;
}
CUresult cuMemAlloc(CUdeviceptr *address, size_t bytes) {
    void *memory;
    if (bytes > (size_t)8 << 30 || posix_memalign(&memory, 512, bytes))
        return CUDA_ERROR_OUT_OF_MEMORY;
    memset(memory, 0xff, bytes);
    *address = (CUdeviceptr)(uintptr_t)memory;
    return CUDA_SUCCESS;
}
CUresult cuMemFree(CUdeviceptr address) {
    emu_finish(); /* the driver waits too */
    free((void *)(uintptr_t)address);
    return CUDA_SUCCESS;
}
CUresult cuMemAllocHost(void **memory, size_t bytes) {
    *memory = malloc(bytes);
    return CUDA_SUCCESS;
}
CUresult cuMemFreeHost(void *memory) {
    free(memory);
    return CUDA_SUCCESS;
}
CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void *from, size_t bytes, CUstream stream) {
    return enqueue_transfer(stream, (transfer){(char *)(uintptr_t)to, from, 0, bytes, 1, 0});
}
CUresult cuMemcpyDtoHAsync(void *to, CUdeviceptr from, size_t bytes, CUstream stream) {
    return enqueue_transfer(stream, (transfer){to, (char *)(uintptr_t)from, 0, bytes, 1, 0});
}
CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    return enqueue_transfer(
        stream, (transfer){(char *)(uintptr_t)to, (char *)(uintptr_t)from, 0, bytes, 1, 0});
}
CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char byte, size_t bytes, CUstream stream) {
    return enqueue_transfer(stream, (transfer){(char *)(uintptr_t)to, NULL, 0, bytes, 1, byte});
}
CUresult cuMemsetD2D8Async(CUdeviceptr to, size_t pitch, unsigned char byte, size_t width,
                           size_t height, CUstream stream) {
    return enqueue_transfer(stream,
                            (transfer){(char *)(uintptr_t)to, NULL, pitch, width, height, byte});
}

/* ---- Kernels ---- */
typedef struct {
    void (*run)(void *);
    unsigned shared_bytes; /* allowed */
    int launched;
    unsigned bytes; /* of the arguments */
    char name[64];
} function;
typedef struct {
    const function *function;
    emu_index grid, block;
    unsigned shared_bytes;
    char arguments[4096];
} launch;

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    char path[] = "/tmp/mlua-emulator-XXXXXX";
    uint64_t bytes;
    if (memcmp(image, "EMULATED", 8)) return CUDA_ERROR_INVALID_IMAGE;
    memcpy(&bytes, (const char *)image + 8, 8);
    int file = mkstemp(path);
    if (file < 0 || write(file, (const char *)image + 16, bytes) != (ssize_t)bytes)
        return CUDA_ERROR_INVALID_IMAGE;
    close(file);
    *module = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!*module) fprintf(stderr, "emulator: %s\n", dlerror());
    unlink(path);
    return *module ? CUDA_SUCCESS : CUDA_ERROR_INVALID_IMAGE;
}
CUresult cuModuleUnload(CUmodule module) {
    dlclose(module);
    return CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction *result, CUmodule module, const char *name) {
    char symbol[256];
    function *f = calloc(1, sizeof *f);
    snprintf(symbol, sizeof symbol, "%s__run", name);
    *(void **)&f->run = dlsym(module, symbol);
    snprintf(symbol, sizeof symbol, "%s__bytes", name);
    const unsigned *bytes = dlsym(module, symbol);
    f->bytes = bytes ? *bytes : 0;
    f->shared_bytes = 0; /* really 48 KiB less what the kernel declares: not to be relied on */
    snprintf(f->name, sizeof f->name, "%s", name);
    *result = (CUfunction)f;
    return f->run && f->bytes <= 4096 ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute attribute, int value) {
    if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES || value > 227 << 10)
        return CUDA_ERROR_INVALID_VALUE;
    ((function *)f)->shared_bytes = (unsigned)value;
    return CUDA_SUCCESS;
}

static int do_launch(void *data) {
    launch *l = data;
    char text[128];
    snprintf(text, sizeof text, "threads of %s wait for one another for ever", l->function->name);
    if (fibers_run(l->function->run, l->arguments, l->grid, l->block, l->shared_bytes))
        emu_complain(text);
    return 1;
}

CUresult cuLaunchKernel(CUfunction f, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                        unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                        CUstream stream, void **parameters, void **extra) {
    const unsigned threads = block_x * block_y * block_z;
    if (grid_x == 0 || grid_x > 2147483647u || grid_y - 1 > 65534 || grid_z - 1 > 65534 ||
        threads == 0 || threads > 1024 || shared_bytes > ((function *)f)->shared_bytes)
        return CUDA_ERROR_INVALID_VALUE;
    if (!((function *)f)->launched && emu_waits()) emu_finish();
    ((function *)f)->launched = 1;
    launch *l = calloc(1, sizeof *l);
    l->function = (function *)f;
    l->grid = (emu_index){grid_x, grid_y, grid_z};
    l->block = (emu_index){block_x, block_y, block_z};
    l->shared_bytes = shared_bytes;
    if (parameters) /* one struct */
        memcpy(l->arguments, parameters[0], l->function->bytes);
    else
        memcpy(l->arguments, extra[1], *(size_t *)extra[3]);
    emu_enqueue(stream, do_launch, l);
    return CUDA_SUCCESS;
}
