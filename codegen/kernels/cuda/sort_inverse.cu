/* SORT of a permutation gives its inverse: each element is written where it points to. */
#ifndef MLUA_EMBEDDED
#include "prelude.cuh"
#define ENTRY sort
#define PARTS 4 /* blocks of 256 elements a row */
#define DESCENDING 0
#endif
#include "sort_write.cuh"

extern "C" __global__ void __launch_bounds__(256) ENTRY(arguments a) {
    long long row = blockIdx.x / PARTS;
    int from = blockIdx.x % PARTS * 256 + threadIdx.x;
    if (from >= SIZE) return;
    int at = ((const int *)a.p[0] + X_ROW(row))[from * X_STRIDE];
    write(a, row, DESCENDING ? SIZE - 1 - at : at, from);
}
