/* Products of 64 x 256 by a warpgroup (of 8 bits also 64 x 128), and their operands in shared
 * memory: 128-byte lines whose 16-byte parts are exchanged by the number of the line modulo 8
 * (swizzle). Depth innermost: line r holds 64 deep of row r, eight lines a core matrix, and a
 * product's depth of 16 is 32 bytes of each line. Rows or columns innermost: blocks of 64 columns
 * one after another, line d of a block is its depth d, and a product's depth of 16 is 16 lines.
 * Operands of 8 bits have depth innermost, 128 deep in a line, a product's depth of 32 in 32 bytes.
 */
#pragma once
#ifndef MLUA_EMBEDDED
#include "prelude.cuh"
#define OUTER 0
#define RIGHT_DEEP 0 /* depth is innermost in memory */
#define LEFT_FLAT 0  /* rows are */
#define BYTES 0      /* operands of 8 bits, of these formats */
#define PROMOTES 0   /* each 128 of depth are added up apart */
#define LEFT_FORMAT e4m3
#define RIGHT_FORMAT e4m3
#endif
#include "hopper.cuh"

#if BYTES && PROMOTES
WGMMA_BYTES(wgmma, 128, 64, 64, 65, 66, LEFT_FORMAT, RIGHT_FORMAT)
#elif BYTES
WGMMA_BYTES(wgmma, 256, 128, 128, 129, 130, LEFT_FORMAT, RIGHT_FORMAT)
#elif OUTER
WGMMA_SS(wgmma, 256, 128, 128, 129, 130, 1, 1)
#elif RIGHT_DEEP
WGMMA_SS(wgmma, 256, 128, 128, 129, 130, 0, 0)
#else
WGMMA_SS(wgmma, 256, 128, 128, 129, 130, 0, 1)
#endif
/* Bytes from one product's depth to the next one's, and from one block of columns to the next; 16
 * where there is one block alone. */
enum {
    LEFT_STEP = LEFT_FLAT ? 16 * 128 : 32,
    RIGHT_STEP = RIGHT_DEEP ? 32 : 16 * 128,
    LEFT_BLOCK = LEFT_FLAT ? 64 * 128 : 16,
    RIGHT_BLOCK = RIGHT_DEEP ? 16 : 64 * 128,
};
/* Of an operand in shared memory; `block` bytes from one block of columns to the next. */
ML_INLINE unsigned long long descriptor(unsigned address, unsigned block) {
    return 1ull << 62 | 1024ull >> 4 << 32 | (unsigned long long)(block >> 4) << 16 |
           (address & 0x3ffffu) >> 4;
}
