/* After RAGGED_OUTER by kernels that do not give them: sums of the squares of 16 x 256 results. */
#ifndef MLUA_EMBEDDED
#include "prelude.cuh"
#define ENTRY ragged
#define POINTERS 6
#define RESULT float
#define C_AT 4
#define S_AT 5
#define K_SIZE 1024
#define N_SIZE 1024
#define C_GROUP 65536LL
#define C_ROW 1024LL
#define C_COL 1LL
#define S_GROUP 256LL
#define S_ROW 4LL
#define S_COL 1LL
#define SQUARES_WIDE 4 /* sums along the columns */
#endif

struct arguments {
    char *p[POINTERS];
};

extern "C" __global__ void __launch_bounds__(256) ENTRY(arguments a) {
    __shared__ float warps[8];
    int x = blockIdx.x % SQUARES_WIDE, y = blockIdx.x / SQUARES_WIDE, group = blockIdx.y;
    int column = x * 256 + threadIdx.x, row = y * 16;
    const RESULT *from = (const RESULT *)a.p[C_AT];
    from += group * C_GROUP + column * C_COL;
    float sum = 0;
    for (int i = row; i < row + 16 && i < K_SIZE && column < N_SIZE; i++)
        sum += from[i * C_ROW] * from[i * C_ROW];
    for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0;
    for (int i = 0; i < 8; i++) sum += warps[i];
    if (threadIdx.x == 0) ((float *)a.p[S_AT])[group * S_GROUP + y * S_ROW + x * S_COL] = sum;
}
