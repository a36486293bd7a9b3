#define _GNU_SOURCE
/* libcuda for the emulator: the driver calls that mlua makes, on the CPU. Device memory is host
 * memory (a memfd, so that other processes can open it) filled with NaN patterns; images are shared
 * objects made by nvrtc.c. */
#include <cuda.h>

#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "fibers.h"

static int complaints;
static _Atomic int contexts, ending, inside;

void emu_complain(const char *what) {
    if (complaints++ < 20) fprintf(stderr, "emulator: %s\n", what);
}
int emu_alive(void) {
    return contexts > 0 && !ending;
}
void emu_enter(void) {
    inside++;
}
void emu_leave(void) {
    inside--;
}
/* Threads that are inside a library's call run on while the process ends. */
__attribute__((destructor)) static void finish(void) {
    ending = 1;
    for (int i = 0; inside && i < 1000; i++) usleep(1000);
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
    contexts++;
    return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
    (void)device;
    contexts--;
    return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext context) {
    return context == (CUcontext)1 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

/* ---- Memory ---- */
typedef struct {
    char *to;
    const char *from;
    size_t pitch, width, height;
    unsigned char byte;
    size_t from_pitch;
} transfer;

static int do_transfer(void *data) {
    const transfer *t = data;
    for (size_t i = 0; i < t->height; i++) {
        if (t->from)
            memmove(t->to + i * t->pitch, t->from + i * t->from_pitch, t->width);
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
    const char *mebibytes = getenv("EMULATOR_MEMORY"); /* set alone */
    *free_bytes = *total = mebibytes ? (size_t)atoi(mebibytes) << 20 : (size_t)8 << 30;
    return CUDA_SUCCESS;
}
/* Blocks lie one behind the other in one large memfd, a page apart, and addresses are not used
 * again: what touches memory that was given back, or runs over a block's last page, faults. */
enum { PAGE = 4096, MOST_BLOCKS = 1 << 16 };
static const size_t DEVICE = (size_t)1 << 40;
typedef struct {
    size_t offset, bytes; /* whole pages; 0: given back */
    const char *opened;   /* of another process: where it lies here */
    int process, file;    /* whose, and its memory here */
} block;
static struct {
    pthread_mutex_t lock;
    char *base;
    int file;
    size_t next;
    block blocks[MOST_BLOCKS];
    long count;
} memory = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* Behind the memory, in the same file: for each page who has the block that begins there open. */
enum { OPENERS = 16 };
typedef struct {
    int process[OPENERS];
} openers;

static openers *openers_map(int file, size_t offset) {
    size_t at = DEVICE + offset / PAGE * sizeof(openers), whole = at / PAGE * PAGE;
    char *page = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, file, (off_t)whole);
    return page == MAP_FAILED ? NULL : (openers *)(void *)(page + (at - whole));
}
static void openers_unmap(openers *o) {
    munmap((void *)((size_t)o / PAGE * PAGE), PAGE);
}
/* This process in the place of another one (0: of none). */
static void openers_change(int file, size_t offset, int from, int to) {
    openers *o = openers_map(file, offset);
    for (int i = 0; o && i < OPENERS; i++) {
        int expected = from;
        if (__atomic_compare_exchange_n(&o->process[i], &expected, to, 0, __ATOMIC_SEQ_CST,
                                        __ATOMIC_SEQ_CST))
            break;
    }
    if (o) openers_unmap(o);
}
/* With EMULATOR_SHARES=1: no process may have open what is given back. */
static void openers_check(size_t offset) {
    openers *o = getenv("EMULATOR_SHARES") ? openers_map(memory.file, offset) : NULL;
    for (int i = 0; o && i < OPENERS; i++)
        if (o->process[i]) emu_complain("memory is given back that another process has open");
    if (o) openers_unmap(o);
}

static void memory_open(void) {
    memory.file = memfd_create("emulated-gpu", MFD_CLOEXEC);
    size_t bytes = DEVICE + DEVICE / PAGE * sizeof(openers);
    if (memory.file < 0 || ftruncate(memory.file, (off_t)bytes)) return;
    memory.base = mmap(NULL, DEVICE, PROT_NONE, MAP_SHARED | MAP_NORESERVE, memory.file, 0);
}
static char *memory_take(size_t bytes) {
    if (!memory.base) memory_open();
    if (!memory.base || memory.base == MAP_FAILED || memory.count == MOST_BLOCKS) return NULL;
    memory.blocks[memory.count++] = (block){memory.next, bytes};
    char *at = memory.base + memory.next;
    memory.next += bytes + PAGE;
    return memory.next <= DEVICE && !mprotect(at, bytes, PROT_READ | PROT_WRITE) ? at : NULL;
}
static block *memory_find(CUdeviceptr address) {
    size_t offset = (size_t)address - (size_t)memory.base;
    for (long i = memory.count; i-- > 0;) {
        block *b = &memory.blocks[i];
        if (!b->opened && offset >= b->offset && offset < b->offset + b->bytes) return b;
    }
    return NULL;
}
CUresult cuMemAlloc(CUdeviceptr *address, size_t bytes) {
    pthread_mutex_lock(&memory.lock);
    char *at = bytes > (size_t)8 << 30 ? NULL : memory_take((bytes + PAGE - 1) / PAGE * PAGE);
    pthread_mutex_unlock(&memory.lock);
    if (!at) return CUDA_ERROR_OUT_OF_MEMORY;
    memset(at, 0xff, bytes);
    *address = (CUdeviceptr)(uintptr_t)at;
    return CUDA_SUCCESS;
}
CUresult cuMemFree(CUdeviceptr address) {
    emu_finish(); /* the driver waits too */
    pthread_mutex_lock(&memory.lock);
    block *b = memory_find(address);
    if (b) {
        openers_check(b->offset);
        madvise(memory.base + b->offset, b->bytes, MADV_REMOVE);
        mprotect(memory.base + b->offset, b->bytes, PROT_NONE);
        *b = (block){0};
    }
    pthread_mutex_unlock(&memory.lock);
    return b ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuMemGetAddressRange(CUdeviceptr *base, size_t *bytes, CUdeviceptr address) {
    const block *b = memory_find(address);
    if (!b) return CUDA_ERROR_INVALID_VALUE;
    if (base) *base = (CUdeviceptr)(uintptr_t)(memory.base + b->offset);
    if (bytes) *bytes = b->bytes;
    return CUDA_SUCCESS;
}

/* ---- Memory of other processes ---- */
typedef struct {
    int process, file;
    size_t offset, bytes;
} ipc_handle;

CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address) {
    const block *b = memory_find(address);
    if (!b) return CUDA_ERROR_INVALID_VALUE;
    memset(handle, 0, sizeof *handle);
    const ipc_handle h = {(int)getpid(), memory.file, b->offset, b->bytes};
    memcpy(handle, &h, sizeof h);
    return CUDA_SUCCESS;
}
CUresult cuIpcOpenMemHandle(CUdeviceptr *address, CUipcMemHandle handle, unsigned flags) {
    ipc_handle h;
    char path[64];
    memcpy(&h, &handle, sizeof h);
    if (flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS || h.process == (int)getpid())
        return CUDA_ERROR_INVALID_CONTEXT;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", h.process, h.file);
    int file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0) return CUDA_ERROR_MAP_FAILED;
    char *at = mmap(NULL, h.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, (off_t)h.offset);
    if (at == MAP_FAILED) return CUDA_ERROR_MAP_FAILED;
    openers_change(file, h.offset, 0, (int)getpid());
    pthread_mutex_lock(&memory.lock);
    for (long i = 0; i < memory.count; i++) {
        const block *b = &memory.blocks[i];
        if (b->opened && b->offset == h.offset && b->process == h.process)
            emu_complain("memory of another process is opened twice");
    }
    if (memory.count < MOST_BLOCKS)
        memory.blocks[memory.count++] = (block){h.offset, h.bytes, at, h.process, file};
    pthread_mutex_unlock(&memory.lock);
    *address = (CUdeviceptr)(uintptr_t)at;
    return CUDA_SUCCESS;
}
CUresult cuIpcCloseMemHandle(CUdeviceptr address) {
    emu_finish();
    pthread_mutex_lock(&memory.lock);
    block *b = NULL;
    for (long i = 0; i < memory.count; i++)
        if (memory.blocks[i].opened == (char *)(uintptr_t)address) b = &memory.blocks[i];
    if (b) {
        munmap((void *)b->opened, b->bytes);
        openers_change(b->file, b->offset, (int)getpid(), 0);
        close(b->file);
        *b = (block){0};
    }
    pthread_mutex_unlock(&memory.lock);
    return b ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* ---- Words that streams write and wait for ---- */
static int do_word(void *data) {
    const CUstreamBatchMemOpParams *op = data;
    uint32_t *word = (uint32_t *)(uintptr_t)op->waitValue.address, value = op->waitValue.value;
    if (op->operation == CU_STREAM_MEM_OP_WRITE_VALUE_32) {
        __atomic_store_n(word, value, __ATOMIC_SEQ_CST);
        return 1;
    }
    uint32_t there = __atomic_load_n(word, __ATOMIC_SEQ_CST);
    if (op->waitValue.flags == CU_STREAM_WAIT_VALUE_EQ) return there == value;
    return (int32_t)(there - value) >= 0;
}
CUresult cuStreamBatchMemOp(CUstream stream, unsigned count, CUstreamBatchMemOpParams *ops,
                            unsigned flags) {
    if (count > 255 || flags) return CUDA_ERROR_INVALID_VALUE;
    for (unsigned i = 0; i < count; i++) {
        CUstreamBatchMemOpParams *kept = malloc(sizeof *kept);
        *kept = ops[i];
        if (ops[i].waitValue.address % 4 ||
            (ops[i].operation != CU_STREAM_MEM_OP_WRITE_VALUE_32 &&
             (ops[i].operation != CU_STREAM_MEM_OP_WAIT_VALUE_32 || ops[i].waitValue.flags > 1)))
            return CUDA_ERROR_INVALID_VALUE;
        emu_enqueue(stream, do_word, kept);
    }
    return CUDA_SUCCESS;
}
CUresult cuStreamWriteValue32(CUstream stream, CUdeviceptr address, cuuint32_t value,
                              unsigned flags) {
    CUstreamBatchMemOpParams op = {.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32};
    op.writeValue.address = address;
    op.writeValue.value = value;
    op.writeValue.flags = flags;
    return cuStreamBatchMemOp(stream, 1, &op, 0);
}
CUresult cuStreamWaitValue32(CUstream stream, CUdeviceptr address, cuuint32_t value,
                             unsigned flags) {
    CUstreamBatchMemOpParams op = {.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32};
    op.waitValue.address = address;
    op.waitValue.value = value;
    op.waitValue.flags = flags;
    return cuStreamBatchMemOp(stream, 1, &op, 0);
}

/* ---- Host memory ---- */
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
CUresult cuMemcpy2DAsync(const CUDA_MEMCPY2D *c, CUstream stream) {
    return enqueue_transfer(stream,
                            (transfer){(char *)(uintptr_t)c->dstDevice, c->srcHost, c->dstPitch,
                                       c->WidthInBytes, c->Height, 0, c->srcPitch});
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
    int together; /* cooperative: all blocks at once */
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
    int (*const run)(void (*)(void *), void *, emu_index, emu_index, unsigned) =
        l->together ? fibers_run_together : fibers_run;
    if (run(l->function->run, l->arguments, l->grid, l->block, l->shared_bytes)) emu_complain(text);
    return 1;
}

static CUresult launch_kernel(CUfunction f, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                              unsigned block_x, unsigned block_y, unsigned block_z,
                              unsigned shared_bytes, CUstream stream, void **parameters,
                              void **extra, int together, int early) {
    const unsigned threads = block_x * block_y * block_z;
    if (grid_x == 0 || grid_x > 2147483647u || grid_y - 1 > 65534 || grid_z - 1 > 65534 ||
        threads == 0 || threads > 1024 || shared_bytes > ((function *)f)->shared_bytes)
        return CUDA_ERROR_INVALID_VALUE;
    emu_note(early ? "early" : "kernel", ((function *)f)->name);
    if (!((function *)f)->launched && emu_waits()) emu_finish();
    ((function *)f)->launched = 1;
    launch *l = calloc(1, sizeof *l);
    l->function = (function *)f;
    l->grid = (emu_index){grid_x, grid_y, grid_z};
    l->block = (emu_index){block_x, block_y, block_z};
    l->shared_bytes = shared_bytes;
    l->together = together;
    if (parameters) /* one struct */
        memcpy(l->arguments, parameters[0], l->function->bytes);
    else
        memcpy(l->arguments, extra[1], *(size_t *)extra[3]);
    emu_enqueue(stream, do_launch, l);
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction f, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                        unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                        CUstream stream, void **parameters, void **extra) {
    return launch_kernel(f, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes, stream,
                         parameters, extra, 0, 0);
}

/* Programmatic launches are in order here too: which launches ask for one is noted. */
CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **parameters, void **extra) {
    int early = 0;
    for (unsigned i = 0; i < c->numAttrs; i++)
        early |= c->attrs[i].id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION &&
                 c->attrs[i].value.programmaticStreamSerializationAllowed;
    return launch_kernel(f, c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->blockDimY,
                         c->blockDimZ, c->sharedMemBytes, c->hStream, parameters, extra, 0, early);
}

CUresult cuLaunchCooperativeKernel(CUfunction f, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                   unsigned block_x, unsigned block_y, unsigned block_z,
                                   unsigned shared_bytes, CUstream stream, void **parameters) {
    if (grid_x * grid_y * grid_z > 132) return CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE;
    return launch_kernel(f, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes, stream,
                         parameters, NULL, 1, 0);
}
