/* A recurrence by elements: a thread a row, over all positions. Slices of the inputs, POSITIONS at
 * a time, are copied to a ring of STAGES parts of shared memory while those before them are
 * computed, so that few rows keep the memory busy; rows of a block are side by side in memory.
 * Other inputs are loaded a stage ahead. */
#ifndef MLUA_EMBEDDED
#include "prelude.cuh"
#define ENTRY recurrence
#define POINTERS 2
#define LENGTH 1000LL
#define REVERSE 0
#define POSITIONS 8
#define STAGES 4
#define STAGE_BYTES 4096 /* a multiple of 16 */
#define THREADS 128
#define WIDTH 128 /* rows of a block: a thread each */
#define FIRST     /* pointers x0, x1, ... of P at `row`; values of the row that are kept */        \
    const char *from0 = (const char *)((const float *)P[0] + (row - lane));                        \
    float *x1 = (float *)P[1] + row;                                                               \
    float kept0 = 0;
#define COPY /* of the positions from `first` on, to address `to` of shared memory */              \
    for (int c = threadIdx.x; c < POSITIONS * 32; c += THREADS) {                                  \
        const long long t = POSITION(c / 32);                                                      \
        if (t >= 0 && t < LENGTH) copy_async(to + c * 16, from0 + t * 4096LL + c % 32 * 16, 16);   \
    }
#define DECLARE /* other inputs: in2[POSITIONS], later2[POSITIONS] */
#define LOAD    /* later2[u]: that of position t */
#define WORK    /* position t, whose slices are in `slot` */                                       \
    const float in0 = ((const float *)slot)[u * WIDTH + lane];                                     \
    kept0 = kept0 * 0.5f + in0;                                                                    \
    x1[t * 1024LL] = kept0;
#define ADVANCE           /* in2[u] = later2[u] */
#define LAST (void)kept0; /* after the last position */
#endif
#include "mma_ptx.cuh"
#include "recurrence_quick.cuh"
#include "recurrence_stages.cuh"

struct arguments {
    char *p[POINTERS];
};

extern "C" __global__ void __launch_bounds__(THREADS) ENTRY(arguments a) {
    extern __shared__ uint4 shared[];
    const int lane = threadIdx.x;
    const long long row = blockIdx.x * (long long)THREADS + threadIdx.x;
    char *const *P = a.p;
    const unsigned ring = shared_address(shared);
    FIRST
    DECLARE
    COPY_FIRST_STAGES
#pragma unroll
    for (int u = 0; u < POSITIONS; u++) {
        const long long first = 0, t = POSITION(u);
        if (u < LENGTH) {
            LOAD
        }
        (void)t;
        ADVANCE
    }
    int now = 0, next = STAGES - 1; /* parts of the ring */
    for (long long begin = 0; begin < LENGTH; begin += POSITIONS) {
        NEXT_STAGE
#pragma unroll
        for (int u = 0; u < POSITIONS; u++) {
            const long long first = begin + POSITIONS, t = POSITION(u);
            if (first + u < LENGTH) {
                LOAD
            }
            (void)t;
        }
        const char *slot = (const char *)shared + now * STAGE_BYTES;
#pragma unroll
        for (int u = 0; u < POSITIONS; u++) {
            const long long first = begin, t = POSITION(u);
            if (LENGTH % POSITIONS == 0 || first + u < LENGTH) {
                WORK
            }
            (void)t;
        }
#pragma unroll
        for (int u = 0; u < POSITIONS; u++) {
            ADVANCE
        }
        now = now + 1 == STAGES ? 0 : now + 1;
        next = next + 1 == STAGES ? 0 : next + 1;
    }
    LAST
}
