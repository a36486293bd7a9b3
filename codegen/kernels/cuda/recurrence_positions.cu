/* A recurrence by elements whose positions compose (recurrence_compose.cuh): a block a row, of
 * which each thread takes UNROLL positions side by side. Warps compose what their threads found by
 * shuffles, the block what its warps found; then each thread computes its positions from the state
 * before them. The order of all sums is fixed. */
#ifndef MLUA_EMBEDDED
#include "prelude.cuh"
#define ENTRY recurrence
#define POINTERS 2
#define LENGTH 8192LL
#define REVERSE 0
#define UNROLL 8
#define THREADS 256
#define STATES 1
#define STATE float /* of all states */
#define MAX_PLUS 1  /* a bit for each state: its algebra */
#define FIRST                                                                                      \
    const float *x0 = (const float *)P[0] + row;                                                   \
    float *x1 = (float *)P[1] + row;                                                               \
    float kept0 = 0;
#define DECLARE float in0[UNROLL];
#define LOAD in0[u] = x0[t * 32LL]; /* of position t */
#define COMPOSE                     /* position t: states as slopes and offsets */                 \
    offset[0] = ml_max_f32(offset[0] + 0.5f, in0[u]);                                              \
    slope[0] = joined_slope(1, 0.5f, slope[0]);
#define GATHER kept0 = before[0]; /* states before the thread's positions */
#define WORK                                                                                       \
    kept0 = ml_max_f32(kept0 + 0.5f, in0[u]);                                                      \
    x1[t * 32LL] = kept0;
#define BEGIN carry[0] = kept0; /* states before the first position */
#define TOTAL                   /* sums: over the threads */
#define LAST /* after the last position, of the first thread */ kept0 = carry[0];
#endif
#include "recurrence_compose.cuh"
#include "recurrence_quick.cuh"
#define POSITION(u) (REVERSE ? LENGTH - 1 - first - (u) : first + (u))
#define WARPS (THREADS / 32)

struct arguments {
    char *p[POINTERS];
};
/* Slopes and offsets of warps, of two stages in turn; then a number a thread. */
struct composed {
    STATE of[2][STATES][2][WARPS];
};

/* The sum over the threads, for the first. */
template <typename T> ML_INLINE T sum_parts(T own, T *shared) {
    T *sums = (T *)((char *)shared + sizeof(composed)), sum = 0;
    __syncthreads();
    sums[threadIdx.x] = own;
    __syncthreads();
    for (int i = 0; i < THREADS && threadIdx.x == 0; i++) sum += sums[i];
    return sum;
}
/* The state before a thread's positions, from those of all; and behind all. */
ML_INLINE STATE scan_block(int i, STATE slope, STATE offset, STATE &carry, STATE (*side)[WARPS]) {
    const bool max_plus = IS_MAX_PLUS(i);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const STATE by = __shfl_up_sync(~0u, slope, step), add = __shfl_up_sync(~0u, offset, step);
        if (lane >= step) {
            offset = state_behind(max_plus, slope, offset, add);
            slope = joined_slope(max_plus, slope, by);
        }
    }
    if (lane == 31) side[0][warp] = slope, side[1][warp] = offset;
    const STATE by = __shfl_up_sync(~0u, slope, 1), add = __shfl_up_sync(~0u, offset, 1);
    __syncthreads();
    STATE before = carry;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        if (w == warp) before = carry;
        carry = state_behind(max_plus, side[0][w], side[1][w], carry);
    }
    return lane ? state_behind(max_plus, by, add, before) : before;
}

extern "C" __global__ void __launch_bounds__(THREADS) ENTRY(arguments a) {
    extern __shared__ uint4 shared[];
    const long long row = blockIdx.x;
    char *const *P = a.p;
    composed &sides = *(composed *)shared;
    STATE carry[STATES];
    FIRST
    BEGIN
    for (long long begin = 0, turn = 0; begin < LENGTH; begin += THREADS * UNROLL, turn ^= 1) {
        const long long first = begin + threadIdx.x * UNROLL;
        STATE slope[STATES], offset[STATES], before[STATES];
        DECLARE
#pragma unroll
        for (int i = 0; i < STATES; i++) begin_composed(IS_MAX_PLUS(i), slope[i], offset[i]);
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            const long long t = POSITION(u);
            if (first + u < LENGTH) {
                LOAD
            }
            (void)t;
        }
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            const long long t = POSITION(u);
            if (first + u < LENGTH) {
                COMPOSE
            }
            (void)t;
        }
#pragma unroll
        for (int i = 0; i < STATES; i++)
            before[i] = scan_block(i, slope[i], offset[i], carry[i], sides.of[turn][i]);
        GATHER
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            const long long t = POSITION(u);
            if (first + u < LENGTH) {
                WORK
            }
            (void)t;
        }
    }
    TOTAL
    if (threadIdx.x == 0) {
        LAST
    }
}
