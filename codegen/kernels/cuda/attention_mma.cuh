/* Attention in bf16 on tensor cores (mma.sync, sm_80 and later), head sizes up to 256 in steps of
 * 8, as in FlashAttention-2: scores stay in registers, and accumulators of one product are the left
 * operand of the next, rounded to bf16. Tiles are copied by cp.async into two slots, one tile
 * ahead; their rows in shared memory are 16 bytes longer than their contents, so that ldmatrix
 * meets no bank twice. */
#pragma once
#ifndef MLUA_EMBEDDED
#define HEAD_WIDTH 128 /* columns of tiles, in multiples of 16, or 32 above 128 */
#define VALUE_WIDTH 128
#define WARP_TILES 2 /* of 16 rows, that a warp owns */
#define KEYS 64      /* rows of a tile of keys */
#endif
#include "attention.cuh"
#include "attention_units.cuh"
#include "mma_ptx.cuh"

#define HEAD_ROW (HEAD_WIDTH + 8) /* elements from row to row of a tile */
#define VALUE_ROW (VALUE_WIDTH + 8)

/* Start to copy rows of `columns` elements to a tile of tile_rows x width, zeros around them. */
static __device__ __forceinline__ void load_tile(unsigned tile, int stride, const ml_bf16 *from,
                                                 long long row_stride, int rows, int columns,
                                                 int tile_rows, int width) {
    for (int i = threadIdx.x; i < tile_rows * (width / 8); i += 128) {
        int r = i / (width / 8), c = i % (width / 8) * 8;
        bool valid = r < rows && c < columns;
        copy_async(tile + (r * stride + c) * 2, from + (valid ? r * row_stride + c : 0),
                   valid ? 16 : 0);
    }
}
/* A warp's rows of a tile, 16 bytes a lane, to memory. */
static __device__ __forceinline__ void store_rows(ml_bf16 *to, long long row_stride,
                                                  const ml_bf16 *tile, int stride, int rows,
                                                  int columns, int tile_rows) {
    for (int i = threadIdx.x % 32; i < tile_rows * (columns / 8); i += 32) {
        int r = i / (columns / 8), c = i % (columns / 8) * 8;
        if (r < rows) *(uint4 *)(to + r * row_stride + c) = *(const uint4 *)(tile + r * stride + c);
    }
}
/* sum[m][n] += a(rows of tile a) b(rows of tile b)^T: both [row][depth], depth contiguous. */
template <int M, int N>
static __device__ __forceinline__ void multiply(float (&sum)[M][N][4], unsigned a, int a_stride,
                                                unsigned b, int b_stride, int depth) {
    int lane = threadIdx.x % 32;
    a += (lane % 16 * a_stride + lane / 16 * 8) * 2;
    b += ((lane / 16 * 8 + lane % 8) * b_stride + lane / 8 % 2 * 8) * 2;
#pragma unroll
    for (int k = 0; k < depth; k += 16) {
        unsigned left[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) load_matrices(left[m], a + (m * 16 * a_stride + k) * 2);
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            unsigned right[4];
            load_matrices(right, b + (n * 8 * b_stride + k) * 2);
#pragma unroll
            for (int m = 0; m < M; m++) {
                mma(sum[m][n], left[m], right[0], right[1]);
                mma(sum[m][n + 1], left[m], right[2], right[3]);
            }
        }
    }
}
/* sum[m][n] += p b: p accumulators of K x 8 columns (rounded to bf16), b [depth][column]. */
template <int M, int N, int K>
static __device__ __forceinline__ void
multiply_accumulators(float (&sum)[M][N][4], const float (&p)[M][K][4], unsigned b, int b_stride) {
    int lane = threadIdx.x % 32;
    b += (lane % 16 * b_stride + lane / 16 * 8) * 2;
#pragma unroll
    for (int k = 0; k < K; k += 2) {
        unsigned left[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) {
            left[m][0] = pack_bf16(p[m][k][0], p[m][k][1]);
            left[m][1] = pack_bf16(p[m][k][2], p[m][k][3]);
            left[m][2] = pack_bf16(p[m][k + 1][0], p[m][k + 1][1]);
            left[m][3] = pack_bf16(p[m][k + 1][2], p[m][k + 1][3]);
        }
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            unsigned right[4];
            load_matrices_transposed(right, b + (k * 8 * b_stride + n * 8) * 2);
#pragma unroll
            for (int m = 0; m < M; m++) {
                mma(sum[m][n], left[m], right[0], right[1]);
                mma(sum[m][n + 1], left[m], right[2], right[3]);
            }
        }
    }
}
/* Accumulators as bf16 into a warp's rows of a tile. */
template <int M, int N>
static __device__ __forceinline__ void spill_bf16(ml_bf16 *tile, int stride,
                                                  const float (&x)[M][N][4], float factor) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int r = 0; r < 2; r++)
                *(unsigned *)(tile + (m * 16 + r * 8 + lane / 4) * stride + n * 8 + lane % 4 * 2) =
                    pack_bf16(x[m][n][2 * r] * factor, x[m][n][2 * r + 1] * factor);
}
