/* Products by groups of rows: arguments, rows of groups, order of blocks, rows of no group.
 *
 * Operands: the left one (a), the right one (b: a matrix of each group, or rows too where OUTER),
 * start and end of each group's rows in each element of the batch, numbers of rows if any; results.
 * K_SIZE is the depth of RAGGED_DOT and the rows of the results of RAGGED_OUTER. */
#pragma once
#ifndef MLUA_EMBEDDED
#include "prelude.cuh"
#define ENTRY ragged
#define POINTERS 5
#define OUTER 0
#define C_AT 4 /* pointer of the result */
#define RESULT float
#define STORE
#define ROWS 4096LL /* of an element of the batch */
#define BATCHES 1
#define GROUPS 8
#define K_SIZE 1024
#define N_SIZE 1024
#define START_BATCH 8LL
#define START_STRIDE 1LL
#define END_BATCH 8LL
#define END_STRIDE 1LL
#define A_BATCH 65536LL /* strides of operands: elements */
#define A_ROW 1024LL
#define A_COL 1LL
#define B_BATCH 0LL
#define B_GROUP 65536LL
#define B_ROW 1024LL
#define B_COL 1LL
#define C_BATCH 65536LL
#define C_GROUP 0LL
#define C_ROW 1024LL
#define C_COL 1LL
#define N_TILES 8   /* tiles along the columns */
#define HEIGHT 40   /* blocks along the rows */
#define BAND 8      /* tiles of columns that stay in the cache while rows pass */
#define WINDOW 1024 /* rows that a block clears */
#define WINDOWS 4   /* of these in an element of the batch */
#endif

struct arguments {
    char *p[POINTERS];
};

/* Rows of a group are counted from 0 through all elements of the batch. A walk is at one of these;
 * it moves forward only. */
struct walk_state {
    int batch;
    long long first, start, count; /* what is counted before; its rows of this element */
};
ML_INLINE void enter(walk_state &w, arguments &a, int group, int batch) {
    long long start = ((const int *)a.p[2])[batch * START_BATCH + group * START_STRIDE];
    long long end = ((const int *)a.p[3])[batch * END_BATCH + group * END_STRIDE];
    start = start < 0 ? 0 : start;
    end = end > ROWS ? ROWS : end;
    w.batch = batch, w.start = start, w.count = end > start ? end - start : 0;
}
ML_INLINE void seek(walk_state &w, arguments &a, int group, long long row) {
    while (row >= w.first + w.count && w.batch + 1 < BATCHES) {
        w.first += w.count;
        enter(w, a, group, w.batch + 1);
    }
}
/* Blocks go through bands of columns: those that run together read few rows and few columns, which
 * then come from the cache. */
ML_INLINE void place_block(int block, int &row, int &column) {
    int band = block / (BAND * HEIGHT), rest = block % (BAND * HEIGHT);
    int width = N_TILES - band * BAND < BAND ? N_TILES - band * BAND : BAND;
    row = rest / width, column = band * BAND + rest % width;
}
ML_INLINE long long count_rows(arguments &a, int group) {
    walk_state w;
    long long count = 0;
    for (int batch = 0; batch < BATCHES; batch++) {
        enter(w, a, group, batch);
        count += w.count;
    }
    return count;
}

#if !OUTER
/* Zeros in rows of no group: of one window of rows. */
static __device__ __noinline__ void clear_rows(arguments &a, int window, int column, int columns) {
    int batch = window / WINDOWS;
    long long from = window % WINDOWS * (long long)WINDOW, covered = 0;
    long long to = from + WINDOW < ROWS ? from + WINDOW : ROWS;
    walk_state w;
    for (int e = threadIdx.x % 32; e < GROUPS; e += 32) {
        enter(w, a, e, batch);
        long long low = w.start > from ? w.start : from, high = w.start + w.count;
        high = high < to ? high : to;
        covered += high > low ? high - low : 0;
    }
    for (int d = 16; d > 0; d /= 2) covered += __shfl_xor_sync(~0u, covered, d);
    if (covered == to - from) return;
    for (long long row = from + threadIdx.x / 32; row < to; row += 8) {
        int in = 0;
        for (int e = threadIdx.x % 32; e < GROUPS; e += 32) {
            enter(w, a, e, batch);
            in |= row >= w.start && row < w.start + w.count;
        }
        for (int d = 16; d > 0; d /= 2) in |= __shfl_xor_sync(~0u, in, d);
        RESULT *out = (RESULT *)a.p[C_AT] + batch * C_BATCH + row * C_ROW;
        for (int c = threadIdx.x % 32; c < columns && !in; c += 32)
            out[(column + c) * C_COL] = STORE(0.0f);
    }
}
#endif
