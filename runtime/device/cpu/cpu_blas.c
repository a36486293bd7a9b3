/* Finding a BLAS at run time. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/knobs.h"
#include "runtime/device/cpu/cpu_internal.h"

/* A plain libblas is left alone: it is far slower than the built-in kernels. */
static const char *const libraries[] = {"libopenblas.so.0", "libopenblasp.so.0", "libopenblas.so",
                                        "libblis.so.4"};

static cpu_blas blas;
static int chosen = ML_BLAS_FASTER;
static bool found, passed_over;

void cpu_blas_choose(int choice) {
    chosen = choice;
}

/* Open with the one setting that the library reads when it is loaded. */
static void *library_open(const char *name) {
    static const char threads[] = "OPENBLAS_NUM_THREADS";
    bool unset = getenv(threads) == NULL;
    if (unset) setenv(threads, "1", 1);
    void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (unset) unsetenv(threads);
    return library;
}

/* With AVX-512 the built-in kernels are at least as fast as any BLAS that was measured, and twice
 * as fast as an OpenBLAS that is older than the processor and takes it for one with AVX2. */
static bool own_is_faster(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl");
#else
    return false;
#endif
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
    if (chosen == 0) return;
    passed_over = chosen == ML_BLAS_FASTER && own_is_faster();
    if (passed_over) return;
    for (size_t i = 0; i < sizeof libraries / sizeof *libraries; i++) {
        void *library = library_open(libraries[i]);
        if (library == NULL) continue;
        blas.sgemm = (cpu_sgemm *)dlsym(library, "sgemm_");
        blas.dgemm = (cpu_dgemm *)dlsym(library, "dgemm_");
        if (blas.sgemm == NULL || blas.dgemm == NULL) {
            dlclose(library);
            continue;
        }
        describe(library, libraries[i]);
        void (*set_threads)(int) = (void (*)(int))dlsym(library, "openblas_set_num_threads");
        if (set_threads != NULL) set_threads(1); /* the threads are ours */
        found = true;
        return; /* stays open: its threads and buffers outlive any device */
    }
}

const cpu_blas *cpu_blas_find(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, blas_open);
    return found ? &blas : NULL;
}

void cpu_blas_describe(char *out, int size) {
    bool found_one = cpu_blas_find() != NULL;
    const char *text = "mlua's own kernels, for no BLAS was found";
    if (passed_over) text = "mlua's own kernels, which use AVX-512 as well as any BLAS";
    snprintf(out, (size_t)size, "%s", found_one ? blas.description : text);
}
