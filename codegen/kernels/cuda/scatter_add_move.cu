/* SCATTER_ADD: keys and tokens of a tile are copied to where their digit says. */
#ifndef MLUA_EMBEDDED
#include "prelude.cuh"
#define ENTRY scatter_add
#define TOKENS_IN_AT 4
#define KEYS_OUT_AT 5
#define TOKENS_OUT_AT 6
#endif
#include "scatter_add_digits.cuh"

extern "C" __global__ void __launch_bounds__(256) ENTRY(arguments a) {
    __shared__ unsigned next[RADIX], counts[8][RADIX];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    for (int d = threadIdx.x; d < RADIX; d += 256)
        next[d] = ((const unsigned *)a.p[COUNTS_AT])[d * TILES + blockIdx.x];
    long long first = blockIdx.x * (long long)TILE;
    for (long long start = first; start < first + TILE && start < ALL; start += 256) {
        for (int i = threadIdx.x; i < 8 * RADIX; i += 256) (&counts[0][0])[i] = 0;
        __syncthreads();
        long long i = start + threadIdx.x;
        bool valid = i < ALL;
        unsigned key = valid ? key_of(a, i) : 0;
        unsigned digit = valid ? (key >> a.s[0]) & (RADIX - 1) : RADIX;
        unsigned same = __match_any_sync(~0u, digit);
        unsigned rank = __popc(same & ((1u << lane) - 1));
        if (valid && rank == 0) counts[warp][digit] = __popc(same);
        __syncthreads();
        for (int d = threadIdx.x; d < RADIX; d += 256)
            for (int w = 0; w < 8; w++) {
                unsigned here = counts[w][d];
                counts[w][d] = next[d];
                next[d] += here;
            }
        __syncthreads();
        if (valid) {
            unsigned to = counts[warp][digit] + rank;
            ((unsigned *)a.p[KEYS_OUT_AT])[to] = key;
            ((unsigned *)a.p[TOKENS_OUT_AT])[to] =
                a.s[0] > 0 ? ((const unsigned *)a.p[TOKENS_IN_AT])[i] : (unsigned)i;
        }
        __syncthreads();
    }
}
