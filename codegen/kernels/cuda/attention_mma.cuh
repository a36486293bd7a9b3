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
#include "attention_mma_tiles.cuh"
#include "attention_units.cuh"

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
