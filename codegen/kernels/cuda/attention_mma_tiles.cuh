/* Products of tiles of bf16 in shared memory, on tensor cores: accumulators stay in registers. */
#pragma once
#include "mma_ptx.cuh"

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
