/* A recurrence by elements whose positions compose (recurrence_compose.cuh), of narrow operands: a
 * thread has LANES rows, side by side in memory, which it loads and stores at once; a warp takes
 * SPAN positions of each stage of WARPS * SPAN, whose slices come by a ring of STAGES parts of
 * shared memory. What it loads stays in registers: a warp composes its positions to one function of
 * the states before them, knows these states from those of the warps ahead, and computes its
 * positions from there. The order of all sums is fixed. Where it REPLAYS, the states of the forward
 * recurrence are computed again first, over SPAN positions from those before the last of them. */
#ifndef MLUA_EMBEDDED
#include "prelude.cuh"
#define ENTRY recurrence
#define POINTERS 2
#define LENGTH 1000LL
#define REVERSE 0
#define LANES 2
#define WARPS 8
#define SPAN 8
#define POSITIONS 64 /* WARPS * SPAN */
#define STAGES 4
#define STAGE_BYTES 8192 /* a multiple of 16 */
#define THREADS 256
#define BLOCKS 2 /* at least, of a multiprocessor at once */
#define WIDTH 64 /* rows of a block */
#define STATES 1
#define STATE float /* the widest of their types */
#define MAX_PLUS 0  /* a bit for each state: its algebra */
#define FIRST       /* lane l of a thread's rows: `row` + l */                                     \
    const char *from0 = (const char *)((const ml_bf16 *)P[0] + (row - lane * LANES));              \
    ml_bf16 *x1 = (ml_bf16 *)P[1] + row;                                                           \
    float kept0[LANES];                                                                            \
    for (int l = 0; l < LANES; l++) kept0[l] = 0;
#define COPY /* of the positions from `first` on, to address `to` of shared memory */              \
    for (int c = threadIdx.x; c < POSITIONS * 8; c += THREADS) {                                   \
        const long long t = POSITION(c / 8);                                                       \
        if (t >= 0 && t < LENGTH) copy_async(to + c * 16, from0 + t * 4096LL + c % 8 * 16, 16);    \
    }
#define DECLARE /* inputs of a warp's positions; results of one */                                 \
    float in0[SPAN][LANES];                                                                        \
    float out1[LANES];
#define LOAD /* position k of the warp, u of the stage, t of all */                                \
    load_lanes(in0[k], (const ml_bf16 *)slot + u * WIDTH + lane * LANES);
#define READY   /* lane l at position k: values of inputs, of which states are computed again */
#define KEPT    /* likewise: of which states are computed */
#define AGAIN   /* states of the forward recurrence before the last position of the warp's */
#define REPLAY  /* lane l: keeps the states before position k; those after it */
#define COMPOSE /* lane l: states as slopes and offsets of those before the warp's */              \
    offset[0][l] = offset[0][l] * 0.5f + in0[k][l];                                                \
    slope[0][l] = joined_slope(0, 0.5f, slope[0][l]);
#define GATHER kept0[l] = before[0][l]; /* states before the warp's positions */
#define SAVE                            /* states before position t */
#define WORK                            /* lane l at position t */                                 \
    kept0[l] = kept0[l] * 0.5f + in0[k][l];                                                        \
    out1[l] = kept0[l];
#define STORE store_lanes(x1 + t * 2048LL, out1); /* of position t */
#define BEGIN carry[0][l] = kept0[l];             /* states before the first position */
#define TOTAL                                     /* sums: over the warps */
#define LAST /* after the last position, of the first warp */ kept0[l] = carry[0][l];
#endif
#include "mma_ptx.cuh"
#include "recurrence_compose.cuh"
#include "recurrence_quick.cuh"
#include "recurrence_stages.cuh"
#define EACH_LANE _Pragma("unroll") for (int l = 0; l < LANES; l++)
#define IS_THERE (LENGTH % POSITIONS == 0 || first + u < LENGTH)

struct arguments {
    char *p[POINTERS];
};

ML_INLINE void load_lanes(float (&x)[LANES], const ml_bf16 *from) {
    const ml_pack<ml_bf16, LANES> q = ml_load_pack<ml_bf16, LANES>(from);
    EACH_LANE x[l] = ml_unpack(q, l);
}
ML_INLINE void load_lanes(float (&x)[LANES], const float *from) {
    const ml_pack<float, LANES> q = ml_load_pack<float, LANES>(from);
    EACH_LANE x[l] = q.e[l];
}
ML_INLINE void store_lanes(ml_bf16 *to, const float (&x)[LANES]) {
    ml_store_pack(to, ml_round_pack<ml_bf16, LANES>(x));
}
ML_INLINE void store_lanes(float *to, const float (&x)[LANES]) {
    ml_pack<float, LANES> q;
    EACH_LANE q.e[l] = x[l];
    ml_store_pack(to, q);
}
/* The sum over the warps, for each lane of a warp. */
template <typename T> ML_INLINE T sum_parts(T own, T *shared_sums) {
    __syncthreads();
    shared_sums[threadIdx.x] = own;
    __syncthreads();
    T sum = 0;
    for (int w = 0; w < WARPS; w++) sum += shared_sums[w * 32 + threadIdx.x % 32];
    return sum;
}
/* From what all warps' positions do, of which the first thread's is at `composed`: the states
 * before this warp's; `carry` is then those behind the stage. */
ML_INLINE void find_before(const STATE (*composed)[2][THREADS][LANES],
                           STATE (&carry)[STATES][LANES], STATE (&before)[STATES][LANES]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < STATES; i++) {
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            STATE by[LANES], add[LANES];
            load_lanes(by, composed[i][0][w * 32 + lane]);
            load_lanes(add, composed[i][1][w * 32 + lane]);
            EACH_LANE {
                if (w == warp) before[i][l] = carry[i][l];
                carry[i][l] = state_behind(IS_MAX_PLUS(i), by[l], add[l], carry[i][l]);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) ENTRY(arguments a) {
    extern __shared__ uint4 shared[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const long long row = (blockIdx.x * 32LL + lane) * LANES;
    char *const *P = a.p;
    const unsigned ring = shared_address(shared);
    /* of two stages in turn: slopes and offsets, by state, by thread */
    STATE(*composed)
    [STATES][2][THREADS][LANES] =
        (STATE(*)[STATES][2][THREADS][LANES])((char *)shared + STAGES * STAGE_BYTES);
    STATE carry[STATES][LANES];
    FIRST
    EACH_LANE{BEGIN} COPY_FIRST_STAGES int now = 0, next = STAGES - 1,
                                           side =
                                               0; /* parts of the ring; which of the two stages */
    for (long long begin = 0; begin < LENGTH; begin += POSITIONS) {
        NEXT_STAGE
        const char *slot = (const char *)shared + now * STAGE_BYTES;
        const long long first = begin;
        STATE slope[STATES][LANES], offset[STATES][LANES], before[STATES][LANES];
        DECLARE
#pragma unroll
        for (int k = 0; k < SPAN; k++) {
            const int u = warp * SPAN + k;
            const long long t = POSITION(u);
            if (IS_THERE) {
                LOAD EACH_LANE { READY }
            }
            (void)t;
        }
        AGAIN
#pragma unroll
        for (int k = SPAN - 1; k >= 0; k--) {
            const int u = warp * SPAN + k;
            if (IS_THERE) {
                EACH_LANE { REPLAY }
            }
        }
#pragma unroll
        for (int i = 0; i < STATES; i++)
            EACH_LANE begin_composed(IS_MAX_PLUS(i), slope[i][l], offset[i][l]);
#pragma unroll
        for (int k = 0; k < SPAN; k++) {
            const int u = warp * SPAN + k;
            if (IS_THERE) {
                EACH_LANE { KEPT COMPOSE }
            }
        }
#pragma unroll
        for (int i = 0; i < STATES; i++) {
            store_lanes(composed[side][i][0][threadIdx.x], slope[i]);
            store_lanes(composed[side][i][1][threadIdx.x], offset[i]);
        }
        __syncthreads();
        find_before(composed[side], carry, before);
        EACH_LANE { GATHER }
#pragma unroll
        for (int k = 0; k < SPAN; k++) {
            const int u = warp * SPAN + k;
            const long long t = POSITION(u);
            if (IS_THERE) {
                SAVE EACH_LANE{WORK} STORE
            }
            (void)t;
        }
        side ^= 1;
        now = now + 1 == STAGES ? 0 : now + 1;
        next = next + 1 == STAGES ? 0 : next + 1;
    }
    TOTAL
    if (warp == 0) {
        EACH_LANE { LAST }
    }
}
