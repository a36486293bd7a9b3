/* Products by groups of rows in bf16 on Hopper's warpgroup products (wgmma), where strides or the
 * driver do not allow tensor maps (ragged_tma.cu).
 *
 * A block computes 128 x 256, each of two warpgroups 64 rows of it, in steps of 64 deep. Four slots
 * of shared memory: copies (cp.async, so that rows may come from anywhere) run two steps ahead of
 * the products, of which one group may be under way while the next is issued; a slot is written
 * again only after a barrier behind the wait for its products. */
#ifndef MLUA_EMBEDDED
#include "prelude.cuh"
#define ENTRY ragged
#define NARROW 1 /* results are bf16, not f32 */
#endif
#include "ragged.cuh"
#include "ragged_wgmma.cuh"

enum { LEFT_BYTES = 128 * 128, SLOT_BYTES = LEFT_BYTES + 256 * 128 };

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

/* Where a 16-byte part of a line is. */
ML_INLINE unsigned swizzled(int line, int part) { return line * 128 + (part ^ line % 8) * 16; }
#if OUTER
/* The same rows of both; a thread's come in ascending order. */
ML_INLINE void load_slot(walk_state &walk, arguments &a, int group, unsigned to,
                         const ml_bf16 *left, const ml_bf16 *right, long long d, int rows,
                         int columns, long long depth) {
    for (int r = threadIdx.x / 16; r < 64; r += 16) {
        bool valid = d + r < depth;
        if (valid) seek(walk, a, group, d + r);
        long long row = d + r - walk.first + walk.start;
        const ml_bf16 *from = left + (valid ? walk.batch * A_BATCH + row * A_ROW : 0);
        int c = threadIdx.x % 16 * 8;
        bool in = valid && c < rows;
        copy_async(to + c / 64 * 8192 + swizzled(r, c / 8 % 8), from + (in ? c : 0), in ? 16 : 0);
        from = right + (valid ? walk.batch * B_BATCH + row * B_ROW : 0);
        for (; c < 256; c += 128) {
            in = valid && c < columns;
            copy_async(to + LEFT_BYTES + c / 64 * 8192 + swizzled(r, c / 8 % 8),
                       from + (in ? c : 0), in ? 16 : 0);
        }
    }
}
#else
/* Rows of the tile by the table; the matrix of the group. */
ML_INLINE void load_slot(const long long *row_at, unsigned to, const ml_bf16 *left,
                         const ml_bf16 *right, long long d, int rows, int columns,
                         long long depth) {
#pragma unroll
    for (int i = threadIdx.x; i < 128 * 8; i += 256) {
        int r = i / 8, c = i % 8 * 8;
        bool valid = r < rows && d + c < depth;
        copy_async(to + swizzled(r, i % 8), left + (valid ? row_at[r] + d + c : 0), valid ? 16 : 0);
    }
    to += LEFT_BYTES;
#pragma unroll
    for (int i = threadIdx.x; i < 256 * 8; i += 256) {
        if (RIGHT_DEEP) {
            int r = i / 8, c = i % 8 * 8;
            bool valid = r < columns && d + c < depth;
            copy_async(to + swizzled(r, i % 8), right + (valid ? r * B_COL + d + c : 0),
                       valid ? 16 : 0);
        } else {
            int r = i / 32, c = i % 32 * 8;
            bool valid = d + r < depth && c < columns;
            copy_async(to + c / 64 * 8192 + swizzled(r, i % 8),
                       right + (valid ? (d + r) * B_ROW + c : 0), valid ? 16 : 0);
        }
    }
}
#endif
extern "C" __global__ void __launch_bounds__(256, 1) ENTRY(arguments a) {
    extern __shared__ uint4 shared[];
#include "ragged_tile.cuh"
    unsigned ring = (shared_address(shared) + 1023) & ~1023u;
    unsigned warpgroup = threadIdx.x / 128 * 8192;
    float sum[128] = {};
    int steps = (int)((depth + 63) / 64);
    for (int ahead = 0; ahead < 2; ahead++) {
        if (ahead < steps)
            load_slot(LOAD_ARGUMENTS, ring + ahead * SLOT_BYTES, left, right, ahead * 64LL, rows,
                      columns, depth);
        copies_commit();
    }
    for (int step = 0; step < steps; step++) {
        copies_landed<1>();
        __syncthreads();
        unsigned lefts = ring + step % 4 * SLOT_BYTES + warpgroup;
        unsigned rights = ring + step % 4 * SLOT_BYTES + LEFT_BYTES;
        wgmma_begin();
#pragma unroll
        for (int k = 0; k < 4; k++)
            wgmma(sum, descriptor(lefts + k * LEFT_STEP, LEFT_BLOCK),
                  descriptor(rights + k * RIGHT_STEP, RIGHT_BLOCK), 1);
        wgmma_commit();
        if (step + 2 < steps)
            load_slot(LOAD_ARGUMENTS, ring + (step + 2) % 4 * SLOT_BYTES, left, right,
                      (step + 2) * 64LL, rows, columns, depth);
        copies_commit();
        wgmma_wait<1>();
    }
    wgmma_wait<0>();
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int u = 0; u < 32; u++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int r = threadIdx.x / 32 * 16 + i * 8 + lane / 4, c = u * 8 + lane % 4 * 2;
            if (r >= rows || c >= columns) continue;
#if NARROW
            *(unsigned *)(out + OUT_ROW(r) + c) =
                pack_bf16(sum[u * 4 + 2 * i], sum[u * 4 + 2 * i + 1]);
#else
            *(float2 *)(out + OUT_ROW(r) + c) =
                make_float2(sum[u * 4 + 2 * i], sum[u * 4 + 2 * i + 1]);
#endif
        }
}
