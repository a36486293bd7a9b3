/* An operand of 8 bits of RAGGED_OUTER, transposed for Hopper's products, which read both along the
 * sum: [column][place]. A group's rows, of all elements of the batch one after another, are at
 * places from a multiple of 128 on, behind those of the groups before; what is left of the last 128
 * is 0. A block writes 128 places of some columns. */
#ifndef MLUA_EMBEDDED
#include "prelude.cuh"
#define ENTRY ragged_turn
#define POINTERS 7
#define FROM 0 /* pointers */
#define TO 6
#define ROWS 4096LL /* of an element of the batch */
#define BATCHES 1
#define GROUPS 8
#define START_BATCH 8LL
#define START_STRIDE 1LL
#define END_BATCH 8LL
#define END_STRIDE 1LL
#define FROM_BATCH 0LL /* bytes to the next element of the batch, to the next row */
#define FROM_ROW 2048LL
#define COLUMNS 2048LL
#define PLACES 5120LL
#define TILES 4 /* of 128 columns, of a block */
#endif
#include "turn.cuh"

struct arguments {
    char *p[POINTERS];
};

/* The rows of a group that an element of the batch has. */
ML_INLINE int NAME(rows)(const arguments &a, int group, int batch, int &start) {
    start = ((const int *)a.p[2])[batch * START_BATCH + group * START_STRIDE];
    int end = ((const int *)a.p[3])[batch * END_BATCH + group * END_STRIDE];
    start = start < 0 ? 0 : start;
    end = end > ROWS ? (int)ROWS : end;
    return end > start ? end - start : 0;
}

extern "C" __global__ void __launch_bounds__(256) ENTRY(arguments a) {
    __shared__ __align__(16) unsigned tile[TURN_WORDS];
    __shared__ int total[GROUPS], found[2]; /* the group of these places, and which of its rows */
    for (int e = threadIdx.x; e < GROUPS; e += 256) {
        int sum = 0, start;
        for (int b = 0; b < BATCHES; b++) sum += NAME(rows)(a, e, b, start);
        total[e] = sum;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        int e = 0, before = (int)blockIdx.y * 128;
        while (e < GROUPS && before >= (total[e] + 127) / 128 * 128)
            before -= (total[e++] + 127) / 128 * 128;
        found[0] = e, found[1] = before;
    }
    __syncthreads();
    const int group = found[0];
    if (group == GROUPS) return;
    const int chunk = threadIdx.x % 8, four = threadIdx.x / 8; /* 16 columns; 4 rows */
    const char *row[4];
    int batch = 0, before = 0, start, count = NAME(rows)(a, group, 0, start);
    for (int i = 0; i < 4; i++) {
        const int at = found[1] + four * 4 + i;
        while (at >= before + count && batch + 1 < BATCHES)
            before += count, count = NAME(rows)(a, group, ++batch, start);
        row[i] = at < before + count
                     ? a.p[FROM] + batch * FROM_BATCH + (start + at - before) * FROM_ROW
                     : nullptr;
    }
    for (int t = 0; t < TILES; t++) {
        const long long first = (blockIdx.x * (long long)TILES + t) * 128;
        if (first >= COLUMNS) return;
        const long long column = first + chunk * 16;
        uint4 r[4];
        for (int i = 0; i < 4; i++)
            r[i] = row[i] && column < COLUMNS ? *(const uint4 *)(row[i] + column)
                                              : make_uint4(0, 0, 0, 0);
        NAME(put)(tile, chunk, four, r);
        __syncthreads();
        char *out = a.p[TO] + blockIdx.y * 128LL + chunk * 16;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int line = four + 32 * i;
            if (first + line < COLUMNS)
                *(uint4 *)(out + (first + line) * PLACES) = NAME(get)(tile, chunk, line);
        }
        __syncthreads();
    }
}
