#include "tests/emit/emulate.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "codegen/jit/cache.h"
#include "tests/test.h"

enum { PATH_SIZE = 1024 };
/* <math.h> is C's: to read <cmath> takes a quarter of a second, and kernels name no overloads. */
static const char command[] = "c++ -std=c++17 -O1 -w -Wno-psabi -fPIC -shared -pthread "
                              "-fno-strict-aliasing -fwrapv -I. -D_GLIBCXX_INCLUDE_NEXT_C_HEADERS";
/* What sources include. */
static const char *const headers[] = {"tests/emit/cuda_emulator.hh", "tests/kernels/emulator.hh",
                                      "tests/kernels/pair_emulator.hh", "tests/emulator/casts.hh"};

static char *source_text;
static size_t source_size;

/* The compiler's version; "" where there is none. */
static const char *compiler(void) {
    static char version[256];
    FILE *pipe = *version ? NULL : popen("c++ --version 2>/dev/null", "r");
    if (pipe && !fgets(version, sizeof version, pipe)) *version = 0;
    if (pipe) pclose(pipe);
    return version;
}

void emulate_need(void) {
    if (!*compiler()) test_skip("emulated kernels take a C++ compiler, and there is no c++");
}

FILE *emulate_source(void) {
    FILE *file = open_memstream(&source_text, &source_size);
    REQUIRE(file);
    return file;
}

static void find_key(uint64_t key[2]) {
    for (int k = 0; k < 2; k++) {
        key[k] = ml_hash(source_text, source_size, (uint64_t)k + 1);
        key[k] = ml_hash(command, sizeof command, key[k]);
        key[k] = ml_hash(compiler(), strlen(compiler()), key[k]);
    }
    for (size_t i = 0; i < sizeof headers / sizeof *headers; i++) {
        void *text;
        int64_t size;
        ML_CHECK(cache_read_file(headers[i], &text, &size));
        for (int k = 0; k < 2; k++) key[k] = ml_hash(text, (size_t)size, key[k]);
        ml_free(text);
    }
}

static bool compile(uint64_t key[2]) {
    char source[PATH_SIZE], object[PATH_SIZE], line[3 * PATH_SIZE];
    ML_CHECK(cache_temporary("cc", source, sizeof source));
    ML_CHECK(cache_temporary("so", object, sizeof object));
    FILE *file = fopen(source, "w");
    REQUIRE(file);
    REQUIRE(fwrite(source_text, 1, source_size, file) == source_size && fclose(file) == 0);
    snprintf(line, sizeof line, "%s -o '%s' '%s'", command, object, source);
    void *bytes;
    int64_t size;
    bool good = system(line) == 0 && cache_read_file(object, &bytes, &size) == ML_OK;
    if (good) {
        good = ml_cache_write(key, "emulated", bytes, size) == ML_OK;
        ml_free(bytes);
    }
    unlink(source);
    unlink(object);
    return good;
}

/* As the cache has it; NULL where it does not. */
static void *load(uint64_t key[2]) {
    char path[PATH_SIZE];
    void *bytes;
    int64_t size;
    if (ml_cache_read(key, "emulated", &bytes, &size) != ML_OK) return NULL;
    ml_free(bytes);
    if (ml_cache_file(key, "emulated", path, sizeof path) != ML_OK) return NULL;
    return dlopen(path, RTLD_NOW | RTLD_LOCAL);
}

void *emulate_load(FILE *source) {
    uint64_t key[2];
    fclose(source);
    find_key(key);
    void *object = load(key);
    if (!object && compile(key)) object = load(key);
    free(source_text);
    EXPECT(object, "emulated kernels do not compile");
    return object;
}
