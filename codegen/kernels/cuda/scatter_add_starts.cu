/* SCATTER_ADD: starts[key] is the first sorted position whose key is at least `key`, by bisection:
 * rows without tokens cost no more than others. */
#ifndef MLUA_EMBEDDED
#include "prelude.cuh"
#define ENTRY scatter_add
#define POINTERS 12
#define LIMIT 100  /* keys of all batches */
#define ALL 1000LL /* tokens of all batches */
#define KEYS_AT 3
#define STARTS_AT 8
#endif

struct arguments {
    char *p[POINTERS];
};

extern "C" __global__ void __launch_bounds__(256) ENTRY(arguments a) {
    const unsigned *keys = (const unsigned *)a.p[KEYS_AT];
    long long key = blockIdx.x * 256LL + threadIdx.x, low = 0, high = ALL;
    if (key > LIMIT) return;
    while (low < high) {
        long long middle = (low + high) / 2;
        if (keys[middle] < key)
            low = middle + 1;
        else
            high = middle;
    }
    ((unsigned *)a.p[STARTS_AT])[key] = (unsigned)low;
}
