/* Products with T = (I - A)^-1, which is at T_SHARED in f32, of a chunk: what delta_scan_prepare.cu
 * and delta_scan_keys_prepare.cu have in common behind their scores. Included after the enumerators
 * TILE (bytes of a tile: Q, W, U and K stand in this order), A_SHARED, T_SHARED and B_SHARED (B as
 * bf16). */
#pragma once
#ifndef MLUA_EMBEDDED
#include "delta_scan_products.cuh"
#ifndef TW_WORK
#define GRADIENT 1
#define TW_WORK 0LL
#define TB_WORK 0LL
#define TU_WORK 0LL
#define ET_WORK 0LL
enum { TILE = CHUNK * KEYS * 2, A_SHARED = 4 * TILE, T_SHARED, B_SHARED };
#endif
#endif

/* T W and T B: 16 rows and half of the columns a warp. `factors` are of W's rows; nullptr: 1. */
static __device__ __forceinline__ void multiply_inverse(const arguments &a, char *base,
                                                        long long number, const float *factors) {
    unsigned at = shared_address(base);
    const float *t = (const float *)(base + T_SHARED);
    int warp = threadIdx.x / 32, block = warp % 4, half = warp / 4;
    float w[KEYS / 16][4] = {}, b[4][4] = {};
#pragma unroll
    for (int depth = 0; depth < 4; depth++) {
        if (depth > block) continue;
        unsigned left[4], right[4];
        left_of_inverse(left, t, block * 16, depth * 16, factors);
#pragma unroll
        for (int n = 0; n < KEYS / 16; n += 2) {
            right_of_tile(right, at + TILE, depth * 16, half * (KEYS / 2) + n * 8);
            mma(w[n], left, right[0], right[1]);
            mma(w[n + 1], left, right[2], right[3]);
        }
        if (factors) left_of_inverse(left, t, block * 16, depth * 16, nullptr);
#pragma unroll
        for (int n = 0; n < 4; n += 2) {
            right_of_tile(right, at + B_SHARED, depth * 16, half * 32 + n * 8);
            mma(b[n], left, right[0], right[1]);
            mma(b[n + 1], left, right[2], right[3]);
        }
    }
    store_scores(w, work_of(a, TW_WORK, number, CHUNK * KEYS) + block * 16 * KEYS + half * KEYS / 2,
                 KEYS);
    store_scores(b, work_of(a, TB_WORK, number, CHUNK * CHUNK) + block * 16 * CHUNK + half * 32,
                 CHUNK);
}
/* T^T U; `factors` are of U's rows; nullptr: 1. */
static __device__ __forceinline__ void multiply_transposed(const arguments &a, char *base,
                                                           long long number, const float *factors) {
    unsigned at = shared_address(base);
    const float *t = (const float *)(base + T_SHARED);
    int warp = threadIdx.x / 32, block = warp % 4, half = warp / 4;
    float u[KEYS / 16][4] = {};
#pragma unroll
    for (int depth = 0; depth < 4; depth++) {
        if (depth < block) continue;
        unsigned left[4], right[4];
        left_of_transposed(left, t, block * 16, depth * 16, factors);
#pragma unroll
        for (int n = 0; n < KEYS / 16; n += 2) {
            right_of_tile(right, at + 2 * TILE, depth * 16, half * (KEYS / 2) + n * 8);
            mma(u[n], left, right[0], right[1]);
            mma(u[n + 1], left, right[2], right[3]);
        }
    }
    store_scores(u, work_of(a, TU_WORK, number, CHUNK * KEYS) + block * 16 * KEYS + half * KEYS / 2,
                 KEYS);
}
/* E T: E in registers, T as bf16 in place of A. */
static __device__ __forceinline__ void multiply_scores(const arguments &a, char *base,
                                                       long long number, const float (&e)[8][4]) {
    unsigned at = shared_address(base);
    int block = threadIdx.x / 32;
    float sum[8][4] = {};
#pragma unroll
    for (int depth = 0; depth < 4; depth++) {
        if (depth > block) continue;
        unsigned right[4];
        const unsigned left[4] = {pack_bf16(e[2 * depth][0], e[2 * depth][1]),
                                  pack_bf16(e[2 * depth][2], e[2 * depth][3]),
                                  pack_bf16(e[2 * depth + 1][0], e[2 * depth + 1][1]),
                                  pack_bf16(e[2 * depth + 1][2], e[2 * depth + 1][3])};
#pragma unroll
        for (int n = 0; n < 8; n += 2) {
            right_of_tile(right, at + A_SHARED, depth * 16, n * 8);
            mma(sum[n], left, right[0], right[1]);
            mma(sum[n + 1], left, right[2], right[3]);
        }
    }
    store_scores(sum, work_of(a, ET_WORK, number, CHUNK * CHUNK) + block * 16 * CHUNK, CHUNK);
}
/* All of them: for the gradient T^T U, and E T of the scores `e` that the first four warps have. */
static __device__ __forceinline__ void multiply_by_inverse(const arguments &a, char *base,
                                                           long long number, const float *of_w,
                                                           const float *of_u,
                                                           const float (&e)[8][4]) {
    const float *t = (const float *)(base + T_SHARED);
    multiply_inverse(a, base, number, of_w);
    if (!GRADIENT) return;
    for (int i = threadIdx.x; i < CHUNK * 8; i += 256) {
        const float *x = t + i / 8 * LD + i % 8 * 8;
        *(uint4 *)(base + A_SHARED + swizzled<CHUNK>(i / 8, i % 8)) =
            uint4{pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]),
                  pack_bf16(x[6], x[7])};
    }
    multiply_transposed(a, base, number, of_u);
    __syncthreads();
    if (threadIdx.x < 128) multiply_scores(a, base, number, e);
}
