/* Adds up the parts of the keys (cached_attention_operands.h): a block is a query of a head. */
#ifndef MLUA_EMBEDDED
#include "prelude.cuh"
#define ENTRY cached_attention_merge
#define POINTERS 8
#define EXP ml_exp_f32
#endif
#include "../c/cached_attention_operands.h"

struct arguments {
    char *p[POINTERS];
};

extern "C" __global__ void __launch_bounds__(128) ENTRY(arguments a) {
    kernel_begins();
    const int i = blockIdx.x % NEW, head = blockIdx.x / NEW % HEADS,
              row = blockIdx.x / (NEW * HEADS);
    const float *part = (const float *)a.p[PARTIAL_AT] + PART_OF((long long)row, head, i, 0);
    QUERY *o = (QUERY *)a.p[O_AT] + O_OF(row, head, i);
    float largest = LOWEST;
#pragma unroll
    for (int k = 0; k < SPLITS; k++) {
        const float x = part[k * PARTIAL_ROW + VALUE_DIM];
        largest = x > largest ? x : largest;
    }
    for (int d = threadIdx.x; d < VALUE_DIM; d += 128) {
        float sum = 0, out = 0;
        /* Without branches: all loads are under way at once. A part without keys has zeros. */
#pragma unroll
        for (int k = 0; k < SPLITS; k++) {
            const float weight = EXP(part[k * PARTIAL_ROW + VALUE_DIM] - largest);
            sum += part[k * PARTIAL_ROW + VALUE_DIM + 1] * weight;
            out += part[k * PARTIAL_ROW + d] * weight;
        }
        o[d * O_DIM] = QUERY_STORE(sum == 0 ? 0 : out / sum);
    }
}
