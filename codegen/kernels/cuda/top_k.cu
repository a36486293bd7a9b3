/* TOP_K of few elements. Of short rows by a warp: a lane holds keys in registers, and the first of
 * all is taken KEPT times. Else by a block: KEPT passes, each for the first key after the one
 * before. */
#ifndef MLUA_EMBEDDED
#include "prelude.cuh"
#define ENTRY top_k
#define HELD 32 /* keys of a lane; 0: a block a row */
#endif
#include "../c/sort_keys.h"
#include "sort_shuffle.cuh"
#include "sort_write.cuh"

#if HELD
extern "C" __global__ void __launch_bounds__(128) ENTRY(arguments a) {
    long long row = blockIdx.x * 4LL + threadIdx.x / 32;
    int lane = threadIdx.x & 31;
    if (row >= ROWS) return;
    const MEMORY *x = (const MEMORY *)a.p[0] + X_ROW(row);
    sort_key held[HELD];
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        int at = i * 32 + lane;
        held[i] = at < SIZE ? make_key(LOAD(x[at * X_STRIDE]), at) : last_key();
    }
    int mine = 0;
    for (int at = 0; at < KEPT; at++) {
        sort_key best = held[0];
#pragma unroll
        for (int i = 1; i < HELD; i++)
            if (is_before(held[i], best)) best = held[i];
        best = first_of_warp(best);
        if (lane == at) mine = (int)position_of(best);
#pragma unroll
        for (int i = 0; i < HELD; i++)
            if (position_of(held[i]) == position_of(best)) held[i] = last_key();
    }
    if (lane < KEPT) write(a, row, lane, mine);
}
#else
extern "C" __global__ void __launch_bounds__(512) ENTRY(arguments a) {
    __shared__ sort_key warps[16];
    long long row = blockIdx.x;
    const MEMORY *x = (const MEMORY *)a.p[0] + X_ROW(row);
    sort_key taken = last_key();
    for (int at = 0; at < KEPT; at++) {
        sort_key best = last_key();
        for (int i = threadIdx.x; i < SIZE; i += 512) {
            sort_key key = make_key(LOAD(x[i * X_STRIDE]), i);
            if ((at == 0 || is_before(taken, key)) && is_before(key, best)) best = key;
        }
        best = first_of_warp(best);
        if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = best;
        __syncthreads();
        for (int w = 0; w < 16; w++)
            if (is_before(warps[w], best)) best = warps[w];
        __syncthreads();
        taken = best;
        if (threadIdx.x == 0) write(a, row, at, (int)position_of(best));
    }
}
#endif
