/* T = (I - A)^-1 of a strictly lower triangular A of 64 x 64 in f32, in place of A in shared
 * memory, by a warpgroup. A matrix is its ten blocks of 16 x 16 on and below the diagonal; four
 * more hold what is between.
 *
 * Blocks on the diagonal by substitution, a thread a column; those below by products on tensor
 * cores (mma.sync) whose operands are each the sum of two bf16, so that nothing is lost: T_rc =
 * T_rr A_rc T_cc beside the diagonal, then the lower left half's four, T_bb (A_ba T_aa). (Powers of
 * A would overflow.) */
#pragma once
#include "delta_scan_products.cuh"

enum { TRIANGLE = 14 * 16 * 16 * 4 };

static __device__ __forceinline__ float *block_of(float *t, int row, int column) {
    return t + (row * (row + 1) / 2 + column) * 256;
}
static __device__ __forceinline__ float *block_between(float *t, int number) {
    return t + (10 + number) * 256;
}
/* Rows of a block are 16 banks: half of the columns are exchanged in every second pair of rows. */
static __device__ __forceinline__ int in_block(int row, int column) {
    return row * 16 + (column ^ (row & 2) << 2);
}
/* A thread's pairs of a left operand; times `scale` of their columns (nullptr: 1). */
static __device__ __forceinline__ void left_of_block(unsigned (&x)[4], const float *block,
                                                     const float *scale) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int c = lane_column() + i / 2 * 8;
        const float2 pair = *(const float2 *)(block + in_block(lane_row() + i % 2 * 8, c));
        x[i] =
            scale ? pack_bf16(pair.x * scale[c], pair.y * scale[c + 1]) : pack_bf16(pair.x, pair.y);
    }
}
/* The same of the block's transpose. */
static __device__ __forceinline__ void left_of_turned(unsigned (&x)[4], const float *block,
                                                      const float *scale) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int r = lane_row() + i % 2 * 8, c = lane_column() + i / 2 * 8;
        const float first = block[in_block(c, r)], second = block[in_block(c + 1, r)];
        x[i] =
            scale ? pack_bf16(first * scale[c], second * scale[c + 1]) : pack_bf16(first, second);
    }
}
/* Sixteen rows of T as a left operand of depth 64, or of its transpose. */
static __device__ __forceinline__ void left_of_rows(unsigned (&x)[16], float *t, int row,
                                                    const float *scale) {
#pragma unroll
    for (int depth = 0; depth < 4; depth++) {
        unsigned part[4] = {};
        if (depth <= row)
            left_of_block(part, block_of(t, row, depth), scale ? scale + depth * 16 : nullptr);
#pragma unroll
        for (int i = 0; i < 4; i++) x[4 * depth + i] = part[i];
    }
}
static __device__ __forceinline__ void left_of_turned_rows(unsigned (&x)[16], float *t, int row,
                                                           const float *scale) {
#pragma unroll
    for (int depth = 0; depth < 4; depth++) {
        unsigned part[4] = {};
        if (depth >= row)
            left_of_turned(part, block_of(t, depth, row), scale ? scale + depth * 16 : nullptr);
#pragma unroll
        for (int i = 0; i < 4; i++) x[4 * depth + i] = part[i];
    }
}
/* sum += left right in f32: of operands x = high + low the products but low by low. */
static __device__ __forceinline__ void multiply_blocks(float (&sum)[2][4], const float *left,
                                                       const float *right) {
    unsigned high[4], low[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 x =
            *(const float2 *)(left + in_block(lane_row() + i % 2 * 8, lane_column() + i / 2 * 8));
        high[i] = pack_bf16(x.x, x.y);
        low[i] = lower_pair(high[i], x.x, x.y);
    }
#pragma unroll
    for (int n = 0; n < 2; n++) {
        unsigned b[2], c[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float *at = right + in_block(lane_column() + i * 8, n * 8 + lane_row());
            b[i] = pack_bf16(at[0], at[16]);
            c[i] = lower_pair(b[i], at[0], at[16]);
        }
        mma(sum[n], high, b[0], b[1]);
        mma(sum[n], high, c[0], c[1]);
        mma(sum[n], low, b[0], b[1]);
    }
}
static __device__ __forceinline__ void put_sums(float *to, const float (&sum)[2][4]) {
#pragma unroll
    for (int i = 0; i < 4; i++)
        *(float2 *)(to + in_block(lane_row() + i % 2 * 8, i / 2 * 8 + lane_column())) =
            float2{sum[i / 2][i % 2 * 2], sum[i / 2][i % 2 * 2 + 1]};
    __syncwarp();
}
/* A block on the diagonal, by a warp. */
static __device__ __forceinline__ void invert_block(float *block) {
    const int column = threadIdx.x % 16;
    float x[16];
#pragma unroll
    for (int p = 0; p < 16; p++) {
        float sum = p == column;
#pragma unroll
        for (int j = 0; j < p; j += 4) {
            const float4 a = *(const float4 *)(block + in_block(p, j));
            sum += a.x * x[j];
            if (j + 1 < p) sum += a.y * x[j + 1];
            if (j + 2 < p) sum += a.z * x[j + 2];
            if (j + 3 < p) sum += a.w * x[j + 3];
        }
        x[p] = sum;
    }
    __syncwarp();
    if (threadIdx.x % 32 >= 16) return;
#pragma unroll
    for (int p = 0; p < 16; p++) block[in_block(p, column)] = x[p];
}
/* By the four warps of a warpgroup, which meet at named barrier BARRIER: before, and afterwards the
 * caller's. */
template <int BARRIER> static __device__ __forceinline__ void invert_triangle(float *t) {
    const int warp = threadIdx.x / 32 % 4, row = 2 + warp / 2, column = warp % 2;
    float sum[2][4] = {}, last[2][4] = {};
    sync_some<BARRIER, 128>();
    invert_block(block_of(t, warp, warp));
    sync_some<BARRIER, 128>();
    if (warp < 2) {
        const int r = 2 * warp + 1, c = 2 * warp;
        float first[2][4] = {}, result[2][4] = {};
        multiply_blocks(first, block_of(t, r, c), block_of(t, c, c));
        put_sums(block_between(t, warp), first);
        multiply_blocks(result, block_of(t, r, r), block_between(t, warp));
        put_sums(block_of(t, r, c), result);
    }
    sync_some<BARRIER, 128>();
    for (int j = column; j < 2; j++)
        multiply_blocks(sum, block_of(t, row, j), block_of(t, j, column));
    put_sums(block_between(t, warp), sum);
    sync_some<BARRIER, 128>();
    for (int j = 2; j <= row; j++)
        multiply_blocks(last, block_of(t, row, j), block_between(t, (j - 2) * 2 + column));
    put_sums(block_of(t, row, column), last);
}
