/* Tiles on the CPU: products of matrices by register blocks, loads that widen, transposes. */
#pragma once
#ifndef MLUA_EMBEDDED
#include "prelude.h"
#define ENTRY attention
#define REAL float /* what is computed in */
#define ELEMENT float
#define LOAD
#define VECTOR_BYTES 32
#define LANES 8          /* elements of a vector: 2, 4, 8 or 16 */
#define LANE_INTEGER int /* as wide as an element */
#define MR 4             /* rows of a register block */
#endif

#define vec NAME(vec)
#define lanes NAME(lanes)
#define multiply_block NAME(multiply_block)
#define multiply NAME(multiply)
#define load_tile NAME(load_tile)
#define transpose NAME(transpose)

/* Two vectors interleaved: the lower halves of both, the upper ones. */
#if LANES == 2
#define LOW_LANES 0, 2
#define HIGH_LANES 1, 3
#elif LANES == 4
#define LOW_LANES 0, 4, 1, 5
#define HIGH_LANES 2, 6, 3, 7
#elif LANES == 8
#define LOW_LANES 0, 8, 1, 9, 2, 10, 3, 11
#define HIGH_LANES 4, 12, 5, 13, 6, 14, 7, 15
#else
#define LOW_LANES 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define HIGH_LANES 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#endif
/* multiply_block: c[row][column] (+)= sum over k of a(row, k) b[k][column], a(row, k) =
 * a[row a_row + k a_k], for MR rows and one or two vectors; b and c are aligned and have `width`
 * columns. */
#define ALIGNED __attribute__((aligned(64)))
#define INLINE static inline __attribute__((always_inline, unused))
typedef REAL vec __attribute__((vector_size(VECTOR_BYTES), may_alias));
#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef LANE_INTEGER lanes __attribute__((vector_size(VECTOR_BYTES)));
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (lanes){__VA_ARGS__})
#endif
INLINE void multiply_block(const REAL *a, long a_row, long a_k, const REAL *b, REAL *c, long width,
                           long depth, const int vectors, const int accumulate) {
    vec sum[MR][2];
    for (int r = 0; r < MR; r++)
        for (int v = 0; v < vectors; v++)
            sum[r][v] = accumulate ? ((vec *)(c + r * width))[v] : (vec){0};
    for (long k = 0; k < depth; k++) {
        const vec *row = (const vec *)(b + k * width);
        vec b0 = row[0], b1 = vectors > 1 ? row[1] : b0;
#pragma GCC unroll 8
        for (int r = 0; r < MR; r++) {
            REAL x = a[r * a_row + k * a_k];
            sum[r][0] += x * b0;
            if (vectors > 1) sum[r][1] += x * b1;
        }
    }
    for (int r = 0; r < MR; r++)
        for (int v = 0; v < vectors; v++) ((vec *)(c + r * width))[v] = sum[r][v];
}
/* Causal tiles skip what the mask hides: query i of a tile sees key j where j <= i - offset.
 * `shape` says what rows, columns and depth are: 0 anything (nothing is skipped), 1 keys, queries
 * and dimensions, 2 dimensions, queries and keys, 3 queries, keys and dimensions, 4 keys,
 * dimensions and queries, 5 queries, dimensions and keys. */
INLINE void multiply(const REAL *a, long a_row, long a_k, const REAL *b, REAL *c, long rows,
                     long width, long depth, const int accumulate, const int shape, long offset) {
    for (long column = 0; column < width; column += 2 * LANES) {
        long first = 0, last = rows, begin = 0, end = depth, seen = column + 2 * LANES - offset;
        if (shape == 1 && seen < last) last = seen;
        if (shape == 2 && seen < end) end = seen;
        if (shape == 3 && column + offset > 0) first = (column + offset) / MR * MR;
        for (long r = first; r < last; r += MR) {
            if (shape == 4) begin = r + offset > 0 ? r + offset : 0;
            if (shape == 5) end = r + MR - offset < depth ? r + MR - offset : depth;
            const REAL *from = a + r * a_row + begin * a_k;
            const REAL *with = b + begin * width + column;
            if (width % (2 * LANES) == 0 || column + LANES < width)
                multiply_block(from, a_row, a_k, with, c + r * width + column, width, end - begin,
                               2, accumulate);
            else
                multiply_block(from, a_row, a_k, with, c + r * width + column, width, end - begin,
                               1, accumulate);
        }
    }
}
/* rows x columns of a strided matrix, times factor, into to[tile_rows][width] with zeros around. */
INLINE void load_tile(const ELEMENT *from, long row_stride, long column_stride, long rows,
                      long columns, REAL *to, long tile_rows, long width, REAL factor) {
    for (long r = 0; r < tile_rows; r++, from += row_stride, to += width) {
        long full = r < rows ? columns : 0;
        for (long c = 0; c < full; c++) to[c] = LOAD(from[c * column_stride]) * factor;
        for (long c = full; c < width; c++) to[c] = 0;
    }
}
/* A row-major tile transposed; sizes are multiples of LANES. Rounds of interleaving: with
 * log2(LANES) of them element (i, j) of a square gets to (j, i). */
INLINE void transpose(const REAL *from, long rows, long columns, REAL *to) {
    for (long r = 0; r < rows; r += LANES)
        for (long c = 0; c < columns; c += LANES) {
            vec x[LANES], y[LANES];
            for (int i = 0; i < LANES; i++) x[i] = *(const vec *)(from + (r + i) * columns + c);
#pragma GCC unroll 4
            for (int round = 1; round < LANES; round *= 2) {
                for (int i = 0; i < LANES / 2; i++) {
                    y[2 * i] = SHUFFLE(x[i], x[i + LANES / 2], LOW_LANES);
                    y[2 * i + 1] = SHUFFLE(x[i], x[i + LANES / 2], HIGH_LANES);
                }
                for (int i = 0; i < LANES; i++) x[i] = y[i];
            }
            for (int i = 0; i < LANES; i++) *(vec *)(to + (c + i) * rows + r) = x[i];
        }
}
