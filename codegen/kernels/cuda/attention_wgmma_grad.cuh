/* Workspace of the gradient on warpgroup products, in f32 elements of operand DELTA_AT: lse and
 * delta of each tile of 64 queries; sums of dq; how many added to each tile of these (turns); the
 * counter of work tiles; with LISTED what tiles are to blocks of 128 keys (entries). A sum's
 * elements are as threads hold them: [tile of 64 queries][half][4 sums of a thread][thread][4]. */
#pragma once
#ifndef MLUA_EMBEDDED
#define SUMS_AT 256000LL
#define TURNS_AT 512000LL
#define COUNTER_AT 513000LL
#define ENTRIES_AT 513001LL
#endif
#include "attention_blocks.cuh"
#include "attention_grad.cuh"
#include "attention_wgmma.cuh"

#define KEYS 128 /* of a work tile */
#define QUERY_TILES ((SEQ + 63) / 64)
#define KEY_BLOCKS ((KV_SEQ + KEYS - 1) / KEYS)

/* Four threads of a row, with four times two columns of eight each, exchange: each gets eight. */
static __device__ __forceinline__ void transpose_quad(unsigned (&x)[4]) {
#pragma unroll
    for (int step = 1; step < 4; step *= 2)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (i & step) continue;
            bool high = threadIdx.x & step;
            unsigned other = __shfl_xor_sync(~0u, high ? x[i] : x[i + step], step);
            if (high)
                x[i] = other;
            else
                x[i + step] = other;
        }
}
/* A warp's 16 rows of an accumulator to memory, of which `there` exist. The four threads of a row
 * have two columns each of eight: exchanged, each writes eight of its own, 16 bytes. */
template <int N>
static __device__ __forceinline__ void store_rows(const float (&sum)[N], float factor, ml_bf16 *to,
                                                  long long stride, int there) {
    int lane = threadIdx.x % 32;
    to += lane / 4 * stride + lane % 4 * 8;
#pragma unroll
    for (int i = 0; i < N / 4; i += 4)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            unsigned x[4];
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const float *pair = sum + (i + k) * 4 + r * 2;
                x[k] = pack_bf16(pair[0] * factor, pair[1] * factor);
            }
            transpose_quad(x);
            if (lane / 4 + r * 8 < there && lane % 4 * 8 + i * 8 < HEAD_DIM)
                *(uint4 *)(to + r * 8 * stride + i * 8) = uint4{x[0], x[1], x[2], x[3]};
        }
}
