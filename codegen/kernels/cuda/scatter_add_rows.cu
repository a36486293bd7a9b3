/* SCATTER_ADD: rows add up their tokens, or their chunks. */
#ifndef MLUA_EMBEDDED
#include "prelude.cuh"
#define ENTRY scatter_add
#define MEMORY float /* of the result */
#define REAL float
#define STORE
#define BASED 0 /* on a third operand, of the result's type and strides */
#define BASE_AT 2
#define RESULT_AT 2
#define ROWS 100LL
#define ROW_STRIDE 64LL
#define RESULT_BATCH(batch) (batch * 6400LL)
#define RESULT_COLUMN(column) (column)
#define LANES 16 /* threads of a row */
#define ROWS_BLOCK 16
#endif
#include "scatter_add_sum.cuh"

struct __align__(WIDTH * sizeof(MEMORY)) results {
    MEMORY x[WIDTH];
};
extern "C" __global__ void __launch_bounds__(256) ENTRY(arguments a) {
    const unsigned *keys = (const unsigned *)a.p[KEYS_AT];
    const unsigned *starts = (const unsigned *)a.p[STARTS_AT];
    long long key = blockIdx.x * (long long)ROWS_BLOCK + threadIdx.x / LANES;
    long long column = (blockIdx.y * (long long)LANES + threadIdx.x % LANES) * WIDTH;
    if (key >= (long long)LIMIT || column >= COLUMNS) return;
    unsigned first = starts[key], end = starts[key + 1];
    ADDER sum[WIDTH] = {0};
    if (BASED && first == end && a.p[BASE_AT] == a.p[RESULT_AT]) return;
    if (end - first <= CHUNK)
        sum_tokens(a, first, end, column, sum);
    else {
        const ADDER *partial = (const ADDER *)a.p[PARTIAL_AT] + column;
        for (unsigned c = first / CHUNK; c <= (end - 1) / CHUNK; c++) {
            long long slot = c * 2LL + (keys[c * (long long)CHUNK] != key);
            for (int j = 0; j < WIDTH; j++) sum[j] += partial[slot * COLUMNS + j];
        }
    }
    long long batch = key / ROWS, row = key % ROWS;
    long long place = RESULT_BATCH(batch) + row * ROW_STRIDE + RESULT_COLUMN(column);
    results out;
#if BASED /* in f32 or f64 */
    out = *(const results *)((const MEMORY *)a.p[BASE_AT] + place);
    for (int j = 0; j < WIDTH; j++) sum[j] += out.x[j];
#endif
    for (int j = 0; j < WIDTH; j++) out.x[j] = STORE((REAL)sum[j]);
    *(results *)((MEMORY *)a.p[RESULT_AT] + place) = out;
}
