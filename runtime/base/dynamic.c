#include "runtime/base/dynamic.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

void *ml_dynamic_open(const char *soname) {
    void *library = dlopen(soname, RTLD_NOW | RTLD_LOCAL);
    const char *roots[] = {getenv("CUDA_HOME"), getenv("CUDA_PATH"), "/usr/local/cuda"};
    for (int i = 0; i < 3 && !library; i++) {
        char path[4096];
        if (!roots[i] || !*roots[i]) continue;
        snprintf(path, sizeof path, "%s/lib64/%s", roots[i], soname);
        library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    }
    return library;
}
