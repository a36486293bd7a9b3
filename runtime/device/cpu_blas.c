/* Finding a BLAS at run time. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "runtime/base/knobs.h"
#include "runtime/device/cpu.h"

/* A plain libblas is left alone: it is far slower than the built-in kernels. */
static const char *const libraries[] = {"libopenblas.so.0", "libopenblasp.so.0", "libopenblas.so",
                                        "libblis.so.4"};

static cpu_blas blas;
static bool found, passed_over;

/* Open with the one setting that the library reads when it is loaded. */
static void *library_open(const char *name) {
    static const char threads[] = "OPENBLAS_NUM_THREADS";
    bool unset = getenv(threads) == NULL;
    if (unset) setenv(threads, "1", 1);
    void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (unset) unsetenv(threads);
    return library;
}

/* An OpenBLAS that is older than the processor, or told so by OPENBLAS_CORETYPE, uses AVX2 where
 * AVX-512 is there: half the speed, and less than the built-in kernels reach. */
static bool core_is_underrated(void *library) {
#if defined(__x86_64__)
    static const char *const wide[] = {"SkylakeX", "Cooperlake", "Sapphire", "Zen4", "Zen5"};
    char *(*core)(void) = (char *(*)(void))dlsym(library, "openblas_get_corename");
    __builtin_cpu_init();
    if (core == NULL || !__builtin_cpu_supports("avx512f")) return false;
    for (size_t i = 0; i < sizeof wide / sizeof *wide; i++) {
        if (strncasecmp(core(), wide[i], strlen(wide[i])) == 0) return false;
    }
    return true;
#else
    (void)library;
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
    if (!ml_knobs()->blas) return;
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
        passed_over = core_is_underrated(library);
        if (passed_over) {
            dlclose(library);
            return;
        }
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
    static const char own[] = "matrix products on the CPU run on mlua's own kernels";
    if (cpu_blas_find() != NULL) {
        snprintf(out, (size_t)size, "%s", blas.description);
    } else if (passed_over) {
        snprintf(out, (size_t)size, "passed over, for it would use no AVX-512: %s; %s",
                 blas.description, own);
    } else {
        snprintf(out, (size_t)size, "none; %s", own);
    }
}
