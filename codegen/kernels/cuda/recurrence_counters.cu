/* Zeros before recurrence_grid.cu: where its blocks count, and operands that rows do not fill. */
#ifndef MLUA_EMBEDDED
#include "prelude.cuh"
#define ENTRY recurrence_counters
#define POINTERS 4
#define COUNTERS 3
#define WORDS 1024
#endif

struct arguments {
    char *p[POINTERS];
};

extern "C" __global__ void ENTRY(arguments a) {
    unsigned i = blockIdx.x * 128 + threadIdx.x;
    if (i < WORDS) ((unsigned *)a.p[COUNTERS])[i] = 0;
}
