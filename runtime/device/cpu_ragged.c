/* Products by groups of rows on the CPU: one matrix product for each group that has rows, cut over
 * the pool's threads as any other. */
#include <string.h>

#include "runtime/device/cpu.h"

/* The product of `rows` rows; strides are those of the whole tensors. */
static ml_gemm group_product(const ml_ragged *r, int64_t rows) {
    ml_gemm g = {.batch = {1, 1, 1}, .n = r->n, .b_row = r->b_row, .b_col = r->b_col};
    g.a_dtype = g.b_dtype = r->dtype, g.c_dtype = r->c_dtype;
    g.c_row = r->c_row, g.c_col = r->c_col;
    if (r->outer) {
        g.m = r->k, g.k = rows;
        g.a_row = r->a_col, g.a_col = r->a_row;
    } else {
        g.m = rows, g.k = r->k;
        g.a_row = r->a_row, g.a_col = r->a_col;
    }
    return g;
}

int64_t cpu_ragged_scratch(const ml_ragged *r, int threads) {
    ml_gemm whole = group_product(r, r->rows);
    return cpu_gemm_scratch(&whole, threads);
}

static void clear(const ml_ragged *r, char *to, int64_t rows, int64_t cols) {
    size_t size = (size_t)ml_dtypes[r->c_dtype].bytes;
    for (int64_t i = 0; i < rows; i++) {
        char *row = to + i * r->c_row * (int64_t)size;
        if (r->c_col == 1) {
            memset(row, 0, (size_t)cols * size);
            continue;
        }
        for (int64_t j = 0; j < cols; j++) memset(row + j * r->c_col * (int64_t)size, 0, size);
    }
}

ml_status cpu_ragged_run(const ml_ragged *r, char *const *operands, void *scratch, ml_pool *pool) {
    const int32_t *starts = (const int32_t *)operands[2], *ends = (const int32_t *)operands[3];
    int64_t size = ml_dtypes[r->dtype].bytes, c_size = ml_dtypes[r->c_dtype].bytes, done = 0;
    for (int64_t e = 0; e < r->groups; e++) {
        int64_t first = starts[e * r->start_stride], end = ends[e * r->end_stride];
        if (first < done) first = done;
        if (end > r->rows) end = r->rows;
        int64_t rows = end > first ? end - first : 0;
        const char *a = operands[0] + first * r->a_row * size;
        const char *b = operands[1] + (r->outer ? first * r->b_row : e * r->b_group) * size;
        char *c = operands[4] + (r->outer ? e * r->c_group : first * r->c_row) * c_size;
        if (r->outer && rows == 0) clear(r, c, r->k, r->n);
        if (rows == 0) continue;
        if (!r->outer) clear(r, operands[4] + done * r->c_row * c_size, first - done, r->n);
        done = end;
        ml_gemm g = group_product(r, rows);
        ml_status status = cpu_gemm_run(&g, a, b, c, NULL, scratch, pool);
        if (status != ML_OK) return status;
    }
    if (!r->outer) clear(r, operands[4] + done * r->c_row * c_size, r->rows - done, r->n);
    return ML_OK;
}
