/* A recurrence with products of its states, all positions in one cooperative launch
 * (recurrence_grid.cuh). */
#ifndef MLUA_EMBEDDED
#include "prelude.cuh"
#define ENTRY recurrence_grid
#define POINTERS 6
#define THREADS 512
#define ROWS 64
#define ROW_TILES 4
#define SIZE 1024 /* columns of a state */
#define BLOCK_COLUMNS 8
#define BLOCKS 128
#define LENGTH 1000LL
#define REVERSE 0
#define COUNTERS 3 /* which pointer */
#define MATRIX_BYTES 65536
#define SETUP /* pointers, the elements' states, matrices */                                       \
    unsigned short *operand0 = (unsigned short *)P[4];                                             \
    const long long base0[] = {0};                                                                 \
    float s0[ELEMENTS];                                                                            \
    float raw0[ELEMENTS];                                                                          \
    for (int i = 0; i < 4; i++)                                                                    \
        load_matrix<1024, 32, 8>(matrix, (const unsigned short *)P[1] + column0 + i * 1024, base0, \
                                 0, i, 4096, 1);                                                   \
    EACH s0[e] = 0;
#define LOAD EACH raw0[e] = ((const float *)P[0])[t * 65536LL + row[e] * 1024LL + column[e]];
#define STEP                                                                                       \
    float v0[ELEMENTS];                                                                            \
    EACH v0[e] = raw0[e];                                                                          \
    NEXT EACH if (on[e]) operand0[parity * 65536 + operand_at(row[e], column[e])] =                \
        ml_store_bf16(s0[e]).bits;                                                                 \
    MEET multiply<1024, 32>(operand0 + parity * 65536, matrix, part);                              \
    EACH {                                                                                         \
        float z = v0[e] + total<32>(part, row[e], own[e]) + total<32>(part, row[e], 8 + own[e]) +  \
                  total<32>(part, row[e], 16 + own[e]) * total<32>(part, row[e], 24 + own[e]);     \
        s0[e] = ml_tanh_f32(z);                                                                    \
    }                                                                                              \
    __syncthreads();
#define LAST EACH if (on[e])((float *)P[2])[row[e] * 1024 + column[e]] = s0[e];
#endif
#include "recurrence_grid.cuh"

#define EACH _Pragma("unroll") for (int e = 0; e < ELEMENTS; e++)
#define MEET meet(counters, meeting += BLOCKS);
#define NEXT                                                                                       \
    if (turn + 1 < LENGTH) {                                                                       \
        const long long t = REVERSE ? LENGTH - 2 - turn : turn + 1;                                \
        (void)t;                                                                                   \
        LOAD                                                                                       \
    }

struct arguments {
    char *p[POINTERS];
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) ENTRY(arguments a) {
    extern __shared__ uint4 shared[];
    unsigned short *const matrix = (unsigned short *)shared;
    float *const part = (float *)((char *)shared + MATRIX_BYTES);
    char *const *P = a.p;
    unsigned *const counters = (unsigned *)P[COUNTERS];
    const int column0 = blockIdx.x * BLOCK_COLUMNS;
    unsigned meeting = 0;
    int row[ELEMENTS], own[ELEMENTS], column[ELEMENTS];
    bool on[ELEMENTS]; /* threads without an element compute the last one too */
    EACH {
        int i = threadIdx.x + e * THREADS;
        on[e] = i < ROWS * BLOCK_COLUMNS;
        i = on[e] ? i : ROWS * BLOCK_COLUMNS - 1;
        row[e] = i / BLOCK_COLUMNS;
        own[e] = i % BLOCK_COLUMNS;
        column[e] = column0 + own[e];
    }
    SETUP {
        const long long t = REVERSE ? LENGTH - 1 : 0;
        (void)t;
        LOAD
    }
    __syncthreads();
    for (long long turn = 0; turn < LENGTH; turn++) {
        const long long t = REVERSE ? LENGTH - 1 - turn : turn;
        const int parity = turn & 1;
        (void)t, (void)parity;
        STEP
    }
    LAST
}
