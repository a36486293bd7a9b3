/* After RAGGED_DOT by kernels that do not compute it: the function of a row's halves. */
#ifndef MLUA_EMBEDDED
#include "prelude.cuh"
#define ENTRY ragged
#define POINTERS 6
#define RESULT ml_bf16
#define C_AT 4
#define S_AT 5
#define ROWS 4096LL /* of an element of the batch */
#define HALF 512LL  /* columns of a half */
#define C_BATCH 65536LL
#define C_ROW 1024LL
#define C_COL 1LL
#define S_BATCH 65536LL
#define S_ROW 512LL
#define S_COL 1LL
#endif
#include "ragged_gated.cuh"

struct arguments {
    char *p[POINTERS];
};

extern "C" __global__ void __launch_bounds__(256) ENTRY(arguments a) {
    kernel_begins();
    long long batch = blockIdx.x / ROWS, row = blockIdx.x % ROWS;
    const RESULT *from = (const RESULT *)a.p[C_AT] + batch * C_BATCH + row * C_ROW;
    ml_bf16 *out = (ml_bf16 *)a.p[S_AT] + batch * S_BATCH + row * S_ROW;
    for (long long c = threadIdx.x; c < HALF; c += 256)
        out[c * S_COL] =
            ml_store_bf16(gated(ml_load_bf16(from[c * C_COL]),
                                ml_load_bf16(from[(c + HALF) * C_COL]), ROW_NUMBERS(batch, row)));
}
