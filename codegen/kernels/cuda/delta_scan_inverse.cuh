/* Products with T = (I - A)^-1 of a chunk (delta_scan_triangle.cuh), which delta_scan_prepare.cu
 * and delta_scan_keys_prepare.cu have in common behind their scores. Included after the enumerators
 * TILE (bytes of a tile: Q, W, U and K stand in this order), T_SHARED and B_SHARED (B as bf16). */
#pragma once
#ifndef MLUA_EMBEDDED
#include "delta_scan_products.cuh"
#ifndef TW_WORK
#define GRADIENT 1
#define TW_WORK 0LL
#define TB_WORK 0LL
#define TU_WORK 0LL
#define ET_WORK 0LL
enum { TILE = CHUNK * KEYS * 2, T_SHARED = 4 * TILE, B_SHARED = T_SHARED + 14 * 1024 };
#endif
#endif
#include "delta_scan_triangle.cuh"

/* A left operand, 16 rows a warp, of T or of its transpose (`turned`), by half of the columns of a
 * tile. */
template <int WIDTH>
static __device__ __forceinline__ void multiply_by(const unsigned (&left)[16], unsigned tile,
                                                   bool turned, ml_bf16 *to) {
    const int warp = threadIdx.x / 32, block = warp % 4, half = warp / 4;
    float sum[WIDTH / 16][4] = {};
#pragma unroll
    for (int depth = 0; depth < 4; depth++) {
        if (turned ? depth < block : depth > block) continue;
        const unsigned part[4] = {left[4 * depth], left[4 * depth + 1], left[4 * depth + 2],
                                  left[4 * depth + 3]};
        unsigned right[4];
#pragma unroll
        for (int n = 0; n < WIDTH / 16; n += 2) {
            right_of_tile(right, tile, depth * 16, half * (WIDTH / 2) + n * 8);
            mma(sum[n], part, right[0], right[1]);
            mma(sum[n + 1], part, right[2], right[3]);
        }
    }
    store_scores(sum, to + block * 16 * WIDTH + half * WIDTH / 2, WIDTH);
}
/* E T: E of 16 rows a warp, T as bf16 in place of B. */
static __device__ __forceinline__ void multiply_scores(const arguments &a, unsigned rounded,
                                                       long long number, const unsigned (&e)[16]) {
    const int block = threadIdx.x / 32;
    float sum[8][4] = {};
#pragma unroll
    for (int depth = 0; depth < 4; depth++) {
        if (depth > block) continue;
        const unsigned part[4] = {e[4 * depth], e[4 * depth + 1], e[4 * depth + 2],
                                  e[4 * depth + 3]};
        unsigned right[4];
#pragma unroll
        for (int n = 0; n < 8; n += 2) {
            right_of_tile(right, rounded, depth * 16, n * 8);
            mma(sum[n], part, right[0], right[1]);
            mma(sum[n + 1], part, right[2], right[3]);
        }
    }
    store_scores(sum, work_of(a, ET_WORK, number, CHUNK * CHUNK) + block * 16 * CHUNK, CHUNK);
}
/* Sixteen rows of 64 columns, as bf16, to a tile. */
static __device__ __forceinline__ void put_pairs(char *tile, const unsigned (&x)[16], int block) {
#pragma unroll
    for (int i = 0; i < 16; i++)
        *(unsigned *)(tile + swizzled<CHUNK>(block * 16 + lane_row() + i % 2 * 8, i / 2) +
                      lane_column() * 2) = x[i];
}
/* A and B of a warp's rows, for the inverse and its products. */
static __device__ __forceinline__ void put_scores(char *base, const float (&by_u)[8][4],
                                                  const unsigned (&by_k)[16], int block) {
    put_pairs(base + B_SHARED, by_k, block);
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
        for (int r = 0; r < 2; r++)
            if (n / 2 <= block)
                *(float2 *)(block_of((float *)(base + T_SHARED), block, n / 2) +
                            in_block(lane_row() + r * 8, n % 2 * 8 + lane_column())) =
                    float2{by_u[n][2 * r], by_u[n][2 * r + 1]};
}
/* T B and T W; for the gradient T^T U, and E T of the scores `e` that the first four warps have.
 * `of_w`, `of_u`: factors of the rows of W and U; nullptr: 1. */
static __device__ __forceinline__ void multiply_by_inverse(const arguments &a, char *base,
                                                           long long number, const float *of_w,
                                                           const float *of_u,
                                                           const unsigned (&e)[16]) {
    const unsigned at = shared_address(base);
    const int block = threadIdx.x / 32 % 4;
    float *t = (float *)(base + T_SHARED);
    unsigned left[16];
    left_of_rows(left, t, block, nullptr);
    multiply_by<CHUNK>(left, at + B_SHARED, false, work_of(a, TB_WORK, number, CHUNK * CHUNK));
    if (GRADIENT) {
        __syncthreads(); /* B is read no more */
        if (threadIdx.x < 128) put_pairs(base + B_SHARED, left, block);
    }
    if (of_w) left_of_rows(left, t, block, of_w);
    multiply_by<KEYS>(left, at + TILE, false, work_of(a, TW_WORK, number, CHUNK * KEYS));
    if (!GRADIENT) return;
    left_of_turned_rows(left, t, block, of_u);
    multiply_by<KEYS>(left, at + 2 * TILE, true, work_of(a, TU_WORK, number, CHUNK * KEYS));
    __syncthreads();
    if (threadIdx.x < 128) multiply_scores(a, at + B_SHARED, number, e);
}
