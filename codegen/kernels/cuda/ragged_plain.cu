/* Products by groups of rows of any type and strides: tiles of 64 x 64, sixteen results a thread,
 * one multiply-add at a time. */
#ifndef MLUA_EMBEDDED
#include "prelude.cuh"
#define ENTRY ragged
#define ADDER float
#define LOAD ml_load_bf16
#define RIGHT_LOAD ml_load_bf16
#define SCALE 0     /* pointer of what sums are multiplied by, of 8 bits; 0: nothing */
#define LEFT_DEEP 1 /* depth is innermost in memory */
#define RIGHT_DEEP 0
#endif
#include "ragged.cuh"

#if OUTER
#define OUT_ROW(r) (r) * C_ROW
#else
#define OUT_ROW(r) out_at[r]
#endif

extern "C" __global__ void __launch_bounds__(256) ENTRY(arguments a) {
    __shared__ ADDER lefts[16][65], rights[16][65];
#include "ragged_tile.cuh"
    int x = threadIdx.x % 16, y = threadIdx.x / 16;
    ADDER sum[4][4] = {};
    for (long long d = 0; d < depth; d += 16) {
        for (int i = threadIdx.x; i < 1024; i += 256) {
            int j = LEFT_DEEP ? i % 16 : i / 64, at = LEFT_DEEP ? i / 16 : i % 64;
            bool valid = at < rows && d + j < depth;
#if OUTER
            if (valid) seek(walk, a, group, d + j);
            lefts[j][at] =
                valid ? (ADDER)LOAD(left[walk.batch * A_BATCH +
                                         (d + j - walk.first + walk.start) * A_ROW + at * A_COL])
                      : 0;
#else
            lefts[j][at] = valid ? (ADDER)LOAD(left[row_at[at] + (d + j) * A_COL]) : 0;
#endif
            j = RIGHT_DEEP ? i % 16 : i / 64, at = RIGHT_DEEP ? i / 16 : i % 64;
            valid = at < columns && d + j < depth;
#if OUTER
            if (valid) seek(walk_right, a, group, d + j);
            rights[j][at] =
                valid
                    ? (ADDER)RIGHT_LOAD(
                          right[walk_right.batch * B_BATCH +
                                (d + j - walk_right.first + walk_right.start) * B_ROW + at * B_COL])
                    : 0;
#else
            rights[j][at] = valid ? (ADDER)RIGHT_LOAD(right[at * B_COL + (d + j) * B_ROW]) : 0;
#endif
        }
        __syncthreads();
#pragma unroll
        for (int j = 0; j < 16; j++)
#pragma unroll
            for (int u = 0; u < 4; u++)
#pragma unroll
                for (int v = 0; v < 4; v++)
                    sum[u][v] += lefts[j][y + 16 * u] * rights[j][x + 16 * v];
        __syncthreads();
    }
    const ADDER scale = SCALE ? *(const float *)a.p[SCALE] : 1;
    for (int u = 0; u < 4; u++)
        for (int v = 0; v < 4; v++)
            if (y + 16 * u < rows && x + 16 * v < columns)
                out[OUT_ROW(y + 16 * u) + (x + 16 * v) * C_COL] = STORE(sum[u][v] * scale);
}
