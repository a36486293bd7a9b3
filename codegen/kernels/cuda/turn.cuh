/* A tile of 128 x 128 bytes, transposed through shared memory by 256 threads. A thread brings 16
 * columns of 4 rows, and turns them in registers into words of 4 rows, which lie in shared memory
 * as rows of the result. Each is rotated by its number of 16 columns, so that neither side meets
 * bank conflicts. */
#pragma once
#ifndef MLUA_EMBEDDED
#include "prelude.cuh"
#define ENTRY turn
#endif

enum { TURN_WORDS = 128 * 32 };

/* Words of 4 columns of rows 0 to 3, into words of 4 rows of columns 0 to 3. */
ML_INLINE void NAME(turn)(unsigned a, unsigned b, unsigned c, unsigned d, unsigned *out) {
    const unsigned low = __byte_perm(a, b, 0x5140), high = __byte_perm(c, d, 0x5140);
    const unsigned low2 = __byte_perm(a, b, 0x7362), high2 = __byte_perm(c, d, 0x7362);
    out[0] = __byte_perm(low, high, 0x5410);
    out[1] = __byte_perm(low, high, 0x7632);
    out[2] = __byte_perm(low2, high2, 0x5410);
    out[3] = __byte_perm(low2, high2, 0x7632);
}

/* 16 columns from 16 * chunk on (chunk < 8) of the rows from 4 * four on (four < 32). */
ML_INLINE void NAME(put)(unsigned *tile, int chunk, int four, const uint4 (&r)[4]) {
    unsigned out[16];
    NAME(turn)(r[0].x, r[1].x, r[2].x, r[3].x, out);
    NAME(turn)(r[0].y, r[1].y, r[2].y, r[3].y, out + 4);
    NAME(turn)(r[0].z, r[1].z, r[2].z, r[3].z, out + 8);
    NAME(turn)(r[0].w, r[1].w, r[2].w, r[3].w, out + 12);
#pragma unroll
    for (int k = 0; k < 16; k++) tile[(chunk * 16 + k) * 32 + ((four + 4 * chunk) & 31)] = out[k];
}

/* 16 rows from 16 * chunk on of a column. */
ML_INLINE uint4 NAME(get)(const unsigned *tile, int chunk, int column) {
    return *(const uint4 *)&tile[column * 32 + ((4 * chunk + 4 * (column / 16)) & 31)];
}
