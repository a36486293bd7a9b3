/* SCATTER_ADD: exclusive sums of the counts of digits, by one block. */
#ifndef MLUA_EMBEDDED
#include "prelude.cuh"
#define ENTRY scatter_add
#define POINTERS 12
#define RADIX 128
#define TILES 1
#define COUNTS_AT 7
#endif

struct arguments {
    char *p[POINTERS];
};

extern "C" __global__ void __launch_bounds__(1024) ENTRY(arguments a) {
    __shared__ unsigned warps[32];
    unsigned *counts = (unsigned *)a.p[COUNTS_AT], before = 0;
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    for (int start = 0; start < RADIX * TILES; start += 4096) {
        int at = start + (int)threadIdx.x * 4;
        unsigned x[4], sum = 0;
        for (int i = 0; i < 4; i++) {
            x[i] = sum;
            sum += at + i < RADIX * TILES ? counts[at + i] : 0;
        }
        unsigned upto = sum;
        for (int d = 1; d < 32; d *= 2) {
            unsigned y = __shfl_up_sync(~0u, upto, d);
            if (lane >= d) upto += y;
        }
        if (lane == 31) warps[warp] = upto;
        __syncthreads();
        unsigned below = before, total = before;
        for (int w = 0; w < 32; w++) {
            if (w < warp) below += warps[w];
            total += warps[w];
        }
        for (int i = 0; i < 4; i++)
            if (at + i < RADIX * TILES) counts[at + i] = below + upto - sum + x[i];
        before = total;
        __syncthreads();
    }
}
