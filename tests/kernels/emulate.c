/* Runs CUDA kernels of the templates on the CPU, through tests/kernels/emulator.hh. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/emit/emulate.h"
#include "tests/kernels/support.h"

/* The kernel's source with dynamic shared memory replaced; the function that runs it. */
static void write_source(FILE *file, const ml_kernel *k) {
    static const char shared[] = "extern __shared__ ";
    ml_arena *arena = ml_arena_new();
    for (const char *at = ml_kernel_source(k, arena); *at;) {
        if (strncmp(at, shared, strlen(shared)) == 0) {
            char type[32], name[64];
            REQUIRE(sscanf(at + strlen(shared), "%31s %63[^[]", type, name) == 2);
            fprintf(file, "%s *%s = (%s *)emulated_shared", type, name, type);
            at = strchr(at, ';');
        } else
            fputc(*at++, file);
    }
    ml_arena_free(arena);
    fprintf(file,
            "namespace %s_kernel { static void enter(void *a) { %s(*(const arguments *)a); } }\n",
            k->entry, k->entry);
}

/* One function for each distinct kernel: ENTRY_emulated(arguments, x, y, block, shared bytes). */
static void write_kernels(FILE *file, ml_kernel *const *kernels, int count) {
    fprintf(file, "#include \"tests/kernels/emulator.hh\"\n%s\n", ml_prelude(ML_TARGET_C));
    for (int i = 0; i < count; i++) {
        bool known = false;
        for (int j = 0; j < i; j++) known |= kernels[j]->key == kernels[i]->key;
        if (known) continue;
        const char *entry = kernels[i]->entry;
        write_source(file, kernels[i]);
        fprintf(file,
                "extern \"C\" void %s_emulated(void *a, unsigned x, unsigned y, unsigned z, int "
                "block, long bytes) { for (blockIdx.z = 0; blockIdx.z < z; blockIdx.z++) "
                "emulated_run(%s_kernel::enter, a, x, y, block, bytes); blockIdx.z = 0; }\n",
                entry, entry);
    }
}

static void launch(void *library, const ml_kernel *k, char *const *memory) {
    char name[64], arguments[(ML_MAX_OPERANDS + ML_MAX_SCALARS) * 8];
    long long scalars[ML_MAX_SCALARS];
    for (int i = 0; i < k->scalar_count; i++) scalars[i] = k->scalar[i];
    memcpy(arguments, memory, sizeof *memory * (size_t)k->pointer_count);
    memcpy(arguments + sizeof *memory * (size_t)k->pointer_count, scalars,
           sizeof *scalars * (size_t)k->scalar_count);
    snprintf(name, sizeof name, "%s_emulated", k->entry);
    union {
        void *object;
        void (*call)(void *, unsigned, unsigned, unsigned, int, long);
    } symbol = {dlsym(library, name)};
    REQUIRE(symbol.object);
    symbol.call(arguments, k->grid[0], k->grid[1], k->grid[2], (int)k->block,
                (long)k->shared_bytes);
}

bool template_emulate(ml_kernel *const *kernels, int count, char *const *memory) {
    FILE *file = emulate_source();
    write_kernels(file, kernels, count);
    void *library = emulate_load(file);
    if (!library) return false;
    for (int i = 0; i < count; i++) launch(library, kernels[i], memory);
    dlclose(library);
    return true;
}
