/* Finding a BLAS at run time. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/device/cpu.h"

static const char *const libraries[] = {
    "libopenblas.so.0",    "libopenblasp.so.0", "libopenblas.so",
    "libopenblas.0.dylib", "libblis.so.4",      "libblas.so.3",
};

static cpu_blas blas;
static bool found;

/* OpenBLAS knows processors by model. One that is newer than the library gets kernels for AVX2
 * even where it has AVX-512 (half the speed); naming the kernels by hand mends that. */
static bool core_is_underrated(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    return __builtin_cpu_is("amd") && __builtin_cpu_supports("avx512f") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd");
#else
    return false;
#endif
}

/* Open with settings that the library reads when it is loaded. */
static void *library_open(const char *name) {
    static const char core[] = "OPENBLAS_CORETYPE", threads[] = "OPENBLAS_NUM_THREADS";
    bool name_core = core_is_underrated() && getenv(core) == NULL;
    bool name_threads = getenv(threads) == NULL;
    if (name_core) setenv(core, "SkylakeX", 1);
    if (name_threads) setenv(threads, "1", 1);
    void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (name_core) unsetenv(core);
    if (name_threads) unsetenv(threads);
    return library;
}

static void describe(void *library, const char *name) {
    char *(*config)(void) = (char *(*)(void))dlsym(library, "openblas_get_config");
    char *(*core)(void) = (char *(*)(void))dlsym(library, "openblas_get_corename");
    if (config == NULL) {
        snprintf(blas.description, sizeof blas.description, "%s", name);
        return;
    }
    char version[64] = "OpenBLAS";
    sscanf(config(), "%31s", version);
    const char *number = strncmp(config(), "OpenBLAS ", 9) == 0 ? config() + 9 : "";
    snprintf(blas.description, sizeof blas.description, "%s %.*s %s (%s)", version,
             (int)strcspn(number, " "), number, core ? core() : "", name);
}

static void blas_open(void) {
    const char *choice = getenv("MLUA_BLAS");
    if (choice != NULL && strcmp(choice, "none") == 0) return;
    for (size_t i = 0; i < sizeof libraries / sizeof *libraries; i++) {
        void *library = library_open(libraries[i]);
        if (library == NULL) continue;
        blas.sgemm = (cpu_sgemm *)dlsym(library, "sgemm_");
        blas.dgemm = (cpu_dgemm *)dlsym(library, "dgemm_");
        if (blas.sgemm == NULL || blas.dgemm == NULL) {
            dlclose(library);
            continue;
        }
        void (*set_threads)(int) = (void (*)(int))dlsym(library, "openblas_set_num_threads");
        if (set_threads != NULL) set_threads(1); /* the threads are ours */
        describe(library, libraries[i]);
        found = true;
        return; /* stays open: its threads and buffers outlive any device */
    }
}

const cpu_blas *cpu_blas_find(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, blas_open);
    return found ? &blas : NULL;
}
