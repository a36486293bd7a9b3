/* Scans of delta_scan.cuh with a decay for each key (GLA, KDA, RWKV-7), a_t a vector. Within a
 * chunk decays between positions are products, of a sub-block of 16 positions from its beginning or
 * to its end, and of whole sub-blocks; nothing is divided by a decay, and no logarithm is taken, so
 * that 0, negative decays and those above 1 are as exact as in a loop. Of two positions of one
 * sub-block, products over keys are by elements; of two sub-blocks on tensor cores:
 *
 *     sum_c w_c(p) u_c(j) D_c = (w(p) from the beginning) blocks between (u(j) to the end)
 *
 * Where U and W are lacking (RANK 0), so are z and all that comes from it. */
#pragma once
#ifndef MLUA_EMBEDDED
#define RANK 1
#define A_KEY 1LL /* from one key's decay to the next one's */
#endif
#include "delta_scan_products.cuh"

#define SUB 16 /* positions of a sub-block */
#define SUBS (CHUNK / SUB)

/* The decays of a chunk, rows by position; behind the last position 1. */
static __device__ __forceinline__ void load_decays(float *decays, const arguments &a,
                                                   long long batch, int chunk) {
    const A_TYPE *from = (const A_TYPE *)a.p[A_AT] + A_OFFSET(batch) + chunk * CHUNK * A_STEP;
    const int there = THERE(chunk);
#pragma unroll 16
    for (int i = threadIdx.x; i < CHUNK * KEYS; i += 256) {
        const int row = i / KEYS, key = i % KEYS;
        decays[i] = row < there ? A_LOAD(from[row * A_STEP + key * A_KEY]) : 1.0f;
    }
}
/* An element of a tile of 64 rows. */
static __device__ __forceinline__ ml_bf16 *element_of(char *tile, int row, int column) {
    return (ml_bf16 *)(tile + swizzled<CHUNK>(row, column / 8)) + column % 8;
}
/* By 256 threads: rows of tiles times their decays in the sub-block, those that read (q, w) from
 * its beginning, those that are written (u, k) to its end; the products of whole sub-blocks. Tiles
 * in the order q, w, u, k; `to` may be `from`. */
static __device__ __forceinline__ void scale_in_blocks(char *to, char *from, int tile,
                                                       const float *decays, float *blocks) {
    for (int item = threadIdx.x; item < SUBS * KEYS; item += 256) {
        const int key = item % KEYS, first = item / KEYS * SUB;
        float decay[SUB], product = 1;
        const auto scale = [&](int which, const float(&by)[SUB]) {
            float x[SUB]; /* all loaded before one is stored */
#pragma unroll
            for (int p = 0; p < SUB; p++)
                x[p] = ml_load_bf16(*element_of(from + which * tile, first + p, key));
#pragma unroll
            for (int p = 0; p < SUB; p++)
                *element_of(to + which * tile, first + p, key) = ml_store_bf16(x[p] * by[p]);
        };
        float before[SUB], after[SUB]; /* the position's own decay */
#pragma unroll
        for (int p = 0; p < SUB; p++) {
            decay[p] = decays[(first + p) * KEYS + key];
            before[p] = product;
            after[p] = product *= decay[p];
        }
        blocks[item] = product;
        if (RANK) scale(1, before);
        scale(0, AFTER ? after : before);
        product = 1;
#pragma unroll
        for (int j = SUB - 1; j >= 0; j--) {
            before[j] = product;
            product *= decay[j];
        }
        if (RANK) scale(2, before);
        scale(3, before);
    }
}
