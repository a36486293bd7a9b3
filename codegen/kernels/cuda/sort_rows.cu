/* SORT and TOP_K: bitonic sort of rows of PADDED keys in shared memory, BLOCK_ROWS rows a block. */
#ifndef MLUA_EMBEDDED
#include "prelude.cuh"
#define ENTRY sort
#define PADDED 1024 /* elements of a row, up to a power of two */
#define BLOCK_ROWS 1
#define THREADS 256
#endif
#include "../c/sort_keys.h"
#include "sort_write.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) ENTRY(arguments a) {
    __shared__ sort_key keys[BLOCK_ROWS * PADDED];
    long long first = (long long)blockIdx.x * BLOCK_ROWS;
    for (int i = threadIdx.x; i < BLOCK_ROWS * PADDED; i += THREADS) {
        long long row = first + i / PADDED;
        int at = i % PADDED;
        keys[i] = last_key();
        if (row < ROWS && at < SIZE)
            keys[i] = make_key(LOAD(((const MEMORY *)a.p[0] + X_ROW(row))[at * X_STRIDE]), at);
    }
    __syncthreads();
    for (int width = 2; width <= PADDED; width *= 2)
        for (int apart = width / 2; apart > 0; apart /= 2) {
            for (int i = threadIdx.x; i < BLOCK_ROWS * PADDED / 2; i += THREADS) {
                int low = i / apart * 2 * apart + i % apart, high = low + apart;
                bool up = (low & width & (PADDED - 1)) == 0;
                sort_key left = keys[low], right = keys[high];
                if (is_before(right, left) == up) keys[low] = right, keys[high] = left;
            }
            __syncthreads();
        }
    for (int i = threadIdx.x; i < BLOCK_ROWS * KEPT; i += THREADS) {
        long long row = first + i / KEPT;
        int at = i % KEPT;
        int from = (int)position_of(keys[i / KEPT * PADDED + at]);
        if (row < ROWS) write(a, row, at, from);
    }
}
