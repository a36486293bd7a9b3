/* The tile of a block: statements that a kernel begins with. They declare its group, how many rows
 * and columns it has, the depth to sum over, pointers to operands and result, and, where OUTER, a
 * walk over the rows, else the offsets of its rows (row_at, out_at); they return where there is
 * nothing to do. */
#ifndef MLUA_EMBEDDED
#define MEMORY ml_bf16
#define RIGHT_MEMORY ml_bf16
#define TILE_M 128
#define TILE_N 128
#define TILES 40           /* tiles of rows, at most */
#if __INCLUDE_LEVEL__ == 0 /* alone: in a function */
#include "ragged.cuh"
extern "C" __global__ void ENTRY(arguments a) {
#endif
#endif
#if OUTER
    int group = blockIdx.y;
    int m, n;
    place_block(blockIdx.x, m, n);
    m *= TILE_M, n *= TILE_N;
    int rows = K_SIZE - m < TILE_M ? K_SIZE - m : TILE_M,
        columns = N_SIZE - n < TILE_N ? N_SIZE - n : TILE_N;
    long long depth = count_rows(a, group);
    walk_state walk, walk_right;
    walk.first = 0;
    enter(walk, a, group, 0);
    walk_right = walk;
    const MEMORY *left = (const MEMORY *)a.p[0] + m * A_COL;
    const RIGHT_MEMORY *right = (const RIGHT_MEMORY *)a.p[1] + n * B_COL;
    RESULT *out = (RESULT *)a.p[C_AT] + group * C_GROUP + m * C_ROW + n * C_COL;
#else
__shared__ long long row_at[TILE_M], out_at[TILE_M], tile_first;
__shared__ int tile_group;
int tile, column;
place_block(blockIdx.y *N_TILES + blockIdx.x, tile, column);
column *= TILE_N;
int columns = N_SIZE - column < TILE_N ? N_SIZE - column : TILE_N;
if (tile >= TILES) {
    clear_rows(a, tile - TILES, column, columns);
    return;
}
if (threadIdx.x == 0) tile_group = -1;
__syncthreads();
if (threadIdx.x < 32)
    for (int base = 0, done = 0; base < GROUPS && done <= tile; base += 32) {
        int e = base + threadIdx.x;
        int own = e < GROUPS ? (int)((count_rows(a, e) + TILE_M - 1) / TILE_M) : 0;
        int sum = own; /* of the tiles up to this group */
        for (int d = 1; d < 32; d *= 2) {
            int before = __shfl_up_sync(~0u, sum, d);
            sum += threadIdx.x >= d ? before : 0;
        }
        int at = tile - (done + sum - own);
        if (at >= 0 && at < own) tile_group = e, tile_first = at * (long long)TILE_M;
        done += __shfl_sync(~0u, sum, 31);
    }
__syncthreads();
int group = tile_group;
if (group < 0) return;
long long depth = K_SIZE, left_rows = count_rows(a, group) - tile_first;
int rows = left_rows < TILE_M ? (int)left_rows : TILE_M;
walk_state walk;
walk.first = 0;
enter(walk, a, group, 0);
if (threadIdx.x < rows) {
    long long row = tile_first + threadIdx.x;
    seek(walk, a, group, row);
    row += walk.start - walk.first;
    row_at[threadIdx.x] = walk.batch * A_BATCH + row * A_ROW;
    out_at[threadIdx.x] = walk.batch * C_BATCH + row * C_ROW;
}
__syncthreads();
const MEMORY *left = (const MEMORY *)a.p[0];
const RIGHT_MEMORY *right = (const RIGHT_MEMORY *)a.p[1] + group * B_GROUP + column * B_COL;
RESULT *out = (RESULT *)a.p[C_AT] + column * C_COL;
#endif
#ifndef MLUA_EMBEDDED
#if __INCLUDE_LEVEL__ == 0
}
#endif
#endif
