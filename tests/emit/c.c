/* Kernels for the CPU, from hand-made IR, against the interpreter of tests/emit/ir.c. */
#include <stdio.h>
#include <string.h>

#include "tests/emit/cases.h"
#include "tests/test.h"

enum { MAX_CASES = 96 };

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
        for (int i = 0; i < k.ir.inst_count; i++) k.inst[i].quick = false; /* of CUDA alone */
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

/* Sums of random numbers of more keys than fit the scalars: from `key` on, and one of its own. */
static void emit_random_sum(ml_arena *arena, ml_target_kind kind, int key, int last,
                            ml_kernel *kernel, const ml_kernel *const *pair) {
    enum { FIT = ML_MAX_SCALARS - 2 };
    ml_target target = {.kind = kind, .threads = 2, .vector_bytes = 32, .multiprocessors = 4};
    ir_kernel k;
    ir_init(&k, 1, 1, (int64_t[]){8});
    int out = ir_operand(&k, ML_F32, NULL, true), sum = 0;
    for (int i = 0; i <= FIT; i++) {
        int of = ir_const(&k, ML_I64, i < FIT ? key + i : last);
        int x = ir_map(&k, ML_OP_RANDOM, ML_F32, of, ir_index(&k, 0), ML_NO_INST);
        sum = i ? ir_map(&k, ML_OP_ADD, ML_F32, sum, x, ML_NO_INST) : x;
    }
    ir_store(&k, out, sum);
    if (pair)
        ml_kernel_batch(pair, 2, arena, kernel);
    else
        ml_emit(&k.ir, &target, arena, kernel);
    ir_free(&k);
}

/* Parameters of one shape are drawn by one kernel, whose keys are scalars; in one launch, too. */
TEST(emit, keys_are_scalars) {
    ml_arena *arena = ml_arena_new();
    ml_kernel one, other, third, both;
    for (int i = 0; i < 2; i++) {
        const ml_target_kind kind = i ? ML_TARGET_CUDA : ML_TARGET_C;
        emit_random_sum(arena, kind, 1000, 7, &one, NULL);
        emit_random_sum(arena, kind, 2000, 7, &other, NULL);
        emit_random_sum(arena, kind, 1000, 8, &third, NULL);
        CHECK_TEXT(ml_kernel_source(&one, arena), ml_kernel_source(&other, arena));
        CHECK(strcmp(ml_kernel_source(&one, arena), ml_kernel_source(&third, arena)) != 0);
        CHECK_EQ_INT(one.scalar_count, ML_MAX_SCALARS);
        for (int s = 2; s < ML_MAX_SCALARS; s++) {
            CHECK_EQ_INT(one.scalar[s], 1000 + s - 2);
            CHECK_EQ_INT(other.scalar[s], 2000 + s - 2);
        }
    }
    const ml_kernel *const pair[] = {&one, &other};
    emit_random_sum(arena, ML_TARGET_CUDA, 1000, 7, &both, pair);
    const int64_t *of_members = both.table + 1 + ml_batch_capacity(&one);
    for (int m = 0; m < 2; m++)
        for (int s = 0; s < ML_MAX_SCALARS; s++)
            CHECK_EQ_INT(of_members[m * ML_MAX_SCALARS + s], pair[m]->scalar[s]);
    CHECK(strstr(ml_kernel_source(&both, arena), "ml_random_f32(a.s[7], ") != NULL);
    ml_arena_free(arena);
}
