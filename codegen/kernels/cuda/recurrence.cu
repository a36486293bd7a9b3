/* A recurrence by elements: a thread a row, over all positions. The inputs of UNROLL positions are
 * loaded before the first of them is computed: loads do not wait for the states. */
#ifndef MLUA_EMBEDDED
#include "prelude.cuh"
#define ENTRY recurrence
#define POINTERS 2
#define ROWS 1024LL
#define LENGTH 1000LL
#define REVERSE 0
#define UNROLL 8
#define THREADS 128
#define FIRST /* pointers x0, x1, ... of P at `row`; values of the row that are kept */            \
    const float *x0 = (const float *)P[0] + row;                                                   \
    float *x1 = (float *)P[1] + row;                                                               \
    float kept0 = 0;
#define DECLARE float in0[UNROLL];    /* inputs */
#define LOAD in0[u] = x0[t * 1024LL]; /* those of position t */
#define WORK                                                                                       \
    kept0 = kept0 * 0.5f + in0[u];                                                                 \
    x1[t * 1024LL] = kept0;
#define LAST (void)kept0; /* after the last position */
#endif
#include "recurrence_quick.cuh"

struct arguments {
    char *p[POINTERS];
};

extern "C" __global__ void __launch_bounds__(THREADS) ENTRY(arguments a) {
    const long long row = blockIdx.x * (long long)THREADS + threadIdx.x;
    char *const *P = a.p;
    if (row >= ROWS) return;
    FIRST
    for (long long first = 0; first < LENGTH; first += UNROLL) {
        DECLARE
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            const long long t = REVERSE ? LENGTH - 1 - first - u : first + u;
            if (first + u < LENGTH) {
                LOAD
            }
            (void)t;
        }
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            const long long t = REVERSE ? LENGTH - 1 - first - u : first + u;
            if (first + u < LENGTH) {
                WORK
            }
            (void)t;
        }
    }
    LAST
}
