/* Opening a device by its name. */
#include "runtime/device/device.h"

#include <stdio.h>
#include <string.h>

#include "codegen/jit/jit.h"
#include "runtime/base/knobs.h"

void ml_device_jit_options(void) {
    const ml_knobs_values *k = ml_knobs();
    ml_jit_set_options(
        &(ml_jit_options){.keep = k->keep, .cache = k->cache, .compilers = k->compilers});
}

static ml_status open_named(const ml_device_ops *ops, int ordinal, ml_device **device) {
    const ml_knobs_values *k = ml_knobs();
    const ml_device_options options = {
        .threads = k->threads,
        .check = k->check != NULL,
        .tune = k->tune,
        .peer = k->peer,
        .graphs = k->graphs,
        .hosts = k->hosts,
        .blas = k->blas,
        .runs = k->runs,
        .debug = k->debug,
    };
    ml_device_jit_options();
    ml_status status = ops->open(device, ordinal, &options);
    if (status == ML_OK) {
        (*device)->options = options;
        ml_debug(1, "device %s: %s\n", ops->name, (*device)->description);
        if (options.debug < 2 || ml_device_profile(*device) == ML_OK) return ML_OK;
        ops->close(*device);
        *device = NULL;
        return ml_error_last()->status;
    }
    ml_debug(1, "no device %s: %s\n", ops->name, ml_error_last()->text);
    *device = NULL;
    return status;
}

static ml_status find_cuda(void) {
#ifdef MLUA_CUDA
    return ml_cuda_find();
#else
    ml_fail(ML_DEVICE, "this mlua was built without CUDA, so there is no device \"cuda\"");
    return ml_help("install the CUDA toolkit's headers and build again, or use --device cpu");
#endif
}

static ml_status open_cuda(int ordinal, ml_device **device) {
#ifdef MLUA_CUDA
    return open_named(&ml_device_cuda, ordinal, device);
#else
    (void)ordinal, (void)device;
    return find_cuda();
#endif
}

ml_status ml_device_find(const char *name) {
    return name != NULL && strcmp(name, "cuda") == 0 ? find_cuda() : ML_OK;
}

ml_status ml_device_open(const char *name, int ordinal, ml_device **device) {
    *device = NULL;
    if (name == NULL) {
        if (open_cuda(ordinal, device) == ML_OK) return ML_OK;
#ifdef MLUA_CUDA
        if (!ml_cuda_absent())
            fprintf(stderr, "mlua: the CPU serves, because the GPU cannot: %s\n",
                    ml_error_last()->text);
#endif
        return open_named(&ml_device_cpu, 0, device);
    }
    if (strcmp(name, "cpu") == 0) return open_named(&ml_device_cpu, ordinal, device);
    if (strcmp(name, "null") == 0) return open_named(&ml_device_null, ordinal, device);
    if (strcmp(name, "cuda") == 0) return open_cuda(ordinal, device);
    ml_fail(ML_INVALID, "there is no device \"%s\"", name);
    return ml_help("devices are cpu, cuda and null");
}

ml_status ml_device_profile(ml_device *device) {
    if (device->profile != NULL) return ML_OK;
    device->profile = ml_profile_new(device->options.debug >= 2);
    return device->profile ? ML_OK : ml_fail(ML_NO_MEMORY, "out of memory for a profile");
}

void ml_device_close(ml_device *device) {
    if (device == NULL) return;
    ml_profile *profile = device->profile;
    device->ops->close(device);
    ml_profile_free(profile);
}
