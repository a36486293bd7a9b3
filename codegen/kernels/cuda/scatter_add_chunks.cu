/* SCATTER_ADD, rows with more than CHUNK tokens: the sums of the first row (slot 0) and of the last
 * (slot 1) that chunk blockIdx.x has. */
#ifndef MLUA_EMBEDDED
#include "prelude.cuh"
#define ENTRY scatter_add
#define ALL 1000LL /* tokens of all batches */
#define THREADS 256
#endif
#include "scatter_add_sum.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) ENTRY(arguments a) {
    const unsigned *keys = (const unsigned *)a.p[KEYS_AT];
    const unsigned *starts = (const unsigned *)a.p[STARTS_AT];
    long long first = blockIdx.x * (long long)CHUNK;
    long long end = first + CHUNK < ALL ? first + CHUNK : ALL;
    long long column = (blockIdx.y * (long long)THREADS + threadIdx.x) * WIDTH;
    if (column >= COLUMNS) return;
    for (int slot = 0; slot < 2; slot++) {
        unsigned key = keys[slot ? end - 1 : first];
        if (key == (unsigned)LIMIT || (slot && key == keys[first])) continue;
        unsigned from = starts[key], to = starts[key + 1];
        if (to - from <= CHUNK) continue;
        ADDER sum[WIDTH] = {0};
        sum_tokens(a, from > first ? from : first, to < end ? to : end, column, sum);
        ADDER *out = (ADDER *)a.p[PARTIAL_AT] + column;
        out += (blockIdx.x * 2LL + slot) * COLUMNS;
        for (int j = 0; j < WIDTH; j++) out[j] = sum[j];
    }
}
