/* Products of 16 x 16 blocks in a chunk of delta_scan.cuh on tensor cores (mma.sync), from tiles of
 * 64 rows; the inverse of a unit triangular matrix in f32.
 *
 * T = (I - A)^-1 is by substitution: blocks of 16 x 16 on the diagonal by a thread a column, those
 * below by products, T_rc = T_rr sum_j A_rj T_jc, whose operands are each the sum of two bf16, so
 * that nothing is lost. (Powers of A would overflow.) */
#pragma once
#ifndef MLUA_EMBEDDED
#define WORK_AT 9 /* bf16; what is computed of all chunks */
#endif
#include "delta_scan.cuh"

enum { LD = 68 }; /* elements of a row of A and T */

static __device__ __forceinline__ int lane_row() { return threadIdx.x % 32 / 4; }
static __device__ __forceinline__ int lane_column() { return threadIdx.x % 4 * 2; }

/* Left operands of products, 16 x 16, of a tile's rows, or of its columns as rows. */
template <int ROWS = CHUNK>
static __device__ __forceinline__ void left_of_tile(unsigned (&x)[4], unsigned tile, int row,
                                                    int column) {
    int lane = threadIdx.x % 32;
    load_matrices(x, tile + swizzled<ROWS>(row + lane % 16, column / 8 + lane / 16));
}
template <int ROWS = CHUNK>
static __device__ __forceinline__ void left_of_columns(unsigned (&x)[4], unsigned tile, int depth,
                                                       int column) {
    int lane = threadIdx.x % 32;
    load_matrices_transposed(
        x, tile + swizzled<ROWS>(depth + lane / 16 * 8 + lane % 8, column / 8 + lane / 8 % 2));
}
/* Right operands, 16 deep and 16 wide: of rows by columns, and of columns by rows. */
template <int ROWS = CHUNK>
static __device__ __forceinline__ void right_of_tile(unsigned (&x)[4], unsigned tile, int depth,
                                                     int column) {
    int lane = threadIdx.x % 32;
    load_matrices_transposed(x, tile + swizzled<ROWS>(depth + lane % 16, column / 8 + lane / 16));
}
template <int ROWS = CHUNK>
static __device__ __forceinline__ void right_of_rows(unsigned (&x)[4], unsigned tile, int row,
                                                     int depth) {
    int lane = threadIdx.x % 32;
    load_matrices(x,
                  tile + swizzled<ROWS>(row + lane / 16 * 8 + lane % 8, depth / 8 + lane / 8 % 2));
}
/* Of T in f32, its columns times `scale` (0: 1); and of its transpose, its rows times `scale`. */
static __device__ __forceinline__ void left_of_inverse(unsigned (&x)[4], const float *t, int row,
                                                       int column, const float *scale) {
    column += lane_column();
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int c = column + i / 2 * 8;
        float2 pair = *(const float2 *)(t + (row + lane_row() + i % 2 * 8) * LD + c);
        x[i] =
            scale ? pack_bf16(pair.x * scale[c], pair.y * scale[c + 1]) : pack_bf16(pair.x, pair.y);
    }
}
static __device__ __forceinline__ void left_of_transposed(unsigned (&x)[4], const float *t, int row,
                                                          int column, const float *scale) {
    column += lane_column();
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int r = row + lane_row() + i % 2 * 8, c = column + i / 2 * 8;
        float first = t[c * LD + r], second = t[(c + 1) * LD + r];
        x[i] =
            scale ? pack_bf16(first * scale[c], second * scale[c + 1]) : pack_bf16(first, second);
    }
}
template <int N>
static __device__ __forceinline__ void store_scores(const float (&x)[N][4], ml_bf16 *to,
                                                    long long step) {
    store_rows<N * 4>(*(const float(*)[N * 4]) x, to, step, CHUNK);
}
/* A column of T in a block on the diagonal: 64 threads. */
static __device__ __forceinline__ void invert_diagonal(const float *a, float *t, int thread) {
    int block = thread / 16 * 16, column = thread % 16;
    float x[16];
    a += block * LD + block;
    t += block * LD + block + column;
#pragma unroll
    for (int p = 0; p < 16; p++) {
        float sum = p == column;
#pragma unroll
        for (int j = 0; j < p; j++) sum += a[p * LD + j] * x[j];
        x[p] = sum;
        t[p * LD] = sum;
    }
}
/* sum += left right, 16 x 16 in f32: of operands x = high + low the products but low by low. */
static __device__ __forceinline__ unsigned lower_pair(unsigned high, float x, float y) {
    return pack_bf16(x - __uint_as_float(high << 16), y - __uint_as_float(high & 0xffff0000u));
}
static __device__ __forceinline__ void multiply_exactly(float (&sum)[2][4], const float *left,
                                                        const float *right) {
    unsigned high[4], low[4], b[2], c[2];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float2 x =
            *(const float2 *)(left + (lane_row() + i % 2 * 8) * LD + lane_column() + i / 2 * 8);
        high[i] = pack_bf16(x.x, x.y);
        low[i] = lower_pair(high[i], x.x, x.y);
    }
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float *at = right + (lane_column() + i * 8) * LD + n * 8 + lane_row();
            b[i] = pack_bf16(at[0], at[LD]);
            c[i] = lower_pair(b[i], at[0], at[LD]);
        }
        mma(sum[n], high, b[0], b[1]);
        mma(sum[n], high, c[0], c[1]);
        mma(sum[n], low, b[0], b[1]);
    }
}
static __device__ __forceinline__ void put_block(float *to, const float (&sum)[2][4]) {
#pragma unroll
    for (int i = 0; i < 4; i++)
        *(float2 *)(to + (lane_row() + i % 2 * 8) * LD + i / 2 * 8 + lane_column()) =
            float2{sum[i / 2][i % 2 * 2], sum[i / 2][i % 2 * 2 + 1]};
    __syncwarp();
}
/* The blocks of T below the diagonal in one column of blocks, by a warp. */
static __device__ __forceinline__ void invert_below(const float *a, float *t, int column) {
    for (int row = column + 1; row < 4; row++) {
        float sum[2][4] = {}, result[2][4] = {};
        float *to = t + row * 16 * LD + column * 16;
        for (int j = column; j < row; j++)
            multiply_exactly(sum, a + row * 16 * LD + j * 16, t + j * 16 * LD + column * 16);
        put_block(to, sum);
        multiply_exactly(result, t + row * 16 * LD + row * 16, to);
        __syncwarp();
        put_block(to, result);
    }
}
static __device__ __forceinline__ ml_bf16 *work_of(const arguments &a, long long begin,
                                                   long long number, int elements) {
    return (ml_bf16 *)a.p[WORK_AT] + begin + number * elements;
}
