#include "vm/serve/library.h"

#include <dlfcn.h>

#include "runtime/base/dynamic.h"

static const char *const package = "install libmicrohttpd12 (Debian, Ubuntu: apt install "
                                   "libmicrohttpd12) or what your distribution calls it";

ml_status http_library_open(const http_library **library) {
    static http_library calls;
    *library = &calls;
    if (calls.start_daemon) return ML_OK;
    void *handle = ml_dynamic_open("libmicrohttpd.so.12");
    if (!handle) handle = ml_dynamic_open("libmicrohttpd.so");
    if (!handle) {
        ml_fail(ML_DEVICE, "mlua serve needs libmicrohttpd, which is not on this machine");
        return ml_help("%s", package);
    }
    http_library found;
    const char *missing = NULL;
#define HTTP_FIND(name)                                                                            \
    if (!((found.name) = (__typeof__(found.name))dlsym(handle, "MHD_" #name))) missing = #name;
    HTTP_CALLS(HTTP_FIND)
#undef HTTP_FIND
    if (missing) {
        ml_fail(ML_DEVICE, "this machine's libmicrohttpd has no MHD_%s", missing);
        return ml_help("mlua needs version 0.9.71 or later");
    }
    calls = found;
    return ML_OK;
}
