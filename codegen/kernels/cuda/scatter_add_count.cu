/* SCATTER_ADD: how many tokens of a tile have each digit. */
#ifndef MLUA_EMBEDDED
#include "prelude.cuh"
#define ENTRY scatter_add
#endif
#include "scatter_add_digits.cuh"

extern "C" __global__ void __launch_bounds__(256) ENTRY(arguments a) {
    __shared__ unsigned count[RADIX];
    for (int d = threadIdx.x; d < RADIX; d += 256) count[d] = 0;
    __syncthreads();
    long long first = blockIdx.x * (long long)TILE;
    for (long long i = first + threadIdx.x; i < first + TILE && i < ALL; i += 256)
        atomicAdd(&count[(key_of(a, i) >> a.s[0]) & (RADIX - 1)], 1u);
    __syncthreads();
    unsigned *out = (unsigned *)a.p[COUNTS_AT];
    for (int d = threadIdx.x; d < RADIX; d += 256) out[d * TILES + blockIdx.x] = count[d];
}
