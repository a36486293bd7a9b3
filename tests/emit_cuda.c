/* Kernels for CUDA compile; the GPU's tests run them. */
#include <stdio.h>
#include <string.h>

#include "tests/emit_cases.h"
#include "tests/test.h"

enum { MAX_CASES = 64 };

TEST(emit, kernels_for_cuda_compile) {
    char description[128];
    if (ml_jit_cuda_describe(description, sizeof description) != ML_OK) return; /* no NVRTC */
    ml_arena *arena = ml_arena_new();
    ml_target target = {.kind = ML_TARGET_CUDA, .arch = 90, .multiprocessors = 132};
    ml_kernel *kernels[MAX_CASES];
    const void *images[MAX_CASES];
    int64_t sizes[MAX_CASES];
    double tolerance;
    ir_kernel k;
    int count = 0;
    for (; count < MAX_CASES && emit_case(&k, count, &tolerance) != NULL; count++) {
        kernels[count] = ML_NEW(arena, ml_kernel);
        ml_emit(&k.ir, &target, arena, kernels[count]);
        CHECK(kernels[count]->grid[0] > 0 && kernels[count]->block >= 32);
        ir_free(&k);
    }
    ml_pool *pool = ml_pool_new(2);
    ml_jit_cuda *jit;
    ml_status status = ml_jit_cuda_compile(kernels, count, 90, pool, &jit, images, sizes);
    CHECK_TEXT(status == ML_OK ? "" : ml_error_last()->text, "");
    for (int i = 0; i < count && status == ML_OK; i++) CHECK(images[i] != NULL && sizes[i] > 1000);
    ml_jit_cuda_free(jit);
    ml_pool_free(pool);
    ml_arena_free(arena);
}
