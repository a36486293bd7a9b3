/* SORT of long rows: keys are in memory, and a block sorts or merges a tile of them in shared
 * memory. s[0] .. s[1]: widths of the bitonic network whose exchanges within a tile run; width 2
 * builds the keys first, the last width writes the results. Exchanges between tiles:
 * sort_exchange.cu. */
#ifndef MLUA_EMBEDDED
#include "prelude.cuh"
#define ENTRY sort
#define PADDED 8192 /* elements of a row, up to a power of two */
#define TILE 4096
#define SCALARS 3
#define KEYS_AT 3 /* pointer of the keys */
#endif
#include "../c/sort_keys.h"
#include "sort_shuffle.cuh"
#include "sort_write.cuh"

enum { OWN = TILE / 1024 }; /* keys of a thread, neighbours, in registers */

/* The lesser or the greater of `key` and `other`: `least` of them. */
ML_INLINE void keep(sort_key &key, sort_key other, bool least) {
    if (is_before(other, key) == least) key = other;
}

extern "C" __global__ void __launch_bounds__(1024) ENTRY(arguments a) {
    __shared__ sort_key shared[TILE];
    const int own = OWN;
    long long first = (long long)blockIdx.x * TILE, row = first / PADDED;
    int thread = threadIdx.x, start = (int)(first % PADDED) + thread * own;
    sort_key *all = (sort_key *)a.p[KEYS_AT] + first + thread * own, keys[own];
#pragma unroll
    for (int j = 0; j < own; j++) {
        if (a.s[0] > 2)
            keys[j] = all[j];
        else if (start + j >= SIZE)
            keys[j] = last_key();
        else
            keys[j] = make_key(LOAD(((const MEMORY *)a.p[0] + X_ROW(row))[(start + j) * X_STRIDE]),
                               start + j);
    }
    for (int width = (int)a.s[0]; width <= (int)a.s[1]; width *= 2) {
        int apart = (width < TILE ? width : TILE) / 2;
        bool up = (start & width & (PADDED - 1)) == 0; /* of all of them from width 2 own on */
        for (; apart >= 32 * own; apart /= 2) {
            __syncthreads();
#pragma unroll
            for (int j = 0; j < own; j++) shared[j * 1024 + thread] = keys[j];
            __syncthreads();
#pragma unroll
            for (int j = 0; j < own; j++)
                keep(keys[j], shared[j * 1024 + (thread ^ (apart / own))],
                     ((thread & (apart / own)) == 0) == up);
        }
        for (; apart >= own; apart /= 2)
#pragma unroll
            for (int j = 0; j < own; j++)
                keep(keys[j], shuffle(keys[j], apart / own), ((thread & (apart / own)) == 0) == up);
#pragma unroll
        for (int half = own / 2; half > 0; half /= 2)
#pragma unroll
            for (int j = 0; j < own; j++) {
                if ((j & half) || half * 2 > width) continue;
                bool rises = ((start + j) & width & (PADDED - 1)) == 0;
                sort_key left = keys[j], right = keys[j + half];
                if (is_before(right, left) == rises) keys[j] = right, keys[j + half] = left;
            }
    }
#pragma unroll
    for (int j = 0; j < own; j++) {
        if (a.s[1] < PADDED)
            all[j] = keys[j];
        else if (start + j < KEPT)
            write(a, row, start + j, (int)position_of(keys[j]));
    }
}
