/* Preloaded, with EMULATOR_HOST=NAME: this process seems to run on a host of that name, so that
 * ranks meet each other as those of several hosts do. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

FILE *fopen(const char *path, const char *mode) {
    static FILE *(*real)(const char *, const char *);
    char *host = getenv("EMULATOR_HOST");
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "fopen");
    if (host && !strcmp(path, "/proc/sys/kernel/random/boot_id"))
        return fmemopen(host, strlen(host), "r");
    return real(path, mode);
}
