/* Runs cuda/ragged_tma.cu on the CPU, through tests/kernels/pair_emulator.hh. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/emit/emulate.h"
#include "tests/kernels/support.h"

/* Shared memory that the kernel declares: TYPE NAME; or TYPE NAME[N]; the first lies behind what is
 * dynamic, others behind that. */
static const char *write_shared(FILE *file, const char *at, int *count) {
    char type[64], name[64], size[16] = "";
    REQUIRE(sscanf(at, "__shared__ %63s %63[^[;][%15[0-9]", type, name, size) >= 2);
    if (*size)
        fprintf(file, "%s (&%s)[%s] = *(%s (*)[%s])", type, name, size, type, size);
    else
        fprintf(file, "%s &%s = *(%s *)", type, name, type);
    fprintf(file, "(arena[blockIdx.x] + DYNAMIC + %d * STATIC)", (*count)++);
    return strchr(at, ';');
}

static void write_source(FILE *file, const ml_kernel *k) {
    static const char dynamic[] = "extern __shared__ uint4 ", own[] = "__shared__ ";
    int shared = 0;
    fprintf(file, "%s\n#include \"tests/kernels/pair_emulator.hh\"\n", ml_prelude(ML_TARGET_C));
    ml_arena *arena = ml_arena_new();
    for (const char *at = ml_kernel_source(k, arena); *at;) {
        if (strncmp(at, dynamic, strlen(dynamic)) == 0) {
            const char *name = at + strlen(dynamic);
            fprintf(file, "uint4 *%.*s = (uint4 *)arena[blockIdx.x]", (int)strcspn(name, "["),
                    name);
            at = strchr(at, ';');
        } else if (strncmp(at, own, strlen(own)) == 0) {
            at = write_shared(file, at, &shared);
        } else
            fputc(*at++, file);
    }
    ml_arena_free(arena);
    fprintf(
        file,
        "namespace %s_kernel { static void enter(const void *a) { %s(*(const arguments *)a); } }\n",
        k->entry, k->entry);
    fprintf(file,
            "extern \"C\" void run_pair(const void *a) { emulated_run(%s_kernel::enter, a); }\n",
            k->entry);
}

/* As tests/kernels/pair_emulator.hh reads it. */
static void write_map(char *to, const ml_tensor_map *map, char *const *memory) {
    int64_t fields[ML_MAP_BYTES / 8] = {(int64_t)(uintptr_t)memory[map->pointer]};
    CHECK_EQ_INT(map->rank, 3);
    const int bytes = ml_dtypes[map->dtype].bytes;
    CHECK(bytes == 1 || bytes == 2);
    CHECK_EQ_INT(map->swizzle, 128);
    CHECK_EQ_INT(map->box[0], 128 / bytes);
    CHECK_EQ_INT(map->box[2], 1);
    for (int i = 0; i < 3; i++) fields[1 + i] = map->size[i], fields[4 + i] = map->stride[i];
    for (int i = 1; i < 3; i++) CHECK(map->stride[i] > 0 && map->stride[i] * bytes % 16 == 0);
    fields[7] = map->box[1], fields[8] = bytes;
    memcpy(to, fields, sizeof fields);
}

static void launch(void *library, const ml_kernel *k, char *const *memory) {
    size_t maps = (size_t)k->map_count * ML_MAP_BYTES;
    char *arguments = aligned_alloc(64, maps + (size_t)(k->pointer_count + 8) / 8 * 64);
    union {
        void *object;
        void (*call)(const void *);
    } symbol = {dlsym(library, "run_pair")};
    REQUIRE(arguments && symbol.object);
    for (int i = 0; i < k->map_count; i++)
        write_map(arguments + i * ML_MAP_BYTES, &k->maps[i], memory);
    memcpy(arguments + maps, memory, sizeof *memory * (size_t)k->pointer_count);
    symbol.call(arguments);
    free(arguments);
}

bool template_emulate_pair(const ml_kernel *kernel, char *const *memory) {
    FILE *file = emulate_source();
    write_source(file, kernel);
    void *library = emulate_load(file);
    if (!library) return false;
    launch(library, kernel, memory);
    dlclose(library);
    return true;
}
