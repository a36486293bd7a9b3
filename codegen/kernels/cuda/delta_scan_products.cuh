/* Products of 16 x 16 blocks in a chunk of delta_scan.cuh on tensor cores (mma.sync), from tiles of
 * 64 rows. */
#pragma once
#ifndef MLUA_EMBEDDED
#define WORK_AT 9 /* bf16; what is computed of all chunks */
#endif
#include "delta_scan.cuh"

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
template <int N>
static __device__ __forceinline__ void store_scores(const float (&x)[N][4], ml_bf16 *to,
                                                    long long step) {
    store_rows<N * 4>(*(const float(*)[N * 4]) x, to, step, CHUNK);
}
/* The two numbers less their bf16 in `high`, rounded. */
static __device__ __forceinline__ unsigned lower_pair(unsigned high, float x, float y) {
    return pack_bf16(x - __uint_as_float(high << 16), y - __uint_as_float(high & 0xffff0000u));
}
static __device__ __forceinline__ ml_bf16 *work_of(const arguments &a, long long begin,
                                                   long long number, int elements) {
    return (ml_bf16 *)a.p[WORK_AT] + begin + number * elements;
}
