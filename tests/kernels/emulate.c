/* Runs CUDA kernels of the templates on the CPU, through tests/kernels/emulator.hh. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/emit/emulate.h"
#include "tests/kernels/support.h"

/* Which operands of warpgroup products do not have their depth innermost: the instruction's last
 * two immediates. */
static void flat_operands(const char *text, bool flat[2]) {
    static const char before[] = "%128, %129, p, 1, 1, ";
    const char *at = strstr(text, before);
    int left, right;
    REQUIRE(at && sscanf(at + strlen(before), "%d, %d", &left, &right) == 2);
    flat[0] = left, flat[1] = right;
}

/* The kernel's source with dynamic shared memory and PTX (and quick functions) replaced. */
static void write_source(FILE *file, const ml_kernel *k) {
    static const char shared[] = "extern __shared__ ", ptx[] = "/* PTX */",
                      ptx_end[] = "/* end of PTX */", wgmma[] = "/* WGMMA */",
                      wgmma_end[] = "/* end of WGMMA */";
    ml_arena *arena = ml_arena_new();
    for (const char *at = ml_kernel_source(k, arena); *at;) {
        if (strncmp(at, shared, strlen(shared)) == 0) {
            char type[32], name[64];
            REQUIRE(sscanf(at + strlen(shared), "%31s %63[^[]", type, name) == 2);
            fprintf(file, "%s *%s = (%s *)emulated_shared", type, name, type);
            at = strchr(at, ';');
        } else if (strncmp(at, ptx, strlen(ptx)) == 0) {
            fprintf(file, "EMULATED_PTX(%s)\n", k->entry);
            at = strstr(at, ptx_end) + strlen(ptx_end);
        } else if (strncmp(at, wgmma, strlen(wgmma)) == 0) {
            bool flat[2];
            flat_operands(at, flat);
            fprintf(file, "EMULATED_WGMMA(%s, %d, %d)\n", k->entry, flat[0], flat[1]);
            at = strstr(at, wgmma_end) + strlen(wgmma_end);
        } else
            fputc(*at++, file);
    }
    ml_arena_free(arena);
}

/* Whether it is of a file (codegen/kernels/files.h): in a namespace of its own. */
static bool is_file(const ml_kernel *k) {
    ml_arena *arena = ml_arena_new();
    bool found = strstr(ml_kernel_source(k, arena), "namespace NAME(kernel) {") != NULL;
    ml_arena_free(arena);
    return found;
}

static void write_enter(FILE *file, const char *entry, bool file_kernel) {
    if (file_kernel)
        fprintf(
            file,
            "namespace %s_kernel { static void enter(void *a) { %s(*(const arguments *)a); } }\n"
            "static void %s_enter(void *a) { %s_kernel::enter(a); }\n",
            entry, entry, entry, entry);
    else
        fprintf(file, "static void %s_enter(void *a) { %s(*(const %s_arguments *)a); }\n", entry,
                entry, entry);
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
        write_enter(file, entry, is_file(kernels[i]));
        fprintf(file,
                "extern \"C\" void %s_emulated(void *a, unsigned x, unsigned y, int block, long "
                "bytes) { emulated_run(%s_enter, a, x, y, block, bytes); }\n",
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
        void (*call)(void *, unsigned, unsigned, int, long);
    } symbol = {dlsym(library, name)};
    REQUIRE(symbol.object);
    CHECK_EQ_INT(k->grid[2], 1);
    symbol.call(arguments, k->grid[0], k->grid[1], (int)k->block, (long)k->shared_bytes);
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
