/* Products by groups of rows in bf16 by mma.sync: tiles of 128 x 128 in steps of 64 deep, two slots
 * of shared memory, eight warps of 64 x 32. Tiles are in shared memory as they are in memory: depth
 * innermost (ldmatrix as it is) or outermost (transposed). */
#ifndef MLUA_EMBEDDED
#include "prelude.cuh"
#define ENTRY ragged
#define NARROW 1    /* results are bf16, not f32 */
#define LEFT_DEEP 1 /* depth is innermost in memory */
#define RIGHT_DEEP 0
#define RIGHT_STRIDE 1024LL
#define LEFT_BYTES 18432 /* of a slot: the left operand's, all */
#define SLOT_BYTES 35840
#endif
#include "mma_ptx.cuh"
#include "ragged.cuh"

#if OUTER
#define OUT_ROW(r) (r) * C_ROW
#else
#define OUT_ROW(r) out_at[r]
#endif

/* What load_slot is called with first. */
#if OUTER
#define LOAD_ARGUMENTS walk, a, group
#else
#define LOAD_ARGUMENTS row_at
#endif

ML_INLINE void load_tile(unsigned to, int stride, const ml_bf16 *from, long long row_stride,
                         long long rows, long long columns, int tile_rows, int width) {
    for (int i = threadIdx.x; i < tile_rows * (width / 8); i += 256) {
        int r = i / (width / 8), c = i % (width / 8) * 8;
        bool valid = r < rows && c < columns;
        copy_async(to + (r * stride + c) * 2, from + (valid ? r * row_stride + c : 0),
                   valid ? 16 : 0);
    }
}
#if OUTER
/* The same rows of both; a thread's come in ascending order. */
ML_INLINE void load_slot(walk_state &walk, arguments &a, int group, unsigned to,
                         const ml_bf16 *left, const ml_bf16 *right, long long d, int rows,
                         int columns, long long depth) {
    for (int i = threadIdx.x; i < 1024; i += 256) {
        int r = i / 16, c = i % 16 * 8;
        bool valid = d + r < depth;
        if (valid) seek(walk, a, group, d + r);
        long long row = d + r - walk.first + walk.start;
        const ml_bf16 *from =
            left + (valid && c < rows ? walk.batch * A_BATCH + row * A_ROW + c : 0);
        copy_async(to + (r * 136 + c) * 2, from, valid && c < rows ? 16 : 0);
        from = right + (valid && c < columns ? walk.batch * B_BATCH + row * B_ROW + c : 0);
        copy_async(to + LEFT_BYTES + (r * 136 + c) * 2, from, valid && c < columns ? 16 : 0);
    }
    copies_commit();
}
#else
/* Rows of the tile by the table; the matrix of the group. */
ML_INLINE void load_slot(const long long *row_at, unsigned to, const ml_bf16 *left,
                         const ml_bf16 *right, long long d, int rows, int columns,
                         long long depth) {
    for (int i = threadIdx.x; i < 1024; i += 256) {
        int r = i / 8, c = i % 8 * 8;
        bool valid = r < rows && d + c < depth;
        copy_async(to + (r * 72 + c) * 2, left + (valid ? row_at[r] + d + c : 0), valid ? 16 : 0);
    }
    to += LEFT_BYTES;
    if (RIGHT_DEEP)
        load_tile(to, 72, right + d, RIGHT_STRIDE, columns, depth - d, 128, 64);
    else
        load_tile(to, 136, right + d * RIGHT_STRIDE, RIGHT_STRIDE, depth - d, columns, 64, 128);
    copies_commit();
}
#endif
extern "C" __global__ void __launch_bounds__(256) ENTRY(arguments a) {
    extern __shared__ uint4 shared[];
#include "ragged_tile.cuh"
    unsigned ring = shared_address(shared);
    int lane = threadIdx.x % 32;
    int warp_m = threadIdx.x / 128 * 64, warp_n = threadIdx.x / 32 % 4 * 32;
    int left_at = LEFT_DEEP ? (warp_m + lane % 16) * 72 + lane / 16 * 8
                            : (lane / 16 * 8 + lane % 8) * 136 + warp_m + lane / 8 % 2 * 8;
    int right_at = RIGHT_DEEP ? (warp_n + lane / 16 * 8 + lane % 8) * 72 + lane / 8 % 2 * 8
                              : lane % 16 * 136 + warp_n + lane / 16 * 8;
    float sum[4][4][4] = {};
    if (depth) load_slot(LOAD_ARGUMENTS, ring, left, right, 0, rows, columns, depth);
    int slot = 0;
    for (long long d = 0; d < depth; d += 64, slot ^= 1) {
        copies_wait();
        __syncthreads();
        if (d + 64 < depth)
            load_slot(LOAD_ARGUMENTS, ring + (slot ^ 1) * SLOT_BYTES, left, right, d + 64, rows,
                      columns, depth);
        unsigned lefts = ring + slot * SLOT_BYTES + left_at * 2;
        unsigned rights = ring + slot * SLOT_BYTES + LEFT_BYTES + right_at * 2;
#pragma unroll
        for (int k = 0; k < 64; k += 16) {
            unsigned x[4][4], y[2][4];
#pragma unroll
            for (int u = 0; u < 4; u++)
                if (LEFT_DEEP)
                    load_matrices(x[u], lefts + (u * 16 * 72 + k) * 2);
                else
                    load_matrices_transposed(x[u], lefts + (k * 136 + u * 16) * 2);
#pragma unroll
            for (int v = 0; v < 2; v++)
                if (RIGHT_DEEP)
                    load_matrices(y[v], rights + (v * 16 * 72 + k) * 2);
                else
                    load_matrices_transposed(y[v], rights + (k * 136 + v * 16) * 2);
#pragma unroll
            for (int u = 0; u < 4; u++)
#pragma unroll
                for (int v = 0; v < 4; v++)
                    mma(sum[u][v], x[u], y[v / 2][v % 2 * 2], y[v / 2][v % 2 * 2 + 1]);
        }
    }
#pragma unroll
    for (int u = 0; u < 4; u++)
#pragma unroll
        for (int v = 0; v < 4; v++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int r = warp_m + u * 16 + i * 8 + lane / 4, c = warp_n + v * 8 + lane % 4 * 2;
                if (r >= rows || c >= columns) continue;
#if NARROW
                *(unsigned *)(out + OUT_ROW(r) + c) =
                    pack_bf16(sum[u][v][2 * i], sum[u][v][2 * i + 1]);
#else
                out[OUT_ROW(r) + c] = sum[u][v][2 * i];
                out[OUT_ROW(r) + c + 1] = sum[u][v][2 * i + 1];
#endif
            }
}
