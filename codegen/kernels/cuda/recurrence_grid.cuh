/* Recurrences whose step multiplies states by captured matrices: all positions in one launch, whose
 * blocks are all resident. A block owns BLOCK_COLUMNS columns of every state for all rows, a thread
 * some elements of them. What a product reads of all columns is exchanged by memory: each block
 * writes its part, all meet, each reads all (L2 has it). Matrices stay in shared memory.
 *
 * Layouts, so that lanes read 16 and 8 consecutive bytes, as mma_ptx.cuh says what they hold:
 *   operand  [k / 16][row / 16][lane][8], bf16
 *   matrix   [k / 16][n / 8][lane][4], bf16
 * Warps divide k and rows; their sums over k meet in shared memory. Where k is long, SPLIT blocks
 * that follow one another share k and each other's columns; their sums are exchanged too. */
#pragma once
#include "mma_ptx.cuh"

enum {
    WARPS = THREADS / 32,
    ROW_WARPS = ROW_TILES % 2 ? 1 : 2,
    K_WARPS = WARPS / ROW_WARPS,
    OWN_TILES = ROW_TILES / ROW_WARPS,
    AHEAD = 8 / OWN_TILES, /* tiles along k that are loaded before the first is multiplied */
    ELEMENTS = (ROWS * BLOCK_COLUMNS + THREADS - 1) / THREADS,
    COUNTER_WORDS = 32 /* a cache line for each counter */
};

/* All `blocks` that count here; each calls it with the same growing targets. */
static __device__ __forceinline__ void meet(unsigned *counter, unsigned target) {
    __syncthreads();
    if (threadIdx.x == 0) {
        unsigned seen;
        asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
        do {
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
                         : "=r"(seen)
                         : "l"(counter)
                         : "memory");
        } while (seen < target);
    }
    __syncthreads();
}

static __device__ __forceinline__ int operand_at(int row, int k) {
    return ((k / 16 * ROW_TILES + row / 16) * 32 + row % 8 * 4 + k % 8 / 2) * 8 +
           (row / 8 % 2 + 2 * (k / 8 % 2)) * 2 + k % 2;
}

template <int COLUMNS> static __device__ __forceinline__ int matrix_at(int k, int n) {
    return ((k / 16 * (COLUMNS / 8) + n / 8) * 32 + n % 8 * 4 + k % 8 / 2) * 4 + k / 8 % 2 * 2 +
           k % 2;
}

/* Of one slot: columns `slot * WIDTH` on, of the block's group; the k-th row of this block's share
 * begins at element base[k / SIZE] of the captured matrix. */
template <int DEPTH, int COLUMNS, int WIDTH>
static __device__ __forceinline__ void load_matrix(unsigned short *to, const unsigned short *from,
                                                   const long long *base, int first, int slot,
                                                   long long k_stride, long long n_stride) {
    for (int i = threadIdx.x; i < DEPTH * WIDTH; i += THREADS) {
        int k = first + i / WIDTH, n = i % WIDTH;
        to[matrix_at<COLUMNS>(i / WIDTH, slot * WIDTH + n)] =
            from[base[k / SIZE] + k % SIZE * k_stride + n * n_stride];
    }
}

/* Sums by warps along k: part[K_WARPS][ROW_TILES * 16][COLUMNS + 8]. */
template <int DEPTH, int COLUMNS>
static __device__ __forceinline__ void multiply(const unsigned short *operand,
                                                const unsigned short *matrix, float *part) {
    enum { K_TILES = DEPTH / 16, TILES = COLUMNS / 8 };
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row_warp = warp % ROW_WARPS, k_warp = warp / ROW_WARPS;
    const uint4 *a = (const uint4 *)operand + row_warp * OWN_TILES * 32 + lane;
    const uint2 *b = (const uint2 *)matrix + lane;
    float c[OWN_TILES][TILES][4];
#pragma unroll
    for (int m = 0; m < OWN_TILES; m++)
#pragma unroll
        for (int n = 0; n < TILES; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) c[m][n][i] = 0;
    for (int first = k_warp; first < K_TILES; first += AHEAD * K_WARPS) {
        uint4 held[AHEAD][OWN_TILES];
#pragma unroll
        for (int d = 0; d < AHEAD; d++)
#pragma unroll
            for (int m = 0; m < OWN_TILES; m++)
                if (first + d * K_WARPS < K_TILES)
                    held[d][m] = __ldcg(a + ((first + d * K_WARPS) * ROW_TILES + m) * 32);
#pragma unroll
        for (int d = 0; d < AHEAD; d++) {
            if (first + d * K_WARPS >= K_TILES) break;
#pragma unroll
            for (int n = 0; n < TILES; n++) {
                const uint2 right = b[((first + d * K_WARPS) * TILES + n) * 32];
#pragma unroll
                for (int m = 0; m < OWN_TILES; m++) {
                    const unsigned left[4] = {held[d][m].x, held[d][m].y, held[d][m].z,
                                              held[d][m].w};
                    mma(c[m][n], left, right.x, right.y);
                }
            }
        }
    }
#pragma unroll
    for (int m = 0; m < OWN_TILES; m++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int row = (row_warp * OWN_TILES + m) * 16 + i * 8 + lane / 4;
            float *to = part + (k_warp * ROW_TILES * 16 + row) * (COLUMNS + 8) + lane % 4 * 2;
#pragma unroll
            for (int n = 0; n < TILES; n++)
                *(float2 *)(to + n * 8) = make_float2(c[m][n][2 * i], c[m][n][2 * i + 1]);
        }
    __syncthreads();
}

template <int COLUMNS>
static __device__ __forceinline__ float total(const float *part, int row, int column) {
    float sum = 0;
#pragma unroll
    for (int w = 0; w < K_WARPS; w++)
        sum += part[(w * ROW_TILES * 16 + row) * (COLUMNS + 8) + column];
    return sum;
}

/* The group's sums to memory: [member that owns the columns][member that has the sum][slot][row]
 * [column]. */
template <int SPLIT, int SLOTS>
static __device__ __forceinline__ void share(const float *part, float *sums, int member,
                                             unsigned *counter, unsigned target) {
    enum { WIDTH = SPLIT * BLOCK_COLUMNS, COLUMNS = SLOTS * WIDTH };
    for (int i = threadIdx.x; i < ROWS * COLUMNS; i += THREADS) {
        int row = i / COLUMNS, column = i % COLUMNS, owner = column % WIDTH / BLOCK_COLUMNS;
        sums[(((owner * SPLIT + member) * SLOTS + column / WIDTH) * ROWS + row) * BLOCK_COLUMNS +
             column % BLOCK_COLUMNS] = total<COLUMNS>(part, row, column);
    }
    meet(counter, target);
}

template <int SPLIT, int SLOTS>
static __device__ __forceinline__ float shared_total(const float *sums, int member, int slot,
                                                     int row, int column) {
    float sum = 0;
#pragma unroll
    for (int other = 0; other < SPLIT; other++)
        sum +=
            __ldcg(sums + (((member * SPLIT + other) * SLOTS + slot) * ROWS + row) * BLOCK_COLUMNS +
                   column);
    return sum;
}

/* The sum over rows of what threads have of their columns; of the first BLOCK_COLUMNS threads. */
static __device__ __forceinline__ float row_sum(float *part, const int (&row)[ELEMENTS],
                                                const int (&own)[ELEMENTS],
                                                const bool (&on)[ELEMENTS],
                                                const float (&value)[ELEMENTS]) {
    float sum = 0;
    __syncthreads();
#pragma unroll
    for (int e = 0; e < ELEMENTS; e++)
        if (on[e]) part[row[e] * BLOCK_COLUMNS + own[e]] = value[e];
    __syncthreads();
    if (threadIdx.x < BLOCK_COLUMNS)
        for (int i = 0; i < ROWS; i++) sum += part[i * BLOCK_COLUMNS + threadIdx.x];
    return sum;
}
