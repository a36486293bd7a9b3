/* General kernels of attention: any dtype, strides and head size, one multiply-add at a time from
 * tiles in shared memory.
 *
 * A block is 16 x 16 threads; thread (ty, tx) holds rows ty + 16 i and columns tx + 16 j of a TILE
 * x TILE tile. Rows in shared memory have odd lengths, so that columns are in distinct banks. */
#pragma once
#ifndef MLUA_EMBEDDED
#define REAL float /* what is computed in */
#define ELEMENT ml_bf16
#define LSE_ELEMENT float
#define LOAD ml_load_bf16
#define STORE ml_store_bf16
#define EXP ml_exp_f32
#define LOG ml_log_f32
#define TILE 64
#endif
#include "attention.cuh"

#define EACH (TILE / 16) /* rows, and columns, of a tile that a thread holds */
#define TILE_ROW (TILE + 1)
#define HEAD_ROW (HEAD_DIM | 1)
#define VALUE_ROW (VALUE_DIM | 1)
#define HEAD_EACH ((HEAD_DIM + 15) / 16)
#define VALUE_EACH ((VALUE_DIM + 15) / 16)
#define QUERY_TILES ((SEQ + TILE - 1) / TILE)
#define KEY_TILES ((KV_SEQ + TILE - 1) / TILE)

static __device__ __forceinline__ void load_tile(REAL *tile, int width, const ELEMENT *from,
                                                 long long row_stride, long long column_stride,
                                                 int rows, int columns, REAL factor) {
    for (int i = threadIdx.x; i < TILE * columns; i += 256) {
        int r = i / columns, c = i % columns;
        tile[r * width + c] =
            r < rows ? (REAL)LOAD(from[r * row_stride + c * column_stride]) * factor : 0;
    }
}
/* sum[i][j] += a(row, k) b(column, k) with the strides given. */
template <int ROWS, int COLUMNS>
static __device__ __forceinline__ void multiply(REAL (&sum)[ROWS][COLUMNS], const REAL *a,
                                                int a_row, int a_k, const REAL *b, int b_column,
                                                int b_k, int columns, int depth) {
    int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
    for (int k = 0; k < depth; k++) {
        REAL x[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; i++) x[i] = a[(ty + 16 * i) * a_row + k * a_k];
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) {
            REAL y = tx + 16 * j < columns ? b[(tx + 16 * j) * b_column + k * b_k] : 0;
#pragma unroll
            for (int i = 0; i < ROWS; i++) sum[i][j] += x[i] * y;
        }
    }
}
/* Over the 16 threads of a row. */
static __device__ __forceinline__ REAL row_sum(REAL x) {
    for (int d = 8; d > 0; d /= 2) x += __shfl_xor_sync(~0u, x, d);
    return x;
}
static __device__ __forceinline__ REAL row_max(REAL x) {
    for (int d = 8; d > 0; d /= 2) {
        REAL y = __shfl_xor_sync(~0u, x, d);
        x = y > x ? y : x;
    }
    return x;
}
