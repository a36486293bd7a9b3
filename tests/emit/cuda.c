/* Kernels for CUDA: NVRTC compiles them (where there is one), and their threads, run by the
 * emulator of cuda_emulator.hh (where there is a C++ compiler), compute what the interpreter does.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/emit/cases.h"
#include "tests/emit/emulate.h"
#include "tests/test.h"

enum { MAX_CASES = 96 };

/* Bytes of the shared arrays that a kernel declares; GPUs take 48 KiB. */
static long declared_shared(const char *source) {
    long bytes = 0, count;
    char type[32];
    for (const char *at = source; (at = strstr(at, "\n__shared__ ")) != NULL; at++)
        if (sscanf(at, "\n__shared__ %31s %*[a-z0-9_ ][%ld]", type, &count) == 2)
            bytes += count * (strcmp(type, "uint4") == 0                                 ? 16
                              : strcmp(type, "double") == 0 || strcmp(type, "long") == 0 ? 8
                                                                                         : 4);
    return bytes;
}

/* Whether several teams of a block meet at barriers by number, which leaves a multiprocessor room
 * for four such blocks. */
static bool meets_by_number(const char *source) {
    int team, threads;
    for (const char *at = source; (at = strstr(at, "ml_team_sync<")) != NULL; at++)
        if (sscanf(at, "ml_team_sync<%d, %d>", &team, &threads) == 2 && team > 32 &&
            team != threads)
            return true;
    return false;
}

static int emit_all(ml_arena *arena, ml_kernel **kernels) {
    ml_target target = {.kind = ML_TARGET_CUDA, .arch = 90, .multiprocessors = 132};
    double tolerance;
    ir_kernel k;
    int count = 0;
    for (; count < MAX_CASES && emit_case(&k, count, &tolerance) != NULL; count++) {
        kernels[count] = ML_NEW(arena, ml_kernel);
        ml_emit(&k.ir, &target, arena, kernels[count]);
        CHECK(kernels[count]->grid[0] > 0);
        /* whole warps: else lanes that are not there take part in sums over blocks */
        CHECK(kernels[count]->block % 32 == 0 || kernels[count]->block < 32);
        CHECK(declared_shared(ml_kernel_source(kernels[count], arena)) <= 48 << 10);
        CHECK(k.ir.chunks > 0 || !meets_by_number(ml_kernel_source(kernels[count], arena)));
        ir_free(&k);
    }
    CHECK(count < MAX_CASES); /* else cases may be left out */
    return count;
}

/* A sum takes fewer registers from pass to pass than what it is made of. */
TEST(emit, sums_wait_in_place_of_packs) {
    ml_target target = {.kind = ML_TARGET_CUDA, .arch = 90, .multiprocessors = 132};
    ml_arena *arena = ml_arena_new();
    const char *name;
    double tolerance;
    ir_kernel k;
    int found = 0;
    for (int i = 0; (name = emit_case(&k, i, &tolerance)) != NULL; i++) {
        ml_kernel kernel = {0};
        bool wanted = strcmp(name, "norm of a sum, row by row") == 0;
        if (wanted) ml_emit(&k.ir, &target, arena, &kernel);
        if (wanted) CHECK(strstr(ml_kernel_source(&kernel, arena), "float k") != NULL);
        found += wanted;
        ir_free(&k);
    }
    CHECK(found == 1);
    ml_arena_free(arena);
}

/* Of every third kernel that may share its launch and of those that cut columns, one of two of it;
 * NULL in the others' places. */
static int emit_pairs(ml_arena *arena, ml_kernel **kernels) {
    int count = emit_all(arena, kernels), joined = 0, tiled = 0;
    for (int i = 0; i < count; i++) {
        const ml_kernel *members[2] = {kernels[i], kernels[i]};
        kernels[i] = NULL;
        bool cuts = strstr(ml_kernel_source(members[0], arena), "const int tile =") != NULL;
        if (ml_batch_capacity(members[0]) < 2 || (++joined % 3 != 0 && !cuts)) continue;
        tiled += cuts;
        kernels[i] = ML_NEW(arena, ml_kernel);
        ml_kernel_batch(members, 2, arena, kernels[i]);
        CHECK(kernels[i]->grid[0] == 2 * members[0]->grid[0]);
    }
    CHECK(joined > 5 && tiled > 1);
    return count;
}

TEST(emit, kernels_for_cuda_compile) {
    char description[128];
    if (ml_jit_cuda_describe(description, sizeof description) != ML_OK)
        test_skip("%s", ml_error_last()->text);
    ml_arena *arena = ml_arena_new();
    ml_kernel *kernels[MAX_CASES];
    const void *images[MAX_CASES];
    int64_t sizes[MAX_CASES];
    int all = emit_all(arena, kernels), count = 0;
    /* every third one; the emulator compiles all of them */
    for (int i = 0; i < all; i += test_all() ? 1 : 3) kernels[count++] = kernels[i];
    ml_pool *pool = ml_pool_new(2);
    ml_jit_cuda *jit;
    ml_jit_cuda_share(1, 3); /* the second of three processes: it begins elsewhere */
    ml_status status = ml_jit_cuda_compile(kernels, count, 90, pool, &jit, images, sizes);
    ml_jit_cuda_share(0, 1);
    CHECK_TEXT(status == ML_OK ? "" : ml_error_last()->text, "");
    for (int i = 0; i < count && status == ML_OK; i++) CHECK(images[i] != NULL && sizes[i] > 1000);
    ml_jit_cuda_free(jit);
    ml_pool_free(pool);
    ml_arena_free(arena);
}

/* PTX that the kernels contain, and what the emulator has in its place. */
static const char *const spellings[][2] = {
    {"asm(\"cvt.rn.bf16.f32 %0, %1;\" : \"=h\"(h.bits) : \"f\"(x))", "h.bits = emulated_bf16(x)"},
    {"asm(\"max.NaN.f32 %0, %1, %2;\" : \"=f\"(r) : \"f\"(a), \"f\"(b))", "r = emulated_max(a, b)"},
    {"asm(\"min.NaN.f32 %0, %1, %2;\" : \"=f\"(r) : \"f\"(a), \"f\"(b))", "r = emulated_min(a, b)"},
    {"asm(\"max.NaN.bf16x2 %0, %1, %2;\" : \"=r\"(r) : \"r\"(a), \"r\"(b))",
     "r = emulated_max2(a, b)"},
    {"asm(\"ex2.approx.ftz.f32 %0, %1;\" : \"=f\"(r) : \"f\"(x))", "r = emulated_exp2(x)"},
    {"asm(\"tanh.approx.f32 %0, %1;\" : \"=f\"(r) : \"f\"(x))", "r = emulated_tanh(x)"},
    {"asm(\"cvt.rn.bf16x2.f32 %0, %1, %2;\" : \"=r\"(q.word[0]) : \"f\"(v[1]), \"f\"(v[0]))",
     "q.word[0] = emulated_bf16(v[1]) << 16 | emulated_bf16(v[0])"},
    {"asm(\"cvt.rn.f16x2.f32 %0, %1, %2;\" : \"=r\"(q.word[0]) : \"f\"(v[1]), \"f\"(v[0]))",
     "q.word[0] = emulated_f16(v[1]) << 16 | emulated_f16(v[0])"},
    {"asm(\"cvt.f32.f16 %0, %1;\" : \"=f\"(x) : \"h\"(h.bits))", "x = emulated_of_f16(h.bits)"},
    {"asm(\"cvt.rn.f16.f32 %0, %1;\" : \"=h\"(h.bits) : \"f\"(x))", "h.bits = emulated_f16(x)"},
    {"asm(\"cvt.rn.bf16x2.f32 %0, %1, %2;\" : \"=r\"(r) : \"f\"(x), \"f\"(0.0f))",
     "r = emulated_bf16(x) << 16"},
    {"asm(\"cvt.rn.f16x2.f32 %0, %1, %2;\" : \"=r\"(q.word[i]) : \"f\"(v[2 * i + 1]), \"f\"(v[2 * "
     "i]))",
     "q.word[i] = emulated_f16(v[2 * i + 1]) << 16 | emulated_f16(v[2 * i])"},
    {"asm(\"{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h; }\" : \"=f\"(r) : "
     "\"r\"(word))",
     "r = emulated_of_f16(word >> 16)"},
    {"asm(\"{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l; }\" : \"=f\"(r) : "
     "\"r\"(word))",
     "r = emulated_of_f16(word & 0xffff)"},
    {"extern \"C\" __global__", "static"},
    {"extern __shared__ uint4 shared[];", "static uint4 shared[16384];"},
    {"asm volatile(\"cp.async.cg.shared.global [%0], [%1], 16, %2;\" : : "
     "\"r\"((unsigned)__cvta_generic_to_shared(to)), \"l\"(from), \"r\"(16) : \"memory\")",
     "*(uint4 *)to = *(const uint4 *)from"},
    {"asm volatile(\"cp.async.commit_group;\" ::: \"memory\")", "(void)0"},
    {"asm volatile(\"cp.async.wait_group 0;\" ::: \"memory\")", "(void)0"},
    {"asm volatile(\"cp.async.wait_group 1;\" ::: \"memory\")", "(void)0"},
    {"asm volatile(\"cp.async.wait_group 2;\" ::: \"memory\")", "(void)0"},
    {"asm volatile(\"cp.async.wait_group 3;\" ::: \"memory\")", "(void)0"},
    {"asm volatile(\"bar.sync %0, %1;\" : : \"r\"(team + 1), \"n\"(TEAM) : \"memory\")",
     "emulated_barrier(team + 1, TEAM)"},
};

/* How much of `text` is this spelling, however it is spaced; 0: it is not. */
static size_t spelled(const char *text, const char *spelling) {
    static const char space[] = " \n";
    const char *at = text;
    for (; *spelling; spelling++) {
        if (strchr(space, *spelling)) continue;
        if (at > text) at += strspn(at, space);
        if (*at++ != *spelling) return 0;
    }
    return (size_t)(at - text);
}

static void write_emulated(FILE *file, const char *text) {
    while (*text != 0) {
        size_t length = 0;
        for (size_t i = 0; i < sizeof spellings / sizeof *spellings && length == 0; i++) {
            length = spelled(text, spellings[i][0]);
            if (length > 0) fputs(spellings[i][1], file);
        }
        if (length == 0) fputc(*text, file);
        text += length > 0 ? length : 1;
    }
}

/* Every kernel in a namespace of its own, with a function that launches it. */
static void *load_emulated(ml_arena *arena, ml_kernel **kernels, int count) {
    FILE *file = emulate_source();
    fputs("#include \"tests/emit/cuda_emulator.hh\"\n", file);
    write_emulated(file, ml_prelude(ML_TARGET_CUDA));
    for (int i = 0; i < count; i++) {
        if (kernels[i] == NULL) continue;
        fprintf(file, "#undef ml_exp_f32\n#undef ml_sigmoid_f32\n#undef ml_tanh_f32\n");
        fprintf(file, "namespace kernel%d {\n", i);
        write_emulated(file, ml_kernel_source(kernels[i], arena));
        fprintf(file,
                "static void enter(void *a) { %s(*(const ml_arguments *)a); }\nextern \"C\" void "
                "launch%d(void *a) { emulated_launch(enter, a, %u, %u, %u); }\n}\n",
                kernels[i]->entry, i, kernels[i]->grid[0], kernels[i]->grid[1], kernels[i]->block);
    }
    return emulate_load(file);
}

static void run_emulated(void *context, const ml_kernel *kernel, char **pointers,
                         const long long *scalars) {
    char arguments[(ML_MAX_OPERANDS + ML_MAX_SCALARS) * 8];
    size_t bytes = sizeof *pointers * (size_t)kernel->pointer_count;
    memcpy(arguments, pointers, bytes);
    memcpy(arguments + bytes, scalars, sizeof *scalars * (size_t)kernel->scalar_count);
    union {
        void *object;
        void (*launch)(void *);
    } symbol = {context};
    symbol.launch(arguments);
}

/* A pair on the memory of two cases, both of which must come out right. */
typedef struct {
    void *launch;
    ir_kernel *twin;
} pair_run;

static void run_pair(void *context, const ml_kernel *kernel, char **pointers,
                     const long long *scalars) {
    const pair_run *run = context;
    const ir_kernel *twin = run->twin;
    uint64_t arguments[512] = {0};
    int reads = 0, count = twin->ir.operand_count;
    if (kernel->table_count == 0) {
        run_emulated(run->launch, kernel, pointers, scalars);
        return;
    }
    while (reads < count && !twin->ir.operand[reads].written) reads++;
    for (int i = 0; i < count; i++) {
        int width = ml_dtypes[twin->ir.operand[i].dtype].bytes;
        int each = i < reads ? reads : count - reads;
        char *other = (char *)twin->memory[i] + twin->offset[i] * width;
        int at = i < reads ? i : reads + i;
        memcpy(&arguments[at], &pointers[i], 8);
        memcpy(&arguments[at + each], &other, 8);
    }
    memcpy(arguments + kernel->pointer_count, kernel->table, 8 * (size_t)kernel->table_count);
    union {
        void *object;
        void (*launch)(void *);
    } symbol = {run->launch};
    symbol.launch(arguments);
}

static double compare_pair(ir_kernel *k, const ml_kernel *kernel, void *launch, int number) {
    double tolerance;
    ir_kernel twin;
    emit_case(&twin, number, &tolerance);
    pair_run run = {launch, &twin};
    double worst = ir_compare(k, kernel, run_pair, &run);
    for (int i = 0; i < k->ir.operand_count && kernel->table_count > 0; i++) {
        size_t bytes = (size_t)(k->elements[i] * ml_dtypes[k->ir.operand[i].dtype].bytes);
        CHECK(memcmp(k->memory[i], twin.memory[i], bytes) == 0);
    }
    ir_free(&twin);
    return worst;
}

static void check_emulated(int emit(ml_arena *arena, ml_kernel **kernels)) {
    emulate_need();
    char name[32];
    ml_kernel *kernels[MAX_CASES];
    ml_arena *arena = ml_arena_new();
    int count = emit(arena, kernels);
    void *library = load_emulated(arena, kernels, count);
    for (int i = 0; i < count && library != NULL; i++) {
        if (kernels[i] == NULL) continue;
        ir_kernel k;
        double tolerance;
        const char *label = emit_case(&k, i, &tolerance);
        snprintf(name, sizeof name, "launch%d", i);
        double worst = compare_pair(&k, kernels[i], dlsym(library, name), i);
        if (!(worst <= tolerance)) fprintf(stderr, "%s: off by %g\n", label, worst);
        CHECK(worst <= tolerance);
        ir_free(&k);
    }
    if (library != NULL) dlclose(library);
    ml_arena_free(arena);
}

TEST(emit, kernels_for_cuda_emulated) {
    check_emulated(emit_all);
}

TEST(emit, pairs_for_cuda_emulated) {
    check_emulated(emit_pairs);
}
