/* A recurrence by elements whose positions compose (recurrence_compose.cuh): a block has 32 rows,
 * side by side in memory, and a warp SPAN positions of each stage of WARPS * SPAN, whose slices
 * come by a ring of STAGES parts of shared memory. Each warp composes its positions to one function
 * of the state before them; from those of the warps before it, it knows that state, and computes
 * its positions from there. The order of all sums is fixed. */
#ifndef MLUA_EMBEDDED
#include "prelude.cuh"
#define ENTRY recurrence
#define POINTERS 2
#define LENGTH 1000LL
#define REVERSE 0
#define POSITIONS 64 /* WARPS * SPAN */
#define SPAN 8
#define STAGES 4
#define STAGE_BYTES 8192 /* a multiple of 16 */
#define THREADS 256
#define WIDTH 32 /* rows of a block */
#define STATES 1
#define STATE float /* the widest of their types */
#define MAX_PLUS 0  /* a bit for each state: its algebra */
#define FIRST                                                                                      \
    const char *from0 = (const char *)((const float *)P[0] + (row - lane));                        \
    float *x1 = (float *)P[1] + row;                                                               \
    float kept0 = 0;
#define COPY /* of the positions from `first` on, to address `to` of shared memory */              \
    for (int c = threadIdx.x; c < POSITIONS * 8; c += THREADS) {                                   \
        const long long t = POSITION(c / 8);                                                       \
        if (t >= 0 && t < LENGTH) copy_async(to + c * 16, from0 + t * 4096LL + c % 8 * 16, 16);    \
    }
#define COMPOSE /* position t: states as slopes and offsets of those before the warp's */          \
    const float in0 = ((const float *)slot)[u * WIDTH + lane];                                     \
    offset[0] = offset[0] * 0.5f + in0;                                                            \
    slope[0] = joined_slope(0, 0.5f, slope[0]);
#define GATHER kept0 = before[0]; /* states before the warp's positions */
#define WORK                      /* position t */                                                 \
    const float in0 = ((const float *)slot)[u * WIDTH + lane];                                     \
    kept0 = kept0 * 0.5f + in0;                                                                    \
    x1[t * 1024LL] = kept0;
#define BEGIN carry[0] = kept0; /* states before the first position */
#define TOTAL                   /* sums: over the warps */
#define LAST /* after the last position, of the first warp */ kept0 = carry[0];
#endif
#include "mma_ptx.cuh"
#include "recurrence_compose.cuh"
#include "recurrence_quick.cuh"
#include "recurrence_stages.cuh"
#define WARPS (THREADS / 32)

struct arguments {
    char *p[POINTERS];
};

/* The sum over the warps, for each lane. */
template <typename T> ML_INLINE T sum_parts(T own, T *shared_sums) {
    __syncthreads();
    shared_sums[threadIdx.x] = own;
    __syncthreads();
    T sum = 0;
    for (int w = 0; w < WARPS; w++) sum += shared_sums[w * 32 + threadIdx.x % 32];
    return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS) ENTRY(arguments a) {
    extern __shared__ uint4 shared[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const long long row = blockIdx.x * 32LL + lane;
    char *const *P = a.p;
    const unsigned ring = shared_address(shared);
    /* of two stages in turn: slopes and offsets, by state, by warp */
    STATE(*composed)
    [STATES][2][THREADS] = (STATE(*)[STATES][2][THREADS])((char *)shared + STAGES * STAGE_BYTES);
    STATE carry[STATES];
    FIRST
    BEGIN
    COPY_FIRST_STAGES
    int now = 0, next = STAGES - 1, side = 0; /* parts of the ring; which of the two stages */
    for (long long begin = 0; begin < LENGTH; begin += POSITIONS) {
        NEXT_STAGE
        const char *slot = (const char *)shared + now * STAGE_BYTES;
        const long long first = begin;
        STATE slope[STATES], offset[STATES], before[STATES];
#pragma unroll
        for (int i = 0; i < STATES; i++) begin_composed(IS_MAX_PLUS(i), slope[i], offset[i]);
#pragma unroll
        for (int k = 0; k < SPAN; k++) {
            const int u = warp * SPAN + k;
            const long long t = POSITION(u);
            if (LENGTH % POSITIONS == 0 || first + u < LENGTH) {
                COMPOSE
            }
            (void)t;
        }
#pragma unroll
        for (int i = 0; i < STATES; i++) {
            composed[side][i][0][threadIdx.x] = slope[i];
            composed[side][i][1][threadIdx.x] = offset[i];
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < STATES; i++) {
#pragma unroll
            for (int w = 0; w < WARPS; w++) {
                if (w == warp) before[i] = carry[i];
                const STATE by = composed[side][i][0][w * 32 + lane];
                const STATE add = composed[side][i][1][w * 32 + lane];
                carry[i] = state_behind(IS_MAX_PLUS(i), by, add, carry[i]);
            }
        }
        GATHER
#pragma unroll
        for (int k = 0; k < SPAN; k++) {
            const int u = warp * SPAN + k;
            const long long t = POSITION(u);
            if (LENGTH % POSITIONS == 0 || first + u < LENGTH) {
                WORK
            }
            (void)t;
        }
        side ^= 1;
        now = now + 1 == STAGES ? 0 : now + 1;
        next = next + 1 == STAGES ? 0 : next + 1;
    }
    TOTAL
    if (warp == 0) {
        LAST
    }
}
