/* SORT of integers 0 .. KINDS - 1 by counting: a block a row, a warp a part of it. Each warp counts
 * its elements of each kind, and sums over kinds and warps say where they go. Elements of a kind
 * stay in order, as a stable sort demands. */
#ifndef MLUA_EMBEDDED
#include "prelude.cuh"
#define ENTRY sort
#define KINDS 64
#define HELD 1 /* elements of a thread */
#define DESCENDING 0
#endif
#include "sort_write.cuh"

/* The sum of `own` of the lanes before this one; that of all lanes. */
ML_INLINE unsigned sum_before(unsigned own, unsigned *all) {
    unsigned sum = own;
    int lane = threadIdx.x % 32;
    for (int d = 1; d < 32; d *= 2) {
        unsigned other = __shfl_up_sync(~0u, sum, d);
        sum += lane >= d ? other : 0;
    }
    *all = __shfl_sync(~0u, sum, 31);
    return sum - own;
}

extern "C" __global__ void __launch_bounds__(1024) ENTRY(arguments a) {
    __shared__ unsigned counts[32][KINDS + 1], first[KINDS];
    long long row = blockIdx.x;
    const int *x = (const int *)a.p[0] + X_ROW(row);
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int keys[HELD]; /* a warp's elements follow one another */
#pragma unroll
    for (int j = 0; j < HELD; j++) {
        int from = (warp * HELD + j) * 32 + lane;
        keys[j] = from < SIZE ? x[from * X_STRIDE] : KINDS;
        if (DESCENDING && from < SIZE) keys[j] = KINDS - 1 - keys[j];
    }
    for (int i = threadIdx.x; i < 32 * (KINDS + 1); i += 1024) (&counts[0][0])[i] = 0;
    __syncthreads();
#pragma unroll
    for (int j = 0; j < HELD; j++) { /* what is past the end counts as one kind more */
        unsigned same = __match_any_sync(~0u, (unsigned)keys[j]);
        if ((same & ((1u << lane) - 1)) == 0) counts[warp][keys[j]] += __popc(same);
        __syncwarp();
    }
    __syncthreads();
    for (int kind = warp; kind < KINDS; kind += 32) {
        unsigned all, before = sum_before(counts[lane][kind], &all);
        counts[lane][kind] = before;
        if (lane == 0) first[kind] = all;
    }
    __syncthreads();
    unsigned done = 0;
    for (int base = 0; warp == 0 && base < KINDS; base += 32) {
        int kind = base + lane;
        unsigned all, before = sum_before(kind < KINDS ? first[kind] : 0, &all);
        if (kind < KINDS) first[kind] = done + before;
        done += all;
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < HELD; j++) {
        int from = (warp * HELD + j) * 32 + lane;
        unsigned same = __match_any_sync(~0u, (unsigned)keys[j]);
        unsigned rank = __popc(same & ((1u << lane) - 1)), before = counts[warp][keys[j]];
        __syncwarp();
        if (rank == 0) counts[warp][keys[j]] = before + __popc(same);
        __syncwarp();
        if (from < SIZE) write(a, row, (int)(first[keys[j]] + before + rank), from);
    }
}
