/* Products by groups of rows on the CPU: one matrix product for each group that has rows (of each
 * element of the batch), cut over the pool's threads as any other. */
#include <string.h>

#include "runtime/device/cpu/cpu_internal.h"

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

typedef struct {
    const ml_ragged *r;
    char *const *operands;
    void *scratch;
    ml_pool *pool;
} ragged_call;

/* The rows of group e of batch element b, not before `done`; the value is their number. */
static int64_t group_rows(const ragged_call *call, int64_t b, int64_t e, int64_t done,
                          int64_t *first) {
    const ml_ragged *r = call->r;
    const int32_t *starts = (const int32_t *)call->operands[2];
    const int32_t *ends = (const int32_t *)call->operands[3];
    int64_t start = starts[b * r->start_batch + e * r->start_stride];
    int64_t end = ends[b * r->end_batch + e * r->end_stride];
    *first = start < done ? done : start;
    if (end > r->rows) end = r->rows;
    return end > *first ? end - *first : 0;
}

/* Each group's rows times its matrix; the rows between are cleared. */
static ml_status run_dot(const ragged_call *call, int64_t b) {
    const ml_ragged *r = call->r;
    int64_t size = ml_dtypes[r->dtype].bytes, c_size = ml_dtypes[r->c_dtype].bytes;
    int64_t first, done = 0;
    char *const *operands = call->operands, *out = operands[4] + b * r->c_batch * c_size;
    for (int64_t e = 0; e < r->groups; e++) {
        int64_t rows = group_rows(call, b, e, done, &first);
        if (rows == 0) continue;
        clear(r, out + done * r->c_row * c_size, first - done, r->n);
        done = first + rows;
        ml_gemm g = group_product(r, rows);
        const char *x = operands[0] + (b * r->a_batch + first * r->a_row) * size;
        const char *w = operands[1] + e * r->b_group * size;
        ML_TRY(cpu_gemm_run(&g, x, w, out + first * r->c_row * c_size, NULL, call->scratch,
                            call->pool));
    }
    clear(r, out + done * r->c_row * c_size, r->rows - done, r->n);
    return ML_OK;
}

/* One group's matrix: the sum over the batch, in order. */
static ml_status run_outer(const ragged_call *call, int64_t e) {
    const ml_ragged *r = call->r;
    int64_t size = ml_dtypes[r->dtype].bytes, first;
    bool any = false;
    char *out = call->operands[4] + e * r->c_group * ml_dtypes[r->c_dtype].bytes;
    for (int64_t b = 0; b < r->batch; b++) {
        int64_t rows = group_rows(call, b, e, 0, &first);
        if (rows == 0) continue;
        ml_gemm g = group_product(r, rows);
        g.accumulate = any;
        any = true;
        const char *x = call->operands[0] + (b * r->a_batch + first * r->a_row) * size;
        const char *y = call->operands[1] + (b * r->b_batch + first * r->b_row) * size;
        ML_TRY(cpu_gemm_run(&g, x, y, out, NULL, call->scratch, call->pool));
    }
    if (!any) clear(r, out, r->k, r->n);
    return ML_OK;
}

ml_status cpu_ragged_run(const ml_ragged *r, char *const *operands, void *scratch, ml_pool *pool) {
    ragged_call call = {r, operands, scratch, pool};
    ml_status status = ML_OK;
    for (int64_t i = 0; i < (r->outer ? r->groups : r->batch) && status == ML_OK; i++)
        status = r->outer ? run_outer(&call, i) : run_dot(&call, i);
    return status;
}
