/* Kernels for the CPU, from hand-made IR, against the interpreter of emit_ir.c. */
#include <stdio.h>

#include "tests/emit_cases.h"
#include "tests/test.h"

enum { MAX_CASES = 64 };

typedef struct {
    ml_c_function *function;
    int parts;
} parts_run;

/* In several calls, last part first: units may run in any order. */
static void run_parts(void *context, const ml_kernel *kernel, char **pointers,
                      const long long *scalars) {
    const parts_run *run = context;
    for (int i = run->parts - 1; i >= 0; i--)
        run->function(pointers, scalars, i * kernel->units / run->parts,
                      (i + 1) * kernel->units / run->parts);
}

TEST(emit, kernels_for_the_cpu) {
    ml_arena *arena = ml_arena_new();
    ml_target target = {.kind = ML_TARGET_C, .threads = 2, .vector_bytes = 32};
    ml_kernel *kernels[MAX_CASES];
    ml_c_function *functions[MAX_CASES];
    ir_kernel k;
    double tolerance;
    const char *name;
    int count = 0;
    for (; emit_case(&k, count, &tolerance) != NULL; count++) {
        kernels[count] = ML_NEW(arena, ml_kernel);
        ml_emit(&k.ir, &target, arena, kernels[count]);
        ir_free(&k);
    }
    ml_pool *pool = ml_pool_new(2);
    ml_jit_c *jit;
    ml_status status = ml_jit_c_load(kernels, count, pool, &jit, functions);
    CHECK_TEXT(status == ML_OK ? "" : ml_error_last()->text, "");
    for (int i = 0; status == ML_OK && (name = emit_case(&k, i, &tolerance)) != NULL; i++) {
        parts_run run = {functions[i], 1 + i % 4};
        double worst = ir_compare(&k, kernels[i], run_parts, &run);
        if (!(worst <= tolerance)) fprintf(stderr, "%s: off by %g\n", name, worst);
        CHECK(worst <= tolerance);
        ir_free(&k);
    }
    ml_jit_c_free(jit);
    ml_pool_free(pool);
    ml_arena_free(arena);
}
