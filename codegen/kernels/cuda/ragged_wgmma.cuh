/* Products of 64 x 256 by a warpgroup, and their operands in shared memory: 128-byte lines whose
 * 16-byte parts are exchanged by the number of the line modulo 8 (swizzle). Depth innermost: line r
 * holds 64 deep of row r, eight lines a core matrix, and a product's depth of 16 is 32 bytes of
 * each line. Rows or columns innermost: blocks of 64 columns one after another, line d of a block
 * is its depth d, and a product's depth of 16 is 16 lines. */
#pragma once
#ifndef MLUA_EMBEDDED
#include "prelude.cuh"
#define OUTER 0
#define RIGHT_DEEP 0 /* depth is innermost in memory */
#endif
#include "hopper.cuh"

#if OUTER
WGMMA_SS(wgmma, 256, 128, 128, 129, 130, 1, 1)
#elif RIGHT_DEEP
WGMMA_SS(wgmma, 256, 128, 128, 129, 130, 0, 0)
#else
WGMMA_SS(wgmma, 256, 128, 128, 129, 130, 0, 1)
#endif
/* Bytes from one product's depth to the next one's, and from one block of columns to the next; 16
 * where there is one block alone. */
enum {
    LEFT_STEP = OUTER ? 16 * 128 : 32,
    RIGHT_STEP = RIGHT_DEEP ? 32 : 16 * 128,
    LEFT_BLOCK = OUTER ? 64 * 128 : 16,
    RIGHT_BLOCK = RIGHT_DEEP ? 16 : 64 * 128,
};
/* Of an operand in shared memory; `block` bytes from one block of columns to the next. */
ML_INLINE unsigned long long descriptor(unsigned address, unsigned block) {
    return 1ull << 62 | 1024ull >> 4 << 32 | (unsigned long long)(block >> 4) << 16 |
           (address & 0x3ffffu) >> 4;
}
