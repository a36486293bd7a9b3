/* CUMSUM: a block a row, 256 elements at a time; or, where neighbouring rows are adjacent in memory
 * or short, a thread a row. Long sums in f32 add up what rounding loses too. */
#ifndef MLUA_EMBEDDED
#include "prelude.cuh"
#define ENTRY cumsum
#define POINTERS 2
#define MEMORY float
#define REAL float
#define ADDER float /* type of sums */
#define LOAD
#define STORE
#define ROWS 100LL
#define SIZE 1000 /* elements of a row */
#define THREAD_A_ROW 0
#define COMPENSATED 1 /* Knuth's two-sum */
#define BACKWARDS 0
#define X_ROW(row) (row * 1000LL)
#define Y_ROW(row) (row * 1000LL)
#define X_STRIDE 1LL
#define Y_STRIDE 1LL
#endif
#include "add_exactly.cuh"

struct arguments {
    char *p[POINTERS];
};

#if THREAD_A_ROW
extern "C" __global__ void __launch_bounds__(128) ENTRY(arguments a) {
    long long row = blockIdx.x * 128LL + threadIdx.x;
    if (row >= ROWS) return;
    const MEMORY *x = (const MEMORY *)a.p[0] + X_ROW(row);
    MEMORY *y = (MEMORY *)a.p[1] + Y_ROW(row);
    ADDER sum = 0, lost = 0;
#pragma unroll 8
    for (long long i = 0; i < SIZE; i++) {
        long long at = BACKWARDS ? SIZE - 1 - i : i;
        const ADDER element = (ADDER)LOAD(x[at * X_STRIDE]);
        if (COMPENSATED)
            add_exactly(sum, lost, element);
        else
            sum += element;
        y[at * Y_STRIDE] = STORE((REAL)(COMPENSATED ? sum + finite(lost) : sum));
    }
}
#else
extern "C" __global__ void __launch_bounds__(256) ENTRY(arguments a) {
    __shared__ ADDER warps[8];
    long long row = blockIdx.x;
    const MEMORY *x = (const MEMORY *)a.p[0] + X_ROW(row);
    MEMORY *y = (MEMORY *)a.p[1] + Y_ROW(row);
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    ADDER before = 0, lost = 0;
    for (long long start = 0; start < SIZE; start += 256) {
        long long i = start + threadIdx.x, at = BACKWARDS ? SIZE - 1 - i : i;
        ADDER sum = i < SIZE ? (ADDER)LOAD(x[at * X_STRIDE]) : (ADDER)0;
        for (int d = 1; d < 32; d *= 2) {
            ADDER other = __shfl_up_sync(~0u, sum, d);
            if (lane >= d) sum += other;
        }
        if (lane == 31) warps[warp] = sum;
        __syncthreads();
        ADDER below = COMPENSATED ? finite(lost) : before, total = 0;
        for (int w = 0; w < 8; w++) {
            if (w < warp) below += warps[w];
            (COMPENSATED ? total : before) += warps[w];
        }
        if (i < SIZE)
            y[at * Y_STRIDE] = STORE((REAL)(COMPENSATED ? before + (below + sum) : below + sum));
        if (COMPENSATED) add_exactly(before, lost, total);
        __syncthreads();
    }
}
#endif
