/* A product of few rows, C[m, n] = A[m, k] B[k, n] (+ bias[n]) (+ addend[m, n]), in bf16 with f32
 * sums: its time is that of reading B.
 *
 * A block has 64 columns of B and one of SPLIT equal ranges of the depth; the blocks of a cluster
 * have the ranges of one tile, and add up their sums in a fixed order through shared memory. A ring
 * of SLOTS slots of 64 deep is filled by cp.async. On tensor cores the columns of B are the 16 rows
 * of an mma, the rows of A its 8 columns.
 *
 * B that no step writes (CONSTANT) is loaded from before the steps ahead have ended: memory is busy
 * while these, which are small, run. */
#ifndef MLUA_EMBEDDED
#include "prelude.cuh"
#define ENTRY few_rows
#define POINTERS 3
#define ROWS 1 /* of A, at most ROOM */
#define COLUMNS 4096LL
#define DEPTH 4096LL
#define A_ROW 4096LL
#define B_DEEP 0 /* B is contiguous along the depth, not along columns */
#define B_STRIDE 4096LL
#define C_ROW 4096LL
#define SPLIT 4
#define SLOTS 6
#define CONSTANT 1
#define BIAS_AT 0 /* pointers; 0: none */
#define ADDEND_AT 0
#define C_AT 2
#define RESULT float
#define STORE
#define LOAD
#endif
#include "mma_ptx.cuh"

#define TILE 64
#define ROOM 8  /* for rows: the columns of an mma */
#define LINE 72 /* elements of a line of a slot: 64, and 8 so that lines lie in different banks */
#define A_BYTES (ROOM * LINE * 2)
#define SLOT_BYTES (TILE * LINE * 2 + A_BYTES)
#define STEPS ((int)((DEPTH + TILE - 1) / TILE))
#define SUM_ROW (TILE + 4)

struct arguments {
    char *p[POINTERS];
};

#if SPLIT > 1 && !defined(MLUA_EMULATED) && !defined(MLUA_NO_CLUSTERS)
static __device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release; barrier.cluster.wait.acquire;" ::: "memory");
}
/* Of the block `rank` of the cluster, what lies in its shared memory at `at`. */
static __device__ __forceinline__ float load_of_block(unsigned at, int rank) {
    float x;
    asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %1, %2; "
                 "ld.shared::cluster.f32 %0, [there]; }"
                 : "=f"(x)
                 : "r"(at), "r"(rank)
                 : "memory");
    return x;
}
#define RANKS SPLIT
#else /* the first block of a tile has all of the depth */
#define cluster_sync() __syncthreads()
#define load_of_block(at, rank) sums[((at)-shared_address(sums)) / 4]
#define RANKS 1
#endif

static __device__ __forceinline__ void load_b(unsigned to, const ml_bf16 *b, int n0, int k0) {
#pragma unroll
    for (int i = threadIdx.x; i < TILE * TILE / 8; i += 128) {
        const int line = i / 8, part = i % 8 * 8;
        const long long n = n0 + (B_DEEP ? line : part), k = k0 + (B_DEEP ? part : line);
        const bool valid = n < COLUMNS && k < DEPTH;
        copy_async(to + (line * LINE + part) * 2,
                   b + (valid ? (B_DEEP ? n * B_STRIDE + k : k * B_STRIDE + n) : 0),
                   valid ? 16 : 0);
    }
}
static __device__ __forceinline__ void load_a(unsigned to, const ml_bf16 *a, int k0) {
#pragma unroll
    for (int i = threadIdx.x; i < ROOM * TILE / 8; i += 128) {
        const int row = i / 8;
        const long long k = k0 + i % 8 * 8;
        const bool valid = row < ROWS && k < DEPTH;
        copy_async(to + (row * LINE + i % 8 * 8) * 2, a + (valid ? row * A_ROW + k : 0),
                   valid ? 16 : 0);
    }
}
/* Of the warp's 16 columns with all rows. */
static __device__ __forceinline__ void multiply(float (&sum)[4], unsigned slot) {
    const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * 16;
    const unsigned b_at =
        slot + (B_DEEP ? (first + lane % 16) * LINE + lane / 16 * 8
                       : (lane / 16 * 8 + lane % 8) * LINE + first + lane / 8 % 2 * 8) *
                   2;
    const unsigned a_at = slot + TILE * LINE * 2;
    unsigned x[TILE / 16][4], y[4];
#pragma unroll
    for (int k = 0; k < TILE; k += 16) {
        if (B_DEEP)
            load_matrices(x[k / 16], b_at + k * 2);
        else
            load_matrices_transposed(x[k / 16], b_at + k * LINE * 2);
    }
#pragma unroll
    for (int k = 0; k < TILE; k += 32) { /* four matrices: two steps of 16 deep */
        load_matrices(y, a_at + (lane % 8 * LINE + lane / 8 * 8 + k) * 2);
        mma(sum, x[k / 16], y[0], y[1]);
        mma(sum, x[k / 16 + 1], y[2], y[3]);
    }
}
static __device__ __forceinline__ void write(const arguments &a, int n0, int rank,
                                             const float *sums) {
    for (int i = rank * 128 + threadIdx.x; i < ROWS * TILE; i += RANKS * 128) {
        const int row = i / TILE, column = i % TILE, n = n0 + column;
        const unsigned at = shared_address(sums) + (row * SUM_ROW + column) * 4;
        if (n >= COLUMNS) continue;
        float x = 0;
#pragma unroll
        for (int r = 0; r < RANKS; r++) x += load_of_block(at, r);
        const long long to = row * C_ROW + n;
#if BIAS_AT
        x += LOAD(((const RESULT *)a.p[BIAS_AT])[n]);
#endif
#if ADDEND_AT
        x += LOAD(((const RESULT *)a.p[ADDEND_AT])[to]);
#endif
        ((RESULT *)a.p[C_AT])[to] = STORE(x);
    }
}
#if SPLIT > 1 && !defined(MLUA_EMULATED) && !defined(MLUA_NO_CLUSTERS)
#define CLUSTER __cluster_dims__(SPLIT, 1, 1)
#else
#define CLUSTER
#endif
extern "C" CLUSTER __global__ void __launch_bounds__(128) ENTRY(arguments a) {
    extern __shared__ uint4 shared[];
    float *sums = (float *)shared; /* once the ring is done */
    const ml_bf16 *left = (const ml_bf16 *)a.p[0], *right = (const ml_bf16 *)a.p[1];
    const unsigned ring = shared_address(shared);
    const int n0 = blockIdx.x / SPLIT * TILE, rank = blockIdx.x % SPLIT;
    if (rank >= RANKS) return;
    const int begin = STEPS * rank / RANKS, end = STEPS * (rank + 1) / RANKS;
    if (!CONSTANT) kernel_begins();
    for (int s = 0; s < SLOTS - 1 && begin + s < end; s++)
        load_b(ring + s * SLOT_BYTES, right, n0, (begin + s) * TILE);
    if (CONSTANT) kernel_begins();
    for (int s = 0; s < SLOTS - 1 && begin + s < end; s++)
        load_a(ring + s * SLOT_BYTES + TILE * LINE * 2, left, (begin + s) * TILE);
    copies_commit();
    copies_wait();
    float sum[4] = {};
    int slot = 0, next = SLOTS - 1;
    for (int step = begin; step < end; step++) {
        if (step > begin + SLOTS - 2) copies_but<SLOTS - 2>();
        __syncthreads();
        if (step + SLOTS - 1 < end) {
            load_b(ring + next * SLOT_BYTES, right, n0, (step + SLOTS - 1) * TILE);
            load_a(ring + next * SLOT_BYTES + TILE * LINE * 2, left, (step + SLOTS - 1) * TILE);
        }
        copies_commit();
        multiply(sum, ring + slot * SLOT_BYTES);
        slot = slot + 1 < SLOTS ? slot + 1 : 0, next = next + 1 < SLOTS ? next + 1 : 0;
    }
    copies_wait();
    __syncthreads();
    const int lane = threadIdx.x % 32, column = threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < 4; i++)
        sums[(lane % 4 * 2 + i % 2) * SUM_ROW + column + i / 2 * 8] = sum[i];
    cluster_sync();
    write(a, n0, rank, sums);
    cluster_sync(); /* blocks stay until theirs is read */
}
