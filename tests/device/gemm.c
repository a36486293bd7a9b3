/* Matrix products on the CPU: every layout, dtype, batch and edge, against plain loops. Operands
 * are small integers, so that results are exact in f32 and f64. */
#include <math.h>
#include <string.h>

#include "runtime/device/cpu/cpu_few.h"
#include "runtime/device/cpu/cpu_internal.h"
#include "runtime/device/cpu/cpu_kernel.h"
#include "runtime/graph/convert.h"
#include "tests/device/products.h"

static void batch_strides(const ml_gemm *g, int64_t each, int64_t *stride) {
    for (int d = ML_GEMM_BATCHES - 1; d >= 0; d--) {
        stride[d] = each;
        each *= g->batch[d];
    }
}

static ml_gemm random_gemm(world *w, int64_t sizes[3]) {
    static const ml_dtype dtypes[] = {ML_F32, ML_F64, ML_BF16};
    ml_gemm g = {
        .m = pick(w, 1, 70), .n = pick(w, 1, 70), .k = pick(w, 1, 300), .batch = {1, 1, 1}};
    if (pick(w, 0, 7) == 0) g.m = 1;
    if (pick(w, 0, 7) == 0) g.n = 1;
    if (pick(w, 0, 7) == 0) g.k = pick(w, 0, 1);
    if (pick(w, 0, 19) == 0) g.m = 300, g.n = 200;
    for (int d = 0; d < ML_GEMM_BATCHES; d++) g.batch[d] = pick(w, 0, 2) ? 1 : pick(w, 1, 4);
    g.a_dtype = g.b_dtype = g.c_dtype = dtypes[pick(w, 0, 2)];
    if (g.a_dtype == ML_BF16 && pick(w, 0, 1)) g.c_dtype = ML_F32;
    g.accumulate = pick(w, 0, 2) == 0;
    sizes[0] = layout(w, g.m, g.k, &g.a_row, &g.a_col);
    sizes[1] = layout(w, g.k, g.n, &g.b_row, &g.b_col);
    sizes[2] = layout(w, g.m, g.n, &g.c_row, &g.c_col);
    batch_strides(&g, sizes[0], g.a_batch);
    batch_strides(&g, sizes[1], g.b_batch);
    batch_strides(&g, sizes[2], g.c_batch);
    if (pick(w, 0, 2) == 0) memset(g.b_batch, 0, sizeof g.b_batch);
    if (pick(w, 0, 9) == 0) g.a_row = 0; /* what BLAS cannot address */
    return g;
}

static double expected_element(const ml_gemm *g, const void *a, const void *b, int64_t a_at,
                               int64_t b_at, int64_t i, int64_t j) {
    double sum = 0;
    for (int64_t p = 0; p < g->k; p++) {
        sum += ops_fetch(g->a_dtype, a, a_at + i * g->a_row + p * g->a_col) *
               ops_fetch(g->b_dtype, b, b_at + p * g->b_row + j * g->b_col);
    }
    return sum;
}

static int check_item(const ml_gemm *g, const void *a, const void *b, const void *before,
                      const void *after, const int64_t at[3]) {
    int wrong = 0;
    double tolerance = g->c_dtype == ML_BF16 ? 4e-3 : 0;
    for (int64_t i = 0; i < g->m; i++) {
        for (int64_t j = 0; j < g->n; j++) {
            int64_t c = at[2] + i * g->c_row + j * g->c_col;
            double value = expected_element(g, a, b, at[0], at[1], i, j);
            if (g->accumulate) value += ops_fetch(g->c_dtype, before, c);
            wrong += !(fabs(ops_fetch(g->c_dtype, after, c) - value) <= tolerance * fabs(value));
        }
    }
    return wrong;
}

static void check_gemm(world *w) {
    int64_t sizes[3];
    ml_gemm g = random_gemm(w, sizes);
    int64_t items = g.batch[0] * g.batch[1] * g.batch[2], count = sizes[2] * items;
    void *a = fill(w, g.a_dtype, sizes[0] * items, false);
    void *b = fill(w, g.b_dtype, sizes[1] * items, false);
    void *c = fill(w, g.c_dtype, count, !g.accumulate);
    void *before = ml_arena_copy(w->arena, c, (size_t)(count * ml_dtypes[g.c_dtype].bytes));
    int threads = ml_pool_threads(w->pool), wrong = 0;
    char *scratch = scratch_of(w, cpu_gemm_scratch(&g, threads));
    CHECK_STATUS(cpu_gemm_run(&g, a, b, c, NULL, scratch, w->pool), ML_OK);
    for (int64_t item = 0; item < items; item++) {
        int64_t z = item % g.batch[2], y = item / g.batch[2] % g.batch[1];
        int64_t x = item / g.batch[2] / g.batch[1], at[3];
        at[0] = x * g.a_batch[0] + y * g.a_batch[1] + z * g.a_batch[2];
        at[1] = x * g.b_batch[0] + y * g.b_batch[1] + z * g.b_batch[2];
        at[2] = x * g.c_batch[0] + y * g.c_batch[1] + z * g.c_batch[2];
        wrong += check_item(&g, a, b, before, c, at);
    }
    EXPECT(wrong == 0, "%d elements of a %s product %lld x %lld x %lld are wrong", wrong,
           ml_dtypes[g.a_dtype].name, (long long)g.m, (long long)g.n, (long long)g.k);
}

TEST(device, gemm) {
    world w = {.random = 11, .pool = ml_pool_new(2)};
    for (int i = 0; i < 120; i++) {
        w.arena = ml_arena_new();
        check_gemm(&w);
        ml_arena_free(w.arena);
    }
    ml_pool_free(w.pool);
}

/* One product by pools of 1, 2, 3 and 5 threads: equal to the bit, on operands whose sums round. */
static void check_threads(world *w) {
    static const int counts[] = {1, 2, 3, 5};
    static const int64_t sides[] = {32, 48, 256, 257, 600};
    ml_gemm g = {.m = sides[pick(w, 0, 4)],
                 .n = sides[pick(w, 0, 4)],
                 .k = pick(w, 20, 300),
                 .batch = {1, 1, pick(w, 1, 3)},
                 .a_col = 1,
                 .b_col = 1,
                 .c_col = 1,
                 .a_dtype = ML_F32,
                 .b_dtype = ML_F32,
                 .c_dtype = ML_F32};
    g.a_row = g.k, g.b_row = g.c_row = g.n;
    batch_strides(&g, g.m * g.k, g.a_batch);
    batch_strides(&g, g.k * g.n, g.b_batch);
    batch_strides(&g, g.m * g.n, g.c_batch);
    int64_t items = g.batch[2], count = g.m * g.n * items;
    float *a = fill(w, ML_F32, g.m * g.k * items, false);
    float *b = fill(w, ML_F32, g.k * g.n * items, false);
    for (int64_t i = 0; i < g.m * g.k * items; i++) a[i] /= 7;
    for (int64_t i = 0; i < g.k * g.n * items; i++) b[i] /= 11;
    float *c[4];
    for (int i = 0; i < 4; i++) {
        ml_pool *pool = ml_pool_new(counts[i]);
        char *scratch = scratch_of(w, cpu_gemm_scratch(&g, counts[i]));
        c[i] = fill(w, ML_F32, count, true);
        CHECK_STATUS(cpu_gemm_run(&g, a, b, c[i], NULL, scratch, pool), ML_OK);
        ml_pool_free(pool);
        CHECK(memcmp(c[i], c[0], (size_t)count * sizeof(float)) == 0);
    }
}

TEST(device, gemm_threads) {
    world w = {.random = 13};
    for (int i = 0; i < 40; i++) {
        w.arena = ml_arena_new();
        check_threads(&w);
        ml_arena_free(w.arena);
    }
}

/* The built-in kernels, whichever BLAS there is; shapes that cross their blocks. */
static void check_kernel(world *w, ml_dtype dtype) {
    int64_t m = pick(w, 1, 60), n = pick(w, 1, 90), k = pick(w, 0, 50), wrong = 0;
    if (pick(w, 0, 3) == 0) k = pick(w, 380, 800), m = pick(w, 1, 30), n = pick(w, 250, 300);
    if (pick(w, 0, 3) == 0) m = pick(w, 760, 790), n = pick(w, 1, 40);
    cpu_kernel_call call = {
        dtype, m, n, k, .accumulate = pick(w, 0, 1), .c_row = n + pick(w, 0, 3)};
    call.a = fill(w, dtype, layout(w, m, k, &call.a_row, &call.a_col), false);
    call.b = fill(w, dtype, layout(w, k, n, &call.b_row, &call.b_col), false);
    call.c = fill(w, dtype, m * call.c_row, !call.accumulate);
    call.packing = scratch_of(w, cpu_kernel_packing(dtype, n, k));
    void *before =
        ml_arena_copy(w->arena, call.c, (size_t)(m * call.c_row * ml_dtypes[dtype].bytes));
    cpu_kernel_product(&call);
    ml_gemm g = {.m = m,
                 .n = n,
                 .k = k,
                 .a_row = call.a_row,
                 .a_col = call.a_col,
                 .b_row = call.b_row,
                 .b_col = call.b_col,
                 .c_row = call.c_row,
                 .c_col = 1,
                 .a_dtype = dtype,
                 .b_dtype = dtype,
                 .c_dtype = dtype,
                 .accumulate = call.accumulate};
    wrong = check_item(&g, call.a, call.b, before, call.c, (int64_t[3]){0});
    EXPECT(wrong == 0, "%lld elements of %lld x %lld x %lld are wrong", (long long)wrong,
           (long long)m, (long long)n, (long long)k);
}

TEST(device, gemm_kernels) {
    world w = {.random = 12};
    for (int i = 0; i < 120; i++) {
        w.arena = ml_arena_new();
        check_kernel(&w, i % 2 ? ML_F64 : ML_F32);
        ml_arena_free(w.arena);
    }
}

/* Few rows: each element the same bits as by the blocked kernels on B widened to f32, in any two
 * parts of the columns. */
static void check_few(world *w, ml_dtype dtype) {
    int64_t m = pick(w, 1, CPU_FEW_ROWS), n = pick(w, 1, 90), k = pick(w, 0, 90), b_row, b_col;
    if (pick(w, 0, 3) == 0) k = pick(w, 380, 900);
    if (pick(w, 0, 3) == 0) n = pick(w, 400, 2500);
    cpu_few_call few = {
        m, n, k, .b_dtype = dtype, .c_row = n + pick(w, 0, 3), .accumulate = pick(w, 0, 1)};
    float *a = fill(w, ML_F32, layout(w, m, k, &few.a_row, &few.a_col), false);
    int64_t b_count = layout(w, k, n, &b_row, &b_col);
    char *b = fill(w, dtype, b_count, false);
    float *wide = ml_arena_alloc(w->arena, (size_t)b_count * sizeof *wide);
    few.c = fill(w, ML_F32, m * few.c_row, !few.accumulate);
    for (int64_t i = 0; i < m * k; i++) a[i] /= 7;
    for (int64_t i = 0; i < b_count && ml_dtypes[dtype].bytes > 1; i++)
        ops_store(dtype, b, i, ops_fetch(dtype, b, i) / 11);
    ml_convert(dtype, b, ML_F32, wide, b_count);
    few.a = a, few.b = b, few.b_row = b_row, few.b_col = b_col;
    cpu_kernel_call call = {ML_F32, m, n, k, a, wide, .accumulate = few.accumulate};
    call.a_row = few.a_row, call.a_col = few.a_col, call.b_row = b_row, call.b_col = b_col;
    call.c_row = few.c_row;
    call.c = ml_arena_copy(w->arena, few.c, (size_t)(m * few.c_row) * sizeof(float));
    call.packing = scratch_of(w, cpu_kernel_packing(ML_F32, n, k));
    cpu_kernel_product(&call);
    int64_t cut = pick(w, 0, n), wrong = 0;
    cpu_few_product(&few, cut, n);
    cpu_few_product(&few, 0, cut);
    for (int64_t i = 0; i < m; i++)
        wrong += memcmp(few.c + i * few.c_row, (float *)call.c + i * few.c_row,
                        (size_t)n * sizeof(float)) != 0;
    EXPECT(wrong == 0, "%lld rows of %lld x %lld x %lld (%s) differ", (long long)wrong,
           (long long)m, (long long)n, (long long)k, ml_dtypes[dtype].name);
}

TEST(device, gemm_few) {
    world w = {.random = 14};
    for (int i = 0; i < 60; i++) {
        for (int dtype = 0; dtype < ML_DTYPE_COUNT; dtype++) {
            if (!cpu_few_reads((ml_dtype)dtype)) continue;
            w.arena = ml_arena_new();
            check_few(&w, (ml_dtype)dtype);
            ml_arena_free(w.arena);
        }
    }
}
