/* Sums over the rows of a recurrence, from those of its blocks. */
#ifndef MLUA_EMBEDDED
#include "prelude.cuh"
#define ENTRY recurrence_sums
#define POINTERS 3
#define TOTAL 1000LL /* elements of the result */
#define BLOCKS 4
#define PARTS 2  /* the operand that has the blocks' sums */
#define RESULT 1 /* the operand that is written */
#define PART float
#define MEMORY float
#define STORE(x) (x)
#define AT i /* where element i is */
#endif

struct arguments {
    char *p[POINTERS];
};

extern "C" __global__ void __launch_bounds__(256) ENTRY(arguments a) {
    const long long i = blockIdx.x * 256LL + threadIdx.x;
    if (i >= TOTAL) return;
    const PART *from = (const PART *)a.p[PARTS] + i;
    PART sum = 0;
    for (int k = 0; k < BLOCKS; k++) sum += from[k * TOTAL];
    ((MEMORY *)a.p[RESULT])[AT] = STORE(sum);
}
