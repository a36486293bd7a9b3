/* What `mlua doctor` prints about devices and libraries. */
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "codegen/jit/jit.h"
#include "runtime/base/dynamic.h"
#include "runtime/base/pool.h"
#include "runtime/device/cpu/cpu_internal.h"
#include "runtime/device/device.h"

static void report(ml_text *out, const char *what, bool found, const char *text) {
    ml_text_add(out, "%-12s %s %s\n", what, found ? "ok     " : "missing", text);
}

/* The version that a library returns from a function without arguments. */
typedef struct {
    const char *what, *names[3], *function, *cost;
    int major, minor; /* what one unit of each is in the version's number */
} library;

static const library libraries[] = {
    {"cuBLASLt",
     {"libcublasLt.so.13", "libcublasLt.so.12", NULL},
     "cublasLtGetVersion",
     "needed on GPUs: matrix products",
     10000,
     100},
    {"cuDNN",
     {"libcudnn.so.9", NULL, NULL},
     "cudnnGetVersion",
     "optional: attention on GPUs runs on mlua's own kernels, which are slower",
     10000,
     100},
};

/* The libraries stay open: some free at exit what they allocated when they were opened. */
static void report_library(ml_text *out, const library *l) {
    for (int i = 0; i < 3 && l->names[i] != NULL; i++) {
        void *handle = ml_dynamic_open(l->names[i]);
        if (handle == NULL) continue;
        char text[128];
        size_t (*version)(void) = (size_t(*)(void))dlsym(handle, l->function);
        size_t number = version != NULL ? version() : 0;
        snprintf(text, sizeof text, "%zu.%zu (%s)", number / (size_t)l->major,
                 number % (size_t)l->major / (size_t)l->minor, l->names[i]);
        report(out, l->what, true, text);
        return;
    }
    report(out, l->what, false, l->cost);
}

static void report_device(ml_text *out, const char *what, const char *name) {
    ml_device *device = NULL;
    if (ml_device_open(name, 0, &device) != ML_OK) {
        report(out, what, false, ml_error_last()->text);
        return;
    }
    char description[sizeof device->description];
    memcpy(description, device->description, sizeof description);
    ml_device_close(device); /* before what may raise */
    report(out, what, true, description);
}

static void report_described(ml_text *out, const char *what, ml_status status, const char *text,
                             const char *cost) {
    char line[640];
    snprintf(line, sizeof line, "%s: %.500s", cost, ml_error_last()->text);
    report(out, what, status == ML_OK, status == ML_OK ? text : line);
}

void ml_device_doctor(ml_text *out) {
    char text[512] = "";
    report_device(out, "CPU", "cpu");
    ml_status status = ml_jit_c_describe(text, sizeof text);
    report_described(out, "C compiler", status, text, "needed on the CPU");
    cpu_blas_describe(text, sizeof text);
    report(out, "BLAS", true, text); /* optional: what replaces it is as fast */
    status = ml_cache_path(text, sizeof text);
    report_described(out, "kernel cache", status, text, "kernels are compiled at every start");
    report_device(out, "GPU", "cuda");
#ifdef MLUA_CUDA
    status = ml_jit_cuda_describe(text, sizeof text);
    report_described(out, "NVRTC", status, text, "needed on GPUs");
#endif
    for (size_t i = 0; i < sizeof libraries / sizeof *libraries; i++) {
        report_library(out, &libraries[i]);
    }
#ifdef MLUA_CUDA
    status = ml_cuda_nccl_describe(text, sizeof text);
    report_described(out, "NCCL", status, text, "needed for several GPUs");
#endif
}
