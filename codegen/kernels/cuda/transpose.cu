/* Matrices of bytes, transposed by tiles of 128 x 128 (turn.cuh), one for each block along z. ROWS
 * and COLUMNS are of what is read, multiples of 16. */
#ifndef MLUA_EMBEDDED
#include "prelude.cuh"
#define ENTRY transpose
#define POINTERS 2
#define FROM 0 /* pointers */
#define TO 1
#define ROWS 4096LL
#define COLUMNS 2048LL
#define ROW 2048LL /* bytes from one row to the next, and from one matrix to the next */
#define MATRIX 0LL
#endif
#include "turn.cuh"

struct arguments {
    char *p[POINTERS];
};

extern "C" __global__ void __launch_bounds__(256) ENTRY(arguments a) {
    __shared__ __align__(16) unsigned tile[TURN_WORDS];
    const int chunk = threadIdx.x % 8, four = threadIdx.x / 8; /* 16 columns; 4 rows */
    const long long column = blockIdx.x * 128LL + chunk * 16;
    const long long row = blockIdx.y * 128LL + four * 4;
    if (column < COLUMNS && row < ROWS) {
        const char *from = a.p[FROM] + blockIdx.z * MATRIX + row * ROW + column;
        const uint4 r[4] = {*(const uint4 *)from, *(const uint4 *)(from + ROW),
                            *(const uint4 *)(from + 2 * ROW), *(const uint4 *)(from + 3 * ROW)};
        NAME(put)(tile, chunk, four, r);
    }
    __syncthreads();
    const long long at = blockIdx.y * 128LL + chunk * 16; /* of the result's columns */
    char *out = a.p[TO] + blockIdx.z * ROWS * COLUMNS;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int line = four + 32 * i;
        const long long to = blockIdx.x * 128LL + line;
        if (to < COLUMNS && at < ROWS)
            *(uint4 *)(out + to * ROWS + at) = NAME(get)(tile, chunk, line);
    }
}
