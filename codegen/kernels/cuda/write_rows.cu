/* WRITE_ROWS: in place, a thread an element of the value, columns fastest; else a block owns a
 * range of the cache's rows, which it copies, and walks over all tokens. */
#ifndef MLUA_EMBEDDED
#include "prelude.cuh"
#define ENTRY write_rows
#define ELEMENT float
#define ROWS 4096LL
#define TOKENS 8LL
#define COLUMNS 128LL
#define BLOCKS 64LL
#define THREADS 256
#define CACHE_ROW 128LL
#define RESULT_ROW 128LL
#define INDEX_TOKEN(token) (token)
#define VALUE_TOKEN(token) (token * 128LL)
#define CACHE_COLUMN(column) (column)
#define VALUE_COLUMN(column) (column)
#define RESULT_COLUMN(column) (column)
#endif

struct arguments {
    char *p[4];
};

extern "C" __global__ void __launch_bounds__(THREADS) ENTRY(arguments a) {
    kernel_begins();
    const ELEMENT *cache = (const ELEMENT *)a.p[0], *value = (const ELEMENT *)a.p[2];
    const int *index = (const int *)a.p[1];
    ELEMENT *result = (ELEMENT *)a.p[3];
    const bool in_place = result == cache;
    const long long first = in_place ? 0 : blockIdx.x * ROWS / BLOCKS;
    const long long last = in_place ? ROWS : (blockIdx.x + 1) * ROWS / BLOCKS;
    long long at = threadIdx.x, step = THREADS;
    if (in_place) {
        at += blockIdx.x * (long long)THREADS, step *= BLOCKS;
    } else {
        for (long long i = first * COLUMNS + threadIdx.x; i < last * COLUMNS; i += THREADS) {
            const long long row = i / COLUMNS, column = i % COLUMNS;
            result[row * RESULT_ROW + RESULT_COLUMN(column)] =
                cache[row * CACHE_ROW + CACHE_COLUMN(column)];
        }
        __syncthreads();
    }
    for (; at < TOKENS * COLUMNS; at += step) {
        const long long token = at / COLUMNS, column = at % COLUMNS;
        const long long row = index[INDEX_TOKEN(token)];
        if (row >= first && row < last)
            result[row * RESULT_ROW + RESULT_COLUMN(column)] =
                value[VALUE_TOKEN(token) + VALUE_COLUMN(column)];
    }
}
