/* A recurrence over rows: a thread a row, over all positions, with the N elements of the states'
 * short axis in registers. Slices of the inputs, POSITIONS at a time, are copied to a ring of
 * STAGES parts of shared memory while those before them are computed. Where it REPLAYS, a stage
 * begins with the states of the forward recurrence after it: from those before the stage's last
 * position, which come by the ring too. */
#ifndef MLUA_EMBEDDED
#include "prelude.cuh"
#define ENTRY recurrence
#define POINTERS 3
#define SUMS 2 /* the first workspace of sums over rows */
#define LENGTH 1000LL
#define REVERSE 0
#define N 16
#define UNROLL 1 /* or POSITIONS: then slices and states are in registers */
#define POSITIONS 16
#define STAGES 4
#define STAGE_BYTES 4096 /* a multiple of 16 */
#define THREADS 64
#define REPLAYS 0
#define FIRST                                                                                      \
    const char *from0 = (const char *)((const float *)P[0] + (row - threadIdx.x));                 \
    float *x1 = (float *)P[1] + row;                                                               \
    float kept0[N];                                                                                \
    for (int e = 0; e < N; e++) kept0[e] = 0;
#define COPY /* of the positions from `first` on, to address `to` of shared memory */              \
    for (int c = threadIdx.x; c < POSITIONS * 16; c += THREADS) {                                  \
        const long long t = POSITION(c / 16);                                                      \
        if (t >= 0 && t < LENGTH) copy_async(to + c * 16, from0 + t * 4096LL + c % 16 * 16, 16);   \
    }
#define PRELOAD /* a row's slices of position u to registers, where the loops are unrolled */
#define BEGIN   /* states from `slot` */
#define SAVE    /* states before position t to `past` */
#define SLICES  /* of position u, that all rows share: to registers */
#define REPLAY  /* states after position t */
#define WORK    /* position t, whose slices are in `slot`; states before it in `past` */           \
    const float in0 = ((const float *)slot)[u * THREADS + threadIdx.x];                            \
    float sum = 0;                                                                                 \
    for (int e = 0; e < N; e++) sum += kept0[e] = kept0[e] * 0.5f + in0;                           \
    x1[t * 1024LL] = sum;
#define FLUSH (void)past;    /* sums over the block's rows, from `past` */
#define LAST (void)kept0[0]; /* after the last position */
#endif
#include "mma_ptx.cuh"
#include "recurrence_quick.cuh"
#include "recurrence_stages.cuh"

struct arguments {
    char *p[POINTERS];
};

template <int COUNT> ML_INLINE float element_of(const ml_pack<ml_bf16, COUNT> &q, int k) {
    return ml_unpack(q, k);
}
template <int COUNT> ML_INLINE float element_of(const ml_pack<float, COUNT> &q, int k) {
    return q.e[k];
}
template <typename T> ML_INLINE void load_slice(float (&x)[N], const T *from) {
    constexpr int pack = 16 / sizeof(T);
#pragma unroll
    for (int i = 0; i < N / pack; i++) {
        const ml_pack<T, pack> q = ml_load_pack<T, pack>(from + i * pack);
#pragma unroll
        for (int k = 0; k < pack; k++) x[(i * pack + k) % N] = element_of(q, k);
    }
}
/* Lanes that differ by HALF exchange halves of what they have, and so on to one element. */
template <int HALF, typename T> ML_INLINE void exchange_halves(T *x) {
    const bool upper = threadIdx.x & HALF;
#pragma unroll
    for (int i = 0; i < HALF; i++) {
        const T other = __shfl_xor_sync(~0u, upper ? x[i] : x[i + HALF], HALF);
        x[i] = (upper ? x[i + HALF] : x[i]) + other;
    }
    if (HALF > 0) exchange_halves<HALF / 2>(x);
}
/* Lane l gives the sum over the warp's lanes of element l % WIDTH, a power of 2 up to 32. */
template <int WIDTH, typename T> ML_INLINE T sum_rows(T (&x)[WIDTH]) {
    exchange_halves<WIDTH / 2>(x);
    T sum = x[0];
#pragma unroll
    for (int by = WIDTH; by < 32; by *= 2) sum += __shfl_xor_sync(~0u, sum, by);
    return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS) ENTRY(arguments a) {
    extern __shared__ uint4 shared[];
    const long long row = blockIdx.x * (long long)THREADS + threadIdx.x;
    const long long block = blockIdx.x;
    char *const *P = a.p;
    const unsigned ring = shared_address(shared);
    constexpr int unrolled = UNROLL; /* macros are not replaced in pragmas */
    char *past = (char *)shared + STAGES * STAGE_BYTES;
    FIRST
    COPY_FIRST_STAGES
    int now = 0, next = STAGES - 1; /* parts of the ring */
    for (long long begin = 0; begin < LENGTH; begin += POSITIONS) {
        NEXT_STAGE
        const char *slot = (const char *)shared + now * STAGE_BYTES;
        const long long first = begin;
        const int count = LENGTH - begin < POSITIONS ? (int)(LENGTH - begin) : POSITIONS;
#pragma unroll unrolled
        for (int u = 0; u < POSITIONS; u++) {
            PRELOAD
        }
#if REPLAYS
        BEGIN
#pragma unroll unrolled
        for (int u = POSITIONS - 1; u >= 0; u--) {
            const long long t = POSITION(u);
            if (LENGTH % POSITIONS == 0 || u < count) {
                SAVE if (u > 0) { SLICES REPLAY }
            }
            (void)t;
        }
#endif
#pragma unroll unrolled
        for (int u = 0; u < POSITIONS; u++) {
            const long long t = POSITION(u);
            if (LENGTH % POSITIONS == 0 || u < count) {
                SLICES WORK
            }
            (void)t;
        }
        __syncthreads();
        FLUSH
        now = now + 1 == STAGES ? 0 : now + 1;
        next = next + 1 == STAGES ? 0 : next + 1;
        (void)past, (void)block, (void)slot, (void)count;
    }
    LAST
}
