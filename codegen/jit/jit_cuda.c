/* Kernels through NVRTC, which is opened on first use: one program and one cubin a kernel, several
 * at a time on the pool's threads. */
#define _GNU_SOURCE
#include "codegen/jit/cache.h"

#include <stdio.h>
#include <string.h>

#ifdef MLUA_CUDA

#include <dlfcn.h>
#include <nvrtc.h>
#include <pthread.h>

#include "runtime/base/dynamic.h"
#include "runtime/base/knobs.h"

enum { PATH_SIZE = 1024 };

/* Divisions and roots to 2 units of the last place, denormals are 0: as the CPU's kernels. */
static const char *const flags[] = {"--std=c++17", "--ftz=true", "--prec-div=false",
                                    "--prec-sqrt=false", "--disable-warnings"};
enum { FLAG_COUNT = sizeof flags / sizeof *flags };

/* NVRTC's functions, by the types that its header declares. */
static struct {
    pthread_once_t once;
    bool found;
    char problem[512];
    int major, minor;
    __typeof__(&nvrtcVersion) version;
    __typeof__(&nvrtcCreateProgram) create;
    __typeof__(&nvrtcDestroyProgram) destroy;
    __typeof__(&nvrtcCompileProgram) compile;
    __typeof__(&nvrtcGetProgramLogSize) log_size;
    __typeof__(&nvrtcGetProgramLog) log;
    __typeof__(&nvrtcGetCUBINSize) cubin_size;
    __typeof__(&nvrtcGetCUBIN) cubin;
    __typeof__(&nvrtcGetErrorString) error;
} nvrtc = {.once = PTHREAD_ONCE_INIT};

struct ml_jit_cuda {
    ml_arena *arena;
    int count;
    void **images; /* heap blocks, NULL where another kernel's image serves */
    int64_t *sizes;
};

static void *open_library(void) {
    static const char *const names[] = {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"};
    void *library = NULL;
    for (size_t i = 0; i < sizeof names / sizeof *names && library == NULL; i++)
        library = ml_dynamic_open(names[i]);
    if (library == NULL) snprintf(nvrtc.problem, sizeof nvrtc.problem, "%s", dlerror());
    return library;
}

static void open_nvrtc(void) {
    void *library = open_library();
    if (library == NULL) return;
#define FIND(field, name)                                                                          \
    if ((*(void **)&nvrtc.field = dlsym(library, name)) == NULL) {                                 \
        snprintf(nvrtc.problem, sizeof nvrtc.problem, "it lacks %s", name);                        \
        return;                                                                                    \
    }
    FIND(version, "nvrtcVersion")
    FIND(create, "nvrtcCreateProgram")
    FIND(destroy, "nvrtcDestroyProgram")
    FIND(compile, "nvrtcCompileProgram")
    FIND(log_size, "nvrtcGetProgramLogSize")
    FIND(log, "nvrtcGetProgramLog")
    FIND(cubin_size, "nvrtcGetCUBINSize")
    FIND(cubin, "nvrtcGetCUBIN")
    FIND(error, "nvrtcGetErrorString")
#undef FIND
    nvrtc.found = nvrtc.version(&nvrtc.major, &nvrtc.minor) == NVRTC_SUCCESS;
}

static ml_status require_nvrtc(void) {
    pthread_once(&nvrtc.once, open_nvrtc);
    if (nvrtc.found) return ML_OK;
    ml_fail(ML_DEVICE, "cannot open NVRTC, which compiles the GPU's kernels: %s", nvrtc.problem);
    return ml_help("install the CUDA toolkit's libnvrtc (12 or 13), or name its folder in "
                   "LD_LIBRARY_PATH; --device cpu needs no CUDA");
}

/* Hopper's own instructions are in sm_90a only. */
static void architecture_option(int arch, char *out, size_t size) {
    snprintf(out, size, "--gpu-architecture=sm_%d%s", arch, arch == 90 ? "a" : "");
}

/* As -ffp-contract of C kernels. */
static const char *contraction_option(const ml_kernel *kernel) {
    return kernel->contracts ? "--fmad=true" : "--fmad=false";
}

static void cache_key(const ml_kernel *kernel, const char *source, int arch, uint64_t key[2]) {
    char option[64];
    architecture_option(arch, option, sizeof option);
    const char *prelude = ml_prelude(ML_TARGET_CUDA);
    uint64_t versions[] = {(uint64_t)nvrtc.major, (uint64_t)nvrtc.minor, (uint64_t)arch};
    uint64_t hash = ml_hash(versions, sizeof versions, 2);
    hash = ml_hash(option, strlen(option), hash);
    hash = ml_hash(&kernel->contracts, sizeof kernel->contracts, hash);
    for (int i = 0; i < FLAG_COUNT; i++) hash = ml_hash(flags[i], strlen(flags[i]), hash);
    hash = ml_hash(prelude, strlen(prelude), hash);
    key[0] = ml_hash(source, strlen(source), hash);
    key[1] = ml_hash(source, strlen(source), ~hash);
}

typedef struct {
    ml_kernel *const *kernels;
    const char **sources; /* of distinct kernels */
    int count, arch;
    ml_pool *pool;
    ml_jit_cuda *jit;
    const void **images;
    int64_t *sizes;
    int *missing, missing_count;
} compile_call;

static ml_status compile_failure(const ml_kernel *kernel, const char *source,
                                 const nvrtcProgram *program, const char *reason) {
    char saved[PATH_SIZE], name[64], first[512];
    snprintf(name, sizeof name, "%s.cu", kernel->entry);
    snprintf(first, sizeof first, "%s", reason);
    size_t size = 0;
    char *log = NULL;
    if (program != NULL && nvrtc.log_size(*program, &size) == NVRTC_SUCCESS && size > 1 &&
        (log = ml_alloc(size + 1)) != NULL && nvrtc.log(*program, log) == NVRTC_SUCCESS) {
        char *at = strstr(log, "error");
        at = at != NULL ? at : log;
        while (at > log && at[-1] != '\n') at--;
        snprintf(first, sizeof first, "%.*s", (int)strcspn(at, "\n"), at);
    }
    ml_free(log);
    if (cache_save_source(cache_failed_folder(), name, ml_prelude(ML_TARGET_CUDA), &source, 1,
                          saved, sizeof saved) != ML_OK)
        snprintf(saved, sizeof saved, "(not saved)");
    ml_fail(ML_COMPILE, "a generated GPU kernel (%s) does not compile: source in %s: %s",
            kernel->label, saved, first);
    return ml_help("this is a bug of mlua, or of NVRTC %d.%d", nvrtc.major, nvrtc.minor);
}

/* The cubin of a compiled program as a heap block. */
static ml_status take_cubin(const ml_kernel *kernel, const char *source,
                            const nvrtcProgram *program, void **image, int64_t *size) {
    size_t bytes = 0;
    nvrtcResult result = nvrtc.cubin_size(*program, &bytes);
    if (result != NVRTC_SUCCESS || bytes == 0)
        return compile_failure(kernel, source, NULL, nvrtc.error(result));
    void *block = ml_alloc(bytes);
    if (block == NULL) return ml_fail(ML_NO_MEMORY, "out of memory while compiling GPU kernels");
    result = nvrtc.cubin(*program, block);
    if (result != NVRTC_SUCCESS) {
        ml_free(block);
        return compile_failure(kernel, source, NULL, nvrtc.error(result));
    }
    *image = block;
    *size = (int64_t)bytes;
    return ML_OK;
}

static ml_status unknown_architecture(int arch) {
    ml_fail(ML_DEVICE, "NVRTC %d.%d cannot compile for this GPU (sm_%d)", nvrtc.major, nvrtc.minor,
            arch);
    return ml_help("install a newer CUDA toolkit's libnvrtc, or use --device cpu");
}

static ml_status compile_source(const ml_kernel *kernel, const char *source, int arch, void **image,
                                int64_t *size) {
    char architecture[64], name[64];
    architecture_option(arch, architecture, sizeof architecture);
    snprintf(name, sizeof name, "%s.cu", kernel->entry);
    const char *options[FLAG_COUNT + 2] = {architecture, contraction_option(kernel)};
    memcpy(options + 2, flags, sizeof flags);
    const char *prelude = ml_prelude(ML_TARGET_CUDA);
    size_t length = strlen(prelude) + strlen(source) + 2;
    char *text = ml_alloc(length);
    if (text == NULL) return ml_fail(ML_NO_MEMORY, "out of memory while compiling GPU kernels");
    snprintf(text, length, "%s\n%s", prelude, source);
    nvrtcProgram program;
    nvrtcResult result = nvrtc.create(&program, text, name, 0, NULL, NULL);
    ml_free(text);
    if (result != NVRTC_SUCCESS) return compile_failure(kernel, source, NULL, nvrtc.error(result));
    result = nvrtc.compile(program, FLAG_COUNT + 2, options);
    ml_status status = result == NVRTC_SUCCESS ? take_cubin(kernel, source, &program, image, size)
                       : result == NVRTC_ERROR_INVALID_OPTION
                           ? unknown_architecture(arch)
                           : compile_failure(kernel, source, &program, nvrtc.error(result));
    nvrtc.destroy(&program);
    return status;
}

static ml_status compile_kernel(const compile_call *call, int i, uint64_t key[2]) {
    ML_TRY(compile_source(call->kernels[i], call->sources[i], call->arch, &call->jit->images[i],
                          &call->jit->sizes[i]));
    /* A cache that cannot be written costs time only: the image is here. */
    if (ml_cache_write(key, "cubin", call->jit->images[i], call->jit->sizes[i]) != ML_OK)
        ml_debug(1, "%s\n", ml_error_last()->text);
    return ML_OK;
}

static int share_of, shares = 1;

void ml_jit_cuda_share(int process, int processes) {
    share_of = process;
    shares = processes;
}

static void compile_job(void *context, int64_t begin, int64_t end, int thread) {
    (void)thread;
    const compile_call *call = context;
    int64_t first = (int64_t)call->missing_count * share_of / shares;
    for (int64_t i = begin; i < end; i++) {
        int k = call->missing[(i + first) % call->missing_count];
        uint64_t key[2];
        cache_key(call->kernels[k], call->sources[k], call->arch, key);
        if (shares > 1 &&
            ml_cache_read(key, "cubin", &call->jit->images[k], &call->jit->sizes[k]) == ML_OK)
            continue;
        ML_CHECK(compile_kernel(call, k, key));
    }
}

static void compile_body(void *argument) {
    compile_call *call = argument;
    ml_jit_cuda *jit = call->jit;
    ML_CHECK(require_nvrtc());
    jit->count = call->count;
    jit->images = ML_NEW_ARRAY(jit->arena, void *, call->count + 1);
    jit->sizes = ML_NEW_ARRAY(jit->arena, int64_t, call->count + 1);
    call->missing = ML_NEW_ARRAY(jit->arena, int, call->count + 1);
    call->sources = ML_NEW_ARRAY(jit->arena, const char *, call->count + 1);
    int *same = ML_NEW_ARRAY(jit->arena, int, call->count + 1);
    cache_find_same(call->kernels, call->count, jit->arena, same);
    for (int i = 0; i < call->count; i++) {
        uint64_t key[2];
        if (same[i] != i) continue;
        ml_jit_show(call->kernels[i], ML_TARGET_CUDA, jit->arena);
        call->sources[i] = ml_kernel_source(call->kernels[i], jit->arena);
        cache_key(call->kernels[i], call->sources[i], call->arch, key);
        if (ml_cache_read(key, "cubin", &jit->images[i], &jit->sizes[i]) != ML_OK)
            call->missing[call->missing_count++] = i;
    }
    if (call->missing_count > 0) ml_debug(1, "compiling %d GPU kernels\n", call->missing_count);
    if (call->missing_count > 0 && call->pool != NULL)
        ML_CHECK(
            ml_pool_run(call->pool, call->missing_count, call->missing_count, compile_job, call));
    else
        compile_job(call, 0, call->missing_count, 0);
    for (int i = 0; i < call->count; i++) {
        call->images[i] = jit->images[same[i]];
        call->sizes[i] = jit->sizes[same[i]];
    }
}

ml_status ml_jit_cuda_compile(ml_kernel *const *kernels, int count, int arch, ml_pool *pool,
                              ml_jit_cuda **jit, const void **images, int64_t *sizes) {
    *jit = ml_alloc(sizeof **jit);
    if (*jit == NULL) return ml_fail(ML_NO_MEMORY, "out of memory while compiling GPU kernels");
    (*jit)->arena = ml_arena_new();
    compile_call call = {.kernels = kernels,
                         .count = count,
                         .arch = arch,
                         .pool = pool,
                         .jit = *jit,
                         .images = images,
                         .sizes = sizes};
    ml_status status = (*jit)->arena != NULL
                           ? ml_protect(compile_body, &call)
                           : ml_fail(ML_NO_MEMORY, "out of memory while compiling GPU kernels");
    if (status != ML_OK) {
        ml_jit_cuda_free(*jit);
        *jit = NULL;
    }
    return status;
}

void ml_jit_cuda_free(ml_jit_cuda *jit) {
    if (jit == NULL) return;
    for (int i = 0; i < jit->count && jit->images != NULL; i++) ml_free(jit->images[i]);
    if (jit->arena != NULL) ml_arena_free(jit->arena);
    ml_free(jit);
}

ml_status ml_jit_cuda_describe(char *out, int size) {
    ml_status status = require_nvrtc();
    if (status == ML_OK) snprintf(out, (size_t)size, "NVRTC %d.%d", nvrtc.major, nvrtc.minor);
    return status;
}

#else

static ml_status no_cuda(void) {
    ml_fail(ML_DEVICE, "this mlua was built without the CUDA toolkit's headers");
    return ml_help("install the CUDA toolkit and run make again, or use --device cpu");
}

ml_status ml_jit_cuda_compile(ml_kernel *const *kernels, int count, int arch, ml_pool *pool,
                              ml_jit_cuda **jit, const void **images, int64_t *sizes) {
    (void)kernels, (void)count, (void)arch, (void)pool, (void)images, (void)sizes;
    *jit = NULL;
    return no_cuda();
}

void ml_jit_cuda_share(int process, int processes) {
    (void)process, (void)processes;
}

void ml_jit_cuda_free(ml_jit_cuda *jit) {
    (void)jit;
}

ml_status ml_jit_cuda_describe(char *out, int size) {
    if (size > 0) out[0] = 0;
    return no_cuda();
}

#endif
