/* The start of sums over microbatches: zeros in the first one, else what is there. Of MEMBERS sums
 * that begin together: the reads of all, then their results. */
#ifndef MLUA_EMBEDDED
#include "prelude.cuh"
#define ENTRY reset
#define ELEMENT float
#define FLAG ml_bool
#define MEMBERS 1
#define COUNTS 100000LL
#define BLOCKS 391LL
#define THREADS 256
#endif

struct arguments {
    char *p[3 * MEMBERS];
};

static __device__ const long long NAME(counts)[MEMBERS] = {COUNTS};

extern "C" __global__ void __launch_bounds__(THREADS) ENTRY(arguments a) {
    const bool first = *(const FLAG *)a.p[0] != 0;
    for (int m = 0; m < MEMBERS; m++) {
        const ELEMENT *from = (const ELEMENT *)a.p[2 * m + 1];
        ELEMENT *to = (ELEMENT *)a.p[2 * MEMBERS + m];
        if (!first && to == from) continue;
        for (long long i = blockIdx.x * (long long)THREADS + threadIdx.x; i < NAME(counts)[m];
             i += BLOCKS * THREADS)
            to[i] = first ? 0 : from[i];
    }
}
